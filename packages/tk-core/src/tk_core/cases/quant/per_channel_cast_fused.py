"""Cases of quant.per_channel_cast_fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, bytes_of, call
from ._casts import (
    BF16,
    E4M3_FLAGS,
    FLAGS,
    FP32,
    bench_matrix,
    clear_by_block,
    misaligned,
    poisoned,
    quantized,
    strided,
)
from .per_channel_cast import block_of, numbers, plain, shapes

_MODES: dict[str, dict[str, Any]] = {"plain": {}, "rounded": {"round_sf": True}}


def _mapping(m: Maker, rows: int, tokens: int) -> Tensor:
    """Rows of experts, aligned: random tokens, with a run of -1 at the end of each expert."""
    index = m.randint(0, tokens, (rows,), torch.int32)
    position = torch.arange(rows, device=m.device)
    return index.masked_fill(position % 128 > 100, -1).masked_fill(position // 128 == 2, -1)


def _gathered(rows: int, tokens: int, columns: int, n: int, dtype: torch.dtype = BF16, **flags: Any) -> Any:
    def make(m: Maker) -> Call:
        index = _mapping(m, rows, max(tokens, 1))
        return call(m.randn(tokens, columns, dtype=dtype), "e4m3", n, pos_to_token=index, **flags)

    return make


def _requantized() -> list[Sample]:
    samples = []
    for name, flags_in in (FLAGS | E4M3_FLAGS).items():
        for mode, flags in _MODES.items():
            for gather in (False, True):

                def make(m: Maker, kw: Any = flags_in, out: Any = flags, gather: bool = gather) -> Call:
                    x = quantized(m, m.randn(133, 384), "e4m3", (1, 128), **kw)
                    index = _mapping(m, 400, 133) if gather else None
                    return call(x, "e4m3", 128, num_per_channels=128, pos_to_token=index, **out)

                level: Level = "quick" if gather or name in ("row-major", "packed column-major") else "full"
                why = f"quantized, scales {name}, {mode}" + (", gathered" if gather else "")
                samples.append(Sample(why, make, level))
    return samples


def _token_0(m: Maker, first: float = 1e4, **flags: Any) -> Call:
    """The first token is large and used only by the first rows: the tail must not see it."""
    x = m.full((9, 128), 1.0, BF16)
    x[0] = first
    return call(x, "e4m3", 128, pos_to_token=_first_16(m), **flags)


def _quantized_token_0(m: Maker) -> Call:
    sf = m.full((9, 4), 1.0)
    sf[0] = 1e4
    data = m.full((9, 128), 1.0).to(torch.float8_e4m3fn)
    return call((data, sf), "e4m3", 128, num_per_channels=32, pos_to_token=_first_16(m))


def _first_16(m: Maker) -> Tensor:
    index = torch.ones(144, dtype=torch.int32)
    index[:16] = 0
    return m.to(index)


def _constant(m: Maker, rows: int, tokens: int, index: int) -> Call:
    return call(m.randn(tokens, 64), "e4m3", 32, pos_to_token=m.full((rows,), index, torch.int32))


def _nan_not_gathered(m: Maker) -> Call:
    x = m.randn(8, 64)
    x[3] = float("nan")
    index = torch.tensor([0, 1, 2, -1, 4, 5, 6, 7] * 8, dtype=torch.int32)
    return call(x, "e4m3", 32, pos_to_token=m.to(index))


def _moe(m: Maker, columns: int, quantized_input: bool, **flags: Any) -> Call:
    """4001 tokens sent to 6 of 72 experts, of which 9 are here, aligned to 128."""
    rows = 4001 * 6 // 8 // 128 * 128 + 9 * 128
    index = _mapping(m, rows, 4001)
    x = bench_matrix(m, 4001, columns)
    if not quantized_input:
        return call(x, "e4m3", 128, pos_to_token=index, **flags)
    sf = m.full((4001, columns // 128), 0.125)
    return call((x.to(torch.float8_e4m3fn), sf), "e4m3", 128, num_per_channels=128, pos_to_token=index, **flags)


def _bytes(arguments: Call, results: list[Tensor]) -> int:
    """Each gathered row read once: rows by index, not those of ``x``."""
    index = arguments.kwargs.get("pos_to_token")
    if index is None:
        return bytes_of(arguments.args) + bytes_of(results)
    row = bytes_of([arguments.args[0]]) // max(tensor_rows(arguments.args[0]), 1)
    return row * int((index >= 0).sum()) + bytes_of([index]) + bytes_of(results)


def tensor_rows(x: Any) -> int:
    """Rows of a plain or quantized matrix."""
    return (x if isinstance(x, Tensor) else x[0]).shape[0]


CASES = {
    "quant.per_channel_cast_fused": Cases(
        samples=[
            *(plain(f"no gather, {mode}", 256, 128, 128, **flags) for mode, flags in _MODES.items()),
            *(
                Sample(
                    f"gather, groups of {n}, {mode}, {str(dtype).removeprefix('torch.')}",
                    _gathered(512, 77, 192, n, dtype, **flags),
                )
                for n in (32, 128)
                for mode, flags in _MODES.items()
                for dtype in (BF16, FP32)
            ),
            *shapes(),
            *numbers(_MODES),
            *_requantized(),
            Sample("P01: token 0 does not enter the tail", _token_0),
            Sample("P01: token 0 does not enter the tail, rounded", lambda m: _token_0(m, round_sf=True)),
            Sample("P01: NaN in token 0 does not enter the tail", lambda m: _token_0(m, float("nan"))),
            Sample("P01: the scale of token 0 does not enter the tail", _quantized_token_0),
            Sample("gather, a partial last group", _gathered(145, 40, 128, 128)),
            Sample("gather, K = 100", _gathered(145, 40, 100, 32)),
            Sample("gather, K = 35", _gathered(70, 40, 35, 32, FP32)),
            Sample("gather, no output row", _gathered(0, 40, 64, 32)),
            Sample("gather from no token: all masked", lambda m: _constant(m, 70, 0, -1)),
            Sample("every row masked", lambda m: _constant(m, 70, 5, -1)),
            Sample("other negative indices", lambda m: _constant(m, 70, 5, -2)),
            Sample("one token for every row", lambda m: _constant(m, 70, 5, 4)),
            Sample("NaN in a token that no row takes", _nan_not_gathered),
            Sample(
                "gather of NaN and Inf",
                lambda m: call(poisoned(m, 20, 64, BF16), "e4m3", 32, pos_to_token=_mapping(m, 200, 20)),
            ),
            Sample(
                "gather of strided rows",
                lambda m: call(strided(m, 20, 128, BF16, 8), "e4m3", 32, pos_to_token=_mapping(m, 200, 20)),
            ),
            Sample(
                "Q11: gather, misaligned base",
                lambda m: call(misaligned(m, 20, 128, BF16), "e4m3", 32, pos_to_token=_mapping(m, 200, 20)),
            ),
            Sample(
                "more than 2**31 elements out",
                lambda m: call(m.randn(64, 7168, dtype=BF16), "e4m3", 128, pos_to_token=_mapping(m, 299_594, 64)),
                "large",
            ),
        ],
        errors=[
            ErrorSample("e2m1", lambda m: call(m.randn(4, 64), "e2m1", 32), InvalidArgumentError, "fmt must be 'e4m3'"),
            ErrorSample(
                "int64 index",
                lambda m: call(m.randn(4, 64), "e4m3", 32, pos_to_token=m.full((4,), 0, torch.int64)),
                InvalidDtypeError,
                "pos_to_token must be int32",
            ),
            ErrorSample(
                "index of rank 2",
                lambda m: call(m.randn(4, 64), "e4m3", 32, pos_to_token=m.full((4, 1), 0, torch.int32)),
                InvalidArgumentError,
                "pos_to_token must have shape (M,)",
            ),
            ErrorSample(
                "strided index",
                lambda m: call(m.randn(4, 64), "e4m3", 32, pos_to_token=m.full((8,), 0, torch.int32)[::2]),
                InvalidArgumentError,
                "pos_to_token must be contiguous",
            ),
            ErrorSample(
                "quantized data without channels",
                lambda m: call(quantized(m, m.randn(4, 64), "e4m3", (1, 32)), "e4m3", 32),
                InvalidArgumentError,
                "num_per_channels",
            ),
        ],
        bench=[
            Point("v3-wgrad e4m3/128 4096x7168", lambda m: call(bench_matrix(m, 4096, 7168), "e4m3", 128)),
            Point("v3-wgrad top-6 bf16 7168", lambda m: _moe(m, 7168, False)),
            Point("v3-wgrad top-6 from 1x128 7168", lambda m: _moe(m, 7168, True)),
            Point("v3-wgrad top-6 from 1x128 rounded 2048", lambda m: _moe(m, 2048, True, round_sf=True)),
        ],
        bytes_moved=_bytes,
        unspecified=clear_by_block(block_of),
    ),
}
