"""Cases of quant.per_channel_cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, all_bytes, call
from ._casts import (
    BF16,
    E4M3_FLAGS,
    FLAGS,
    FP32,
    argument,
    around,
    bench_matrix,
    bound,
    boundaries,
    clear_by_block,
    misaligned,
    place,
    poisoned,
    quantized,
    strided,
    subnormals,
)

_MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rounded": {"round_sf": True},
    "packed": {"round_sf": True, "use_packed_ue8m0": True},
}


def columns_of(x: Tensor) -> Tensor:
    """What was written row by row, as columns."""
    return x.t().contiguous()


def plain(why: str, rows: int, columns: int, n: int, dtype: Any = BF16, level: Level = "quick", **flags: Any) -> Sample:
    """A random matrix of a shape."""
    return Sample(why, lambda m: call(m.randn(rows, columns, dtype=dtype), "e4m3", n, **flags), level)


def shapes() -> list[Sample]:
    """Every vector width, every tail, no and one row."""
    return [
        plain("no row", 0, 128, 32),
        plain("one row", 1, 128, 128),
        plain("one row, rounded", 1, 7168, 32, round_sf=True),
        plain("a group longer than the matrix", 5, 256, 128),
        plain("a group far longer than the matrix", 5, 256, 2**40),
        plain("a partial last group", 133, 256, 128),
        plain("groups of one row", 7, 64, 1),
        plain("groups of three rows", 10, 64, 3),
        plain("P02: K = 576", 131, 576, 32),
        plain("P02: 4001 rows, K = 576", 4001, 576, 128, BF16, "full"),
        plain("K = 100: not a multiple of 16 bytes", 65, 100, 32),
        plain("K = 35, odd", 37, 35, 32, FP32),
        plain("K = 1", 37, 1, 32),
        Sample("no column", lambda m: call(m.randn(5, 0), "e4m3", 32)),
        Sample("row-strided", lambda m: call(strided(m, 133, 256, BF16, 256), "e4m3", 128)),
        Sample("odd row stride", lambda m: call(strided(m, 70, 128, BF16, 3), "e4m3", 32)),
        Sample("Q11: misaligned base", lambda m: call(misaligned(m, 70, 128, BF16), "e4m3", 32)),
        Sample("Q11: misaligned fp32", lambda m: call(misaligned(m, 70, 128, FP32), "e4m3", 128)),
    ]


def numbers(modes: dict[str, dict[str, Any]]) -> list[Sample]:
    """Values at the edges of the format, along columns."""
    samples = []
    for mode, flags in modes.items():
        for dtype in (BF16, FP32):
            of = f"{mode}, {str(dtype).removeprefix('torch.')}"
            samples += [
                Sample(
                    f"every magnitude, {of}",
                    bound(lambda m, d, kw: call(m.magnitudes(130, 64, dtype=d), "e4m3", 32, **kw), d=dtype, kw=flags),
                ),
                Sample(
                    f"amax around 448 * 2**n, {of}",
                    bound(
                        lambda m, d, kw: call(columns_of(around(m, 448.0, 64, d)), "e4m3", 32, **kw), d=dtype, kw=flags
                    ),
                ),
                Sample(
                    f"NaN and Inf, {of}",
                    bound(
                        lambda m, d, kw: call(columns_of(poisoned(m, 64, 70, d)), "e4m3", 32, **kw), d=dtype, kw=flags
                    ),
                ),
            ]
        samples += [
            Sample(
                f"ties, {mode}",
                bound(lambda m, kw: call(columns_of(boundaries(m, "e4m3", 32)), "e4m3", 32, **kw), kw=flags),
            ),
            Sample(
                f"Q01: zeros, subnormals, huge values, {mode}",
                bound(lambda m, kw: call(columns_of(subnormals(m, 64)), "e4m3", 32, **kw), kw=flags),
            ),
        ]
    return samples


def _groups() -> list[Sample]:
    samples = []
    for mode, flags in _MODES.items():
        for n in (32, 128):
            for dtype in (BF16, FP32):
                of = f"groups of {n}, {mode}, {str(dtype).removeprefix('torch.')}"
                samples.append(plain(f"{of}", 640, 128, n, dtype, **flags))
                samples.append(plain(f"{of}, three groups: unused bytes", 3 * n - 1, 128, n, dtype, "full", **flags))
    samples.append(plain("packed, three groups: unused bytes", 95, 128, 32, **_MODES["packed"]))
    return samples


def _requantized() -> list[Sample]:
    samples = []
    for name, flags_in in (FLAGS | E4M3_FLAGS).items():
        for mode, flags in _MODES.items():
            for n, channels in ((32, 32), (128, 128), (32, 128)):

                def make(m: Maker, kw: Any = flags_in, out: Any = flags, n: int = n, c: int = channels) -> Call:
                    return call(
                        quantized(m, m.randn(261, 640), "e4m3", (1, c), **kw), "e4m3", n, num_per_channels=c, **out
                    )

                level: Level = "quick" if n == channels == 32 and mode != "rounded" else "full"
                why = f"from 1x{channels}, scales {name}, to groups of {n}, {mode}"
                samples.append(Sample(why, make, level))
    samples += [
        Sample("Q07: a slice of tokens of column-major scales", _token_slice),
        Sample("column-major scales with a larger leading stride", _leading_stride),
        Sample("requantized, K = 100, groups of 32", lambda m: _odd(m, 100)),
        Sample("requantized, K = 35", lambda m: _odd(m, 35)),
        Sample("NaN codes and scales", _nan_input),
        Sample("requantized, no row", lambda m: call(_pair(m, 0), "e4m3", 32, num_per_channels=32)),
    ]
    return samples


def _pair(m: Maker, rows: int = 64, **flags: Any) -> Any:
    return quantized(m, m.randn(rows, 128), "e4m3", (1, 32), **flags)


def _odd(m: Maker, columns: int) -> Call:
    x = quantized(m, m.randn(70, columns), "e4m3", (1, 32))
    return call(x, "e4m3", 32, num_per_channels=32)


def _token_slice(m: Maker) -> Call:
    data, sf = _pair(m, 100, **FLAGS["packed column-major"])
    return call((data[3:90], sf[3:90]), "e4m3", 32, True, 32)


def _leading_stride(m: Maker) -> Call:
    data, sf = _pair(m, 64)
    wide = m.full((4, 101), -1.0).t()[:64]
    return call((data, wide.copy_(sf)), "e4m3", 32, num_per_channels=32)


def _nan_input(m: Maker) -> Call:
    data, sf = _pair(m, 96)
    data.view(torch.uint8)[5, 3] = 0x7F
    sf[40, 1] = float("nan")
    return call((data, sf), "e4m3", 32, round_sf=True, num_per_channels=32)


def _bench_requantize(m: Maker) -> Call:
    data = bench_matrix(m, 8064, 7168).to(torch.float8_e4m3fn)
    word = torch.int32 if m.layout.ue8m0_per_word == 4 else torch.int16
    words = 224 // m.layout.ue8m0_per_word
    sf = place(m, m.full((8064, words), 0x7C7C, word), True, m.layout.sf_align_bytes)
    if m.layout.ue8m0_per_word == 4:
        sf |= 0x7C7C0000
    return call((data, sf), "e4m3", 32, True, 32, True)


def block_of(arguments: Call) -> tuple[int, int]:
    """The block of the scales that a call makes."""
    return argument(arguments, 2, "num_per_tokens"), 1


def point(name: str, rows: int, columns: int, n: int, dtype: torch.dtype = BF16, **flags: Any) -> Point:
    """A benchmark point on random values."""
    return Point(f"{name} {rows}x{columns}", lambda m: call(bench_matrix(m, rows, columns, dtype), "e4m3", n, **flags))


CASES = {
    "quant.per_channel_cast": Cases(
        samples=[
            *_groups(),
            *shapes(),
            *numbers(_MODES),
            *_requantized(),
            Sample("more than 2**31 elements", lambda m: call(m.large(299_594, 7168), "e4m3", 128), "large"),
        ],
        errors=[
            ErrorSample("e2m1", lambda m: call(m.randn(4, 64), "e2m1", 32), InvalidArgumentError, "fmt must be 'e4m3'"),
            ErrorSample(
                "group of 0", lambda m: call(m.randn(4, 64), "e4m3", 0), InvalidArgumentError, "num_per_tokens"
            ),
            ErrorSample("fp16", lambda m: call(m.randn(4, 64).half(), "e4m3", 32), InvalidDtypeError, "x must be"),
            ErrorSample("transposed", lambda m: call(m.randn(64, 4).t(), "e4m3", 32), InvalidArgumentError, "stride"),
            ErrorSample(
                "channels of plain data",
                lambda m: call(m.randn(4, 64), "e4m3", 32, num_per_channels=32),
                InvalidArgumentError,
                "num_per_channels must be given exactly when",
            ),
            ErrorSample(
                "quantized data without channels",
                lambda m: call(_pair(m), "e4m3", 32),
                InvalidArgumentError,
                "num_per_channels must be given exactly when",
            ),
            ErrorSample(
                "e2m1 data",
                lambda m: call(quantized(m, m.randn(64, 64), "e2m1", (1, 32)), "e4m3", 32, num_per_channels=32),
                InvalidDtypeError,
                "x[0] must be float8_e4m3fn",
            ),
            ErrorSample(
                "scales of another shape",
                lambda m: call(_pair(m), "e4m3", 32, num_per_channels=64),
                InvalidArgumentError,
                "x[1] must have shape (64, 2)",
            ),
            ErrorSample(
                "packed without round",
                lambda m: call(m.randn(64, 64), "e4m3", 32, use_packed_ue8m0=True),
                InvalidArgumentError,
                "use_packed_ue8m0",
            ),
        ],
        bench=[
            point("v3-wgrad e4m3/128", 8192, 7168, 128),
            point("v3-wgrad e4m3/128 fp32", 8192, 7168, 128, FP32),
            point("v4-wgrad e4m3/32 ue8m0", 8064, 7168, 32, **_MODES["packed"]),
            Point("v4-wgrad from 1x32 ue8m0 e4m3/32 ue8m0 8064x7168", _bench_requantize),
            *(
                point("e4m3/128", rows, columns, 128)
                for rows in (64, 512, 4001)
                for columns in (576, 2048, 5120, 7168, 16384)
            ),
        ],
        bytes_moved=all_bytes,
        unspecified=clear_by_block(block_of),
    ),
}
