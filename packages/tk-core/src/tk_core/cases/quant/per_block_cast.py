"""Cases of quant.per_block_cast and its variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from ...reference.scales import spread
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, all_bytes, call
from ._casts import (
    BF16,
    FLAGS,
    FP32,
    argument,
    around,
    bench_matrix,
    bound,
    boundaries,
    clear,
    clear_by_block,
    misaligned,
    poisoned,
    quantized,
    strided,
    subnormals,
)

Block = tuple[int, int]
_BLOCKS: list[Block] = [(128, 128), (32, 32), (128, 32), (32, 128), (1, 128), (32, 1)]
_SQUARE: Block = (32, 32)


def _plain(
    why: str,
    rows: int,
    columns: int,
    fmt: str,
    block: Block,
    dtype: torch.dtype = BF16,
    level: Level = "quick",
    **flags: Any,
) -> Sample:
    return Sample(why, lambda m: call(m.randn(rows, columns, dtype=dtype), fmt, block, **flags), level)


def _layouts() -> list[Sample]:
    samples = []
    for block in _BLOCKS:
        for name, flags in FLAGS.items():
            if block[1] == 1 and name == "packed column-major":
                continue
            for fmt in ("e4m3", "e2m1"):
                for dtype in (BF16, FP32):
                    of = f"{fmt} in blocks {block[0]}x{block[1]}, {name}, {str(dtype).removeprefix('torch.')}"
                    quick = block in (_SQUARE, (128, 128)) and (dtype == BF16) == (fmt == "e4m3")
                    samples.append(_plain(of, 261, 320, fmt, block, dtype, "quick" if quick else "full", **flags))
    return samples


def _shapes() -> list[Sample]:
    return [
        _plain("no row", 0, 128, "e4m3", (128, 128)),
        _plain("no row, packed column-major", 0, 128, "e2m1", _SQUARE, **FLAGS["packed column-major"]),
        _plain("one row", 1, 128, "e4m3", (128, 128)),
        _plain("one row, packed column-major", 1, 160, "e4m3", _SQUARE, **FLAGS["packed column-major"]),
        _plain("a block larger than the matrix", 5, 48, "e2m1", (128, 128)),
        _plain("a block far larger than the matrix", 5, 48, "e2m1", (2**40, 2**40)),
        _plain("rows as blocks, far wider than K", 5, 48, "e4m3", (1, 2**40)),
        _plain("P02: K = 576", 131, 576, "e4m3", (128, 128)),
        *(
            _plain(f"P02: 4001 rows, K = 576, {name}", 4001, 576, "e4m3", (128, 128), BF16, "full", **flags)
            for name, flags in FLAGS.items()
        ),
        _plain("K not a multiple of 16 bytes", 67, 100, "e4m3", _SQUARE),
        _plain("K not a multiple of 16 bytes, e2m1", 67, 100, "e2m1", _SQUARE),
        _plain("K = 35, odd", 37, 35, "e4m3", _SQUARE, FP32),
        _plain("blocks of odd size", 20, 70, "e2m1", (3, 7)),
        _plain("blocks of one column, packed along the rows", 300, 64, "e4m3", (32, 1), **FLAGS["packed"]),
        _plain("blocks of one column, few rows", 7, 64, "e2m1", (32, 1), **FLAGS["packed"]),
        Sample("no column", lambda m: call(m.randn(3, 0), "e4m3", _SQUARE)),
        Sample("row-strided", lambda m: call(strided(m, 130, 256, BF16, 256), "e4m3", (128, 128))),
        Sample("odd row stride", lambda m: call(strided(m, 33, 256, BF16, 3), "e2m1", _SQUARE)),
        Sample("Q11: misaligned base", lambda m: call(misaligned(m, 33, 256, BF16), "e4m3", (128, 128))),
        Sample("Q11: misaligned fp32", lambda m: call(misaligned(m, 33, 256, FP32), "e2m1", _SQUARE)),
    ]


def _numbers() -> list[Sample]:
    samples = []
    for mode, flags in (("plain", {}), ("rounded", {"round_sf": True}), ("packed", FLAGS["packed column-major"])):
        for fmt, qmax in (("e4m3", 448.0), ("e2m1", 6.0)):
            for dtype in (BF16, FP32):
                of = f"{mode}, {fmt}, {str(dtype).removeprefix('torch.')}"
                samples += [
                    Sample(
                        f"every magnitude, {of}",
                        bound(
                            lambda m, f, d, kw: call(m.magnitudes(70, 96, dtype=d), f, _SQUARE, **kw),
                            f=fmt,
                            d=dtype,
                            kw=flags,
                        ),
                    ),
                    Sample(
                        f"amax around qmax * 2**n, {of}",
                        bound(
                            lambda m, f, d, q, kw: call(_tall(around(m, q, 32, d)), f, _SQUARE, **kw),
                            f=fmt,
                            d=dtype,
                            q=qmax,
                            kw=flags,
                        ),
                    ),
                    Sample(
                        f"NaN and Inf, {of}",
                        bound(
                            lambda m, f, d, kw: call(poisoned(m, 70, 160, d)[::7], f, (4, 32), **kw),
                            f=fmt,
                            d=dtype,
                            kw=flags,
                        ),
                        "full",
                    ),
                    Sample(
                        f"one NaN and one Inf among many blocks, {of}",
                        bound(lambda m, f, d, kw: call(_sprinkled(m, d), f, _SQUARE, **kw), f=fmt, d=dtype, kw=flags),
                    ),
                ]
            samples += [
                Sample(
                    f"ties, {mode}, {fmt}",
                    bound(lambda m, f, kw: call(boundaries(m, f, 32), f, _SQUARE, **kw), f=fmt, kw=flags),
                ),
                Sample(
                    f"Q01: zeros, subnormals, huge values, {mode}, {fmt}",
                    bound(lambda m, f, kw: call(_tall(subnormals(m, 64)), f, _SQUARE, **kw), f=fmt, kw=flags),
                ),
            ]
    return samples


def _tall(x: Tensor) -> Tensor:
    """Each row in a block of its own, of 32 rows; the others hold smaller values."""
    y = x[:, None, :].expand(-1, 32, -1) * torch.linspace(1.0, 0.0, 32, device=x.device)[:, None].to(x.dtype)
    return y.reshape(-1, x.shape[1]).contiguous()


def _sprinkled(m: Maker, dtype: torch.dtype) -> Tensor:
    x = m.randn(130, 160)
    x[5, 40], x[129, 159] = float("nan"), float("-inf")
    return x.to(dtype)


def _codes(m: Maker, rows: int, columns: int) -> Tensor:
    return m.full((rows, columns), 0, torch.int8).view(torch.float8_e4m3fn)


def _into(m: Maker, sf: Tensor, **flags: Any) -> Call:
    return call(m.randn(70, 160), "e4m3", _SQUARE, out=(_codes(m, 70, 160), sf), **flags)


def _buffers() -> list[Sample]:
    return [
        Sample("out=", lambda m: _into(m, m.full((3, 5), -1.0))),
        Sample("out= with a row stride", lambda m: _into(m, m.full((3, 9), -1.0)[:, :5])),
        Sample("out= packed", lambda m: _into(m, _words(m), **FLAGS["packed"])),
        Sample("out=(None, sf)", lambda m: call(m.randn(70, 160), "e4m3", _SQUARE, out=(None, m.full((3, 5), -1.0)))),
    ]


def _words(m: Maker) -> Tensor:
    per_word = m.layout.ue8m0_per_word
    return m.full((3, -(-5 // per_word)), -1, torch.int32 if per_word == 4 else torch.int16)


_LARGE = [
    Sample("Q15: more than 2**31 elements", lambda m: call(m.large(300_000, 7168), "e4m3", (128, 128)), "large"),
    Sample("Q15: more than 2**31 elements, e2m1", lambda m: call(m.large(300_000, 7168), "e2m1", (32, 32)), "large"),
]

_ERRORS = [
    ErrorSample("fp16", lambda m: call(m.randn(4, 64).half(), "e4m3", _SQUARE), InvalidDtypeError, "x must be"),
    ErrorSample("unknown format", lambda m: call(m.randn(4, 64), "e5m6", _SQUARE), InvalidArgumentError, "fmt must be"),
    ErrorSample("rank 3", lambda m: call(m.randn(2, 4, 64), "e4m3", _SQUARE), InvalidArgumentError, "shape (M, K)"),
    ErrorSample("Q09: transposed", lambda m: call(m.randn(64, 4).t(), "e4m3", _SQUARE), InvalidArgumentError, "stride"),
    ErrorSample("block of 0", lambda m: call(m.randn(4, 64), "e4m3", (0, 32)), InvalidArgumentError, "block_size[0]"),
    ErrorSample("block as a number", lambda m: call(m.randn(4, 64), "e4m3", 32), InvalidArgumentError, "block_size"),
    ErrorSample("odd columns", lambda m: call(m.randn(4, 63), "e2m1", _SQUARE), InvalidArgumentError, "even number"),
    ErrorSample(
        "packed without round",
        lambda m: call(m.randn(4, 64), "e4m3", _SQUARE, use_packed_ue8m0=True),
        InvalidArgumentError,
        "use_packed_ue8m0",
    ),
    ErrorSample(
        "packed along the rows and column-major",
        lambda m: call(m.randn(64, 64), "e4m3", (32, 1), **FLAGS["packed column-major"]),
        InvalidArgumentError,
        "blocks of one column",
    ),
]


def _with_sf(
    m: Maker, fmt: str, dtype: torch.dtype, block: Block, gap: int = 0, round_sf: bool = True, rows: int = 131
) -> Call:
    x = m.randn(rows, 320, dtype=dtype)
    _, sf = quantized(m, x.float(), fmt, block, round_sf=round_sf)
    wide = m.full((sf.shape[0], sf.shape[1] + gap), -1.0)[:, : sf.shape[1]]
    return call(x, fmt, block, wide.copy_(sf), round_sf=round_sf)


def _edges(m: Maker) -> Call:
    """Scales that are not powers of two, tiny, huge, zero."""
    sf = m.tensor([[3.0], [1e-3], [2.0**-149], [3e38], [2.0**-126], [0.0], [float("inf")]], torch.float32)
    x = m.randn(14, 64)
    x[:, 5], x[:, 6] = 0.0, -0.0
    return call(x, "e4m3", (2, 64), sf)


def _clear_nan_codes(arguments: Call, results: list[Tensor]) -> None:
    """e2m1 has no NaN: its code there says nothing."""
    x, block, sf = arguments.args[0], arguments.args[2], arguments.args[3]
    clear(results[0], (x.float() * spread(1.0 / sf, *block, *x.shape)).isnan())


_PRECOMPUTED = [
    *(
        Sample(
            f"{fmt} in blocks {block[0]}x{block[1]}, {str(dtype).removeprefix('torch.')}",
            bound(lambda m, f, d, b: _with_sf(m, f, d, b), f=fmt, d=dtype, b=block),
            "quick" if block in ((128, 128), (32, 32)) else "full",
        )
        for fmt in ("e4m3", "e2m1")
        for dtype in (BF16, FP32)
        for block in _BLOCKS
    ),
    Sample("scales that are not powers of two, bf16", lambda m: _with_sf(m, "e2m1", BF16, _SQUARE, round_sf=False)),
    Sample("scales that are not powers of two, fp32", lambda m: _with_sf(m, "e4m3", FP32, _SQUARE, round_sf=False)),
    Sample("scales with a row stride", lambda m: _with_sf(m, "e4m3", BF16, (128, 128), gap=5)),
    Sample(
        "Q11: misaligned base of data and scales",
        lambda m: call(misaligned(m, 33, 256, BF16), "e4m3", _SQUARE, misaligned(m, 2, 8, FP32).abs_().add_(0.01)),
    ),
    Sample("scales at the edges", _edges),
    Sample("no row", lambda m: _with_sf(m, "e4m3", BF16, _SQUARE, rows=0)),
    Sample("K = 35, odd", lambda m: call(m.randn(5, 35), "e4m3", _SQUARE, m.full((1, 2), 0.01))),
    Sample("out=", lambda m: call(m.randn(5, 64), "e4m3", _SQUARE, m.full((1, 2), 0.01), out=_codes(m, 5, 64))),
    Sample(
        "more than 2**31 elements",
        lambda m: call(m.large(300_000, 7168), "e4m3", (128, 128), m.full((2344, 56), 2.0**-7)),
        "large",
    ),
]


def _block(arguments: Call) -> Block:
    return argument(arguments, 2, "block_size")


def _point(
    name: str, rows: int, columns: int, fmt: str, block: Block, dtype: torch.dtype = BF16, **flags: Any
) -> Point:
    return Point(f"{name} {rows}x{columns}", lambda m: call(bench_matrix(m, rows, columns, dtype), fmt, block, **flags))


_BENCH = [
    _point("v3-weights e4m3 128x128", 7168, 4096, "e4m3", (128, 128)),
    _point("v4-experts e4m3 32x32 rounded", 16384, 7168, "e4m3", (32, 32), round_sf=True),
    _point("v3-weights e4m3 128x128 fp32", 7168, 4096, "e4m3", (128, 128), FP32),
    _point("v3-experts e4m3 128x128", 16384, 7168, "e4m3", (128, 128)),
    _point("v3-experts e4m3 128x128 fp32", 16384, 7168, "e4m3", (128, 128), FP32),
    _point("v4-experts e2m1 32x32 ue8m0", 16384, 7168, "e2m1", (32, 32), **FLAGS["packed column-major"]),
    *(
        _point("e4m3 128x128", rows, columns, "e4m3", (128, 128))
        for rows in (64, 512, 4001)
        for columns in (576, 2048, 5120, 7168, 16384)
    ),
]

CASES = {
    "quant.per_block_cast": Cases(
        samples=[*_layouts(), *_shapes(), *_numbers(), *_buffers(), *_LARGE],
        errors=_ERRORS,
        bench=_BENCH,
        bytes_moved=all_bytes,
        unspecified=clear_by_block(_block),
    ),
    "quant.per_block_cast_with_sf_only": Cases(
        samples=[
            *_layouts(),
            *_shapes(),
            *_numbers(),
            Sample("out_sf=", lambda m: call(m.randn(70, 160), "e4m3", _SQUARE, out_sf=m.full((3, 5), -1.0))),
            Sample(
                "out_sf= with a row stride",
                lambda m: call(m.randn(70, 160), "e4m3", _SQUARE, out_sf=m.full((3, 9), -1.0)[:, :5]),
            ),
            *_LARGE,
        ],
        errors=_ERRORS,
        bench=_BENCH[:2],
        bytes_moved=all_bytes,
    ),
    "quant.per_block_cast_with_precomputed_sf": Cases(
        samples=_PRECOMPUTED,
        errors=[
            ErrorSample(
                "scales of another shape",
                lambda m: call(m.randn(64, 64), "e4m3", _SQUARE, m.full((2, 3), 1.0)),
                InvalidArgumentError,
                "sf must have shape (2, 2)",
            ),
            ErrorSample(
                "e4m3 scales",
                lambda m: call(m.randn(64, 64), "e4m3", _SQUARE, m.full((2, 2), 1.0).to(torch.float8_e4m3fn)),
                InvalidDtypeError,
                "sf must be float32",
            ),
            ErrorSample(
                "column-major flag",
                lambda m: call(m.randn(64, 64), "e4m3", _SQUARE, m.full((2, 2), 1.0), True),
                InvalidArgumentError,
                "use_tma_aligned_col_major_sf",
            ),
        ],
        bench=[
            Point(
                "v3-weights e4m3 128x128 7168x4096",
                lambda m: call(bench_matrix(m, 7168, 4096), "e4m3", (128, 128), m.full((56, 32), 2.0**-7)),
            )
        ],
        bytes_moved=all_bytes,
        unspecified=_clear_nan_codes,
    ),
}
