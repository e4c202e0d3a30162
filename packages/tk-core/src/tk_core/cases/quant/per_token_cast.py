"""Cases of quant.per_token_cast and its variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from ...formats import FORMATS
from ...reference.scales import spread
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
    clear,
    clear_by_block,
    grid,
    misaligned,
    poisoned,
    quantized,
    strided,
    subnormals,
)

_ALL_FLAGS = FLAGS | E4M3_FLAGS


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(
    why: str,
    rows: int,
    columns: int,
    fmt: str,
    n: int,
    dtype: torch.dtype = BF16,
    level: Level = "quick",
    **flags: Any,
) -> Sample:
    return Sample(why, lambda m: call(m.randn(rows, columns, dtype=dtype), fmt, n, **flags), level)


_MANY: list[tuple[int, Level]] = [(515, "quick"), (16387, "full")]
"""Rows of which a thread takes several."""


def _shapes() -> list[Sample]:
    """Every vector width, every tail, no and one token."""
    shapes = [
        ("one token", 1, 7168, 128),
        ("no token", 0, 128, 32),
        ("K = 192 with groups of 128: a partial last group", 3, 192, 128),
        ("P02: K = 576, rows past a tile", 131, 576, 128),
        ("K not a multiple of 16 bytes", 5, 100, 32),
        ("K = 2: the smallest pair", 3, 2, 16),
        ("groups of one column", 2, 12, 1),
        ("groups of three columns, across bytes of e2m1", 4, 22, 3),
        ("groups wider than K", 2, 48, 128),
        ("groups far wider than K", 2, 48, 2**40),
        ("whole rows as groups", 3, 2048, 2048),
        ("K = 16384", 2, 16384, 64),
    ]
    samples = [_plain(f"{why}, {fmt}", m, k, fmt, n) for why, m, k, n in shapes for fmt in ("e4m3", "e2m1")]
    samples += [
        _plain(f"{k} columns, odd, {_dtype(d)}", 3, k, "e4m3", 32, d) for k in (1, 35, 129) for d in (BF16, FP32)
    ]
    samples.append(Sample("no column", lambda m: call(m.randn(3, 0), "e4m3", 32)))
    # Many rows, so that a thread takes several, and a last group of one vector: fewer columns than rows of a thread.
    samples += [
        _plain(
            f"a last group of two columns in {m} rows, {name}, e2m1 in groups of {n}",
            m,
            k,
            "e2m1",
            n,
            BF16,
            level,
            **flags,
        )
        for m, level in _MANY
        for n, k in ((32, 290), (128, 514))
        for name, flags in (("row-major", {}), ("packed column-major", FLAGS["packed column-major"]))
    ]
    return samples


def _layouts() -> list[Sample]:
    """Every layout with every format and dtype; five groups leave an unused byte in words of 4 and of 2."""
    samples = []
    for name, flags in _ALL_FLAGS.items():
        for fmt in ("e4m3", "e2m1"):
            for dtype in (BF16, FP32):
                for n in (16, 32, 128):
                    why = f"{name}, {fmt} in groups of {n}, {_dtype(dtype)}"
                    level: Level = "quick" if n == 32 else "full"
                    samples.append(_plain(why, 7, 5 * n, fmt, n, dtype, level, **flags))
        samples.append(_plain(f"{name}, one token", 1, 160, "e4m3", 32, **flags))
        samples.append(_plain(f"{name}, no token", 0, 160, "e4m3", 32, **flags))
        samples.append(_plain(f"{name}, more rows than a tile", 300, 160, "e4m3", 32, **flags))
        samples.append(_plain(f"{name}, one group", 5, 32, "e4m3", 32, BF16, "full", **flags))
        samples.append(_plain(f"P02: {name}, 4001 rows, K = 576", 4001, 576, "e4m3", 128, BF16, "full", **flags))
    return samples


_MODES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("rounded", {"round_sf": True}),
    ("packed", FLAGS["packed column-major"]),
    ("e4m3 scales", {"use_e4m3_sf": True}),
]


def _numbers() -> list[Sample]:
    """Values at the edges of the formats, in every mode."""
    samples = []
    for mode, flags in _MODES:
        for fmt in ("e4m3", "e2m1"):
            qmax = FORMATS[fmt].qmax
            for dtype in (BF16, FP32):
                of = f"{mode}, {fmt}, {_dtype(dtype)}"
                samples += [
                    Sample(
                        f"every magnitude, {of}",
                        bound(
                            lambda m, fmt, dtype, flags: call(m.magnitudes(32, 160, dtype=dtype), fmt, 32, **flags),
                            fmt=fmt,
                            dtype=dtype,
                            flags=flags,
                        ),
                    ),
                    Sample(
                        f"rows of every magnitude, {of}",
                        bound(
                            lambda m, fmt, dtype, flags: call(_scaled_rows(m, 200, 160).to(dtype), fmt, 32, **flags),
                            fmt=fmt,
                            dtype=dtype,
                            flags=flags,
                        ),
                    ),
                    Sample(
                        f"amax around qmax * 2**n, {of}",
                        bound(
                            lambda m, fmt, dtype, flags, qmax: call(around(m, qmax, 32, dtype), fmt, 32, **flags),
                            fmt=fmt,
                            dtype=dtype,
                            flags=flags,
                            qmax=qmax,
                        ),
                    ),
                    Sample(
                        f"NaN and Inf, {of}",
                        bound(
                            lambda m, fmt, dtype, flags: call(poisoned(m, 13, 160, dtype), fmt, 32, **flags),
                            fmt=fmt,
                            dtype=dtype,
                            flags=flags,
                        ),
                    ),
                ]
            samples += [
                Sample(
                    f"amax around powers of two, worked out by hand, {mode}, {fmt}",
                    bound(lambda m, fmt, flags: call(_worked_amaxes(m), fmt, 32, **flags), fmt=fmt, flags=flags),
                ),
                Sample(
                    f"ties and the numbers next to them, {mode}, {fmt}",
                    bound(lambda m, fmt, flags: call(boundaries(m, fmt, 64), fmt, 64, **flags), fmt=fmt, flags=flags),
                ),
                Sample(
                    f"Q01, Q13: zeros, negative zeros, subnormals, huge values, {mode}, {fmt}",
                    bound(lambda m, fmt, flags: call(subnormals(m, 160), fmt, 32, **flags), fmt=fmt, flags=flags),
                ),
            ]
    return samples


def _worked_amaxes(m: Maker) -> Tensor:
    """In the last column of each row: logarithms in fp32 round the first down, bf16 the last."""
    x = m.full((6, 32), 0.0)
    x[:, 31] = m.tensor([0.43750003, 448.0, 449.0, 896.0, 224.0, 448.4375], FP32)
    return x


def _scaled_rows(m: Maker, rows: int, columns: int) -> Tensor:
    """Each row has its own magnitude, so that scales take every exponent."""
    exponents = torch.linspace(-149, 120, rows).round().to(m.device)
    return m.randn(rows, columns) * torch.exp2(exponents)[:, None]


def _strides() -> list[Sample]:
    samples = []
    for fmt in ("e4m3", "e2m1"):
        samples += [
            Sample(f"aligned row stride, {fmt}", bound(lambda m, f: call(strided(m, 9, 256, BF16, 256), f, 32), f=fmt)),
            Sample(f"odd row stride, {fmt}", bound(lambda m, f: call(strided(m, 9, 256, BF16, 3), f, 32), f=fmt)),
            Sample(
                f"Q11: misaligned base, {fmt}", bound(lambda m, f: call(misaligned(m, 9, 256, BF16), f, 128), f=fmt)
            ),
        ]
    samples += [
        Sample("misaligned fp32", lambda m: call(misaligned(m, 5, 128, FP32), "e4m3", 32)),
        Sample("Q19: expanded rows", lambda m: call(m.randn(1, 256, dtype=BF16).expand(129, 256), "e4m3", 32)),
        Sample("Q19: 4097 rows", lambda m: call(m.randn(4097, 64, dtype=BF16), "e4m3", 32), "full"),
    ]
    return samples


def _requantized() -> list[Sample]:
    """Every input layout and format to every output format; scales that are not powers of two included."""
    samples = []
    for name, flags in _ALL_FLAGS.items():
        for fmt_in in ("e4m3", "e2m1"):
            for block in ((1, 32), (32, 32), (128, 128), (1, 128)):
                why = f"from {fmt_in} in blocks {block[0]}x{block[1]}, scales {name}"

                def make(m: Maker, fmt_in: str = fmt_in, block: Any = block, flags: Any = flags) -> Call:
                    x = quantized(m, m.randn(37, 640), fmt_in, block, **flags)
                    fmt = "e4m3" if fmt_in == "e2m1" else "e2m1"
                    return call(x, fmt, 32 if block[1] == 128 else 128, block, **_same_mode(flags))

                level: Level = "quick" if block[0] == 1 or "column" in name else "full"
                samples.append(Sample(why, make, level))
    samples += [
        Sample("from e4m3 to e4m3, plain scales", lambda m: _requantize(m, "e4m3", "e4m3", {})),
        Sample("from e2m1 to e2m1, packed", lambda m: _requantize(m, "e2m1", "e2m1", FLAGS["packed column-major"])),
        Sample("from blocks of one column, packed along the rows", _from_columns),
        Sample("from blocks of odd size", _from_odd_blocks),
        Sample("Q07: scales with a row stride", _strided_scales),
        Sample("Q07: M = 5, K = 640, packed column-major scales", _q07),
        Sample("P02: amax 448.4375 kept in fp32", _p02),
        Sample("e4m3 NaN codes and UE8M0 NaN scales", _nan_input),
        Sample("no token", lambda m: call(quantized(m, m.randn(0, 128), "e4m3", (1, 32)), "e2m1", 32, (1, 32))),
    ]
    return samples


def _same_mode(flags: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in flags.items() if k in ("round_sf", "use_packed_ue8m0", "use_tma_aligned_col_major_sf")}


def _requantize(m: Maker, fmt_in: str, fmt: str, flags: dict[str, Any]) -> Call:
    return call(quantized(m, m.randn(9, 512), fmt_in, (1, 64), **flags), fmt, 32, (1, 64), **flags)


def _from_columns(m: Maker) -> Call:
    x = quantized(m, m.randn(70, 64), "e4m3", (32, 1), round_sf=True, use_packed_ue8m0=True)
    return call(x, "e4m3", 32, (32, 1), round_sf=True)


def _from_odd_blocks(m: Maker) -> Call:
    return call(quantized(m, m.randn(10, 70), "e4m3", (3, 5)), "e2m1", 7, (3, 5))


def _strided_scales(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 256), "e4m3", (1, 32))
    wide = m.full((9, 11), -1.0)
    wide[:, :8] = sf
    return call((data, wide[:, :8]), "e4m3", 64, (1, 32))


def _q07(m: Maker) -> Call:
    x = quantized(m, m.randn(5, 640), "e4m3", (1, 128), **FLAGS["packed column-major"])
    return call(x, "e4m3", 128, (1, 128), round_sf=True)


def _p02(m: Maker) -> Call:
    data = m.full((1, 32), 0.0).to(torch.float8_e4m3fn)
    data[0, 3] = 448.0
    return call((data, m.full((1, 1), 1.0009766)), "e4m3", 32, (1, 32), **FLAGS["packed"])


def _nan_input(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(4, 128), "e4m3", (1, 32), **FLAGS["packed"])
    data.view(torch.uint8)[0, 3] = 0x7F
    data.view(torch.uint8)[1, 90] = 0xFF
    sf.view(torch.uint8)[2, 1] = 255
    return call((data, sf), "e2m1", 64, (1, 32), round_sf=True)


def _stochastic() -> list[Sample]:
    samples = []
    for mode, flags in _MODES:
        for fmt in ("e4m3", "e2m1"):
            for dtype in (BF16, FP32):
                samples.append(
                    _plain(
                        f"stochastic, {mode}, {fmt}, {_dtype(dtype)}",
                        9,
                        320,
                        fmt,
                        32,
                        dtype,
                        stochastic_cast=True,
                        **flags,
                    )
                )
    samples += [
        _plain(f"stochastic, {k} columns: a last quad of {k % 4}", 5, k, "e4m3", 32, stochastic_cast=True)
        for k in (33, 34, 35)
    ]
    samples += [
        _plain("stochastic e2m1, a last quad of 2", 5, 38, "e2m1", 16, stochastic_cast=True),
        Sample("stochastic, ties", lambda m: call(boundaries(m, "e4m3", 64), "e4m3", 64, stochastic_cast=True)),
        Sample("stochastic, e2m1 ties", lambda m: call(boundaries(m, "e2m1", 64), "e2m1", 64, stochastic_cast=True)),
        Sample("stochastic, subnormals", lambda m: call(subnormals(m, 64), "e4m3", 32, stochastic_cast=True)),
        Sample("stochastic, NaN and Inf", lambda m: call(poisoned(m, 7, 64, BF16), "e4m3", 32, stochastic_cast=True)),
        Sample("Q17: 1.96875 with scale 1", _q17),
        Sample(
            "stochastic, requantized",
            lambda m: call(
                quantized(m, m.randn(9, 128), "e4m3", (1, 32)), "e2m1", 32, (1, 32), stochastic_cast=True, round_sf=True
            ),
        ),
    ]
    return samples


def _q17(m: Maker) -> Call:
    x = m.full((16, 1024), 1.96875)
    x[:, ::128] = 448.0
    return call(x, "e4m3", 128, stochastic_cast=True)


def _buffers() -> list[Sample]:
    return [
        Sample("out=", lambda m: _into(m, {}, m.full((6, 5), -1.0))),
        Sample("out= packed", lambda m: _into(m, FLAGS["packed"], _words(m, 6, 5))),
        Sample("out= with a row stride", lambda m: _into(m, {}, m.full((6, 9), -1.0)[:, :5])),
        Sample("out=(None, sf)", lambda m: call(m.randn(6, 160), "e4m3", 32, out=(None, m.full((6, 5), -1.0)))),
        Sample("out=(q, None)", lambda m: call(m.randn(6, 160), "e2m1", 32, out=(_codes(m, 6, 80, torch.int8), None))),
    ]


def _words(m: Maker, rows: int, groups: int) -> Tensor:
    per_word = m.layout.ue8m0_per_word
    return m.full((rows, -(-groups // per_word)), -1, torch.int32 if per_word == 4 else torch.int16)


def _codes(m: Maker, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return m.full((rows, columns), 0, torch.int8).view(dtype)


def _into(m: Maker, flags: dict[str, Any], sf: Tensor) -> Call:
    return call(m.randn(6, 160), "e4m3", 32, out=(_codes(m, 6, 160, torch.float8_e4m3fn), sf), **flags)


def _large() -> list[Sample]:
    rows = 299_594
    return [
        Sample("Q15: more than 2**31 elements", lambda m: call(m.large(rows, 7168), "e4m3", 128), "large"),
        Sample(
            "Q15: more than 2**31 elements, e2m1 packed column-major",
            lambda m: call(m.large(rows, 7168), "e2m1", 32, **FLAGS["packed column-major"]),
            "large",
        ),
    ]


def _wrong(why: str, error: type[Exception], match: str, *args: Any, **kwargs: Any) -> ErrorSample:
    """A wrong call on a small matrix, or on the arguments that ``args[0]`` makes."""
    make = args[0] if args and callable(args[0]) else lambda m: m.randn(4, 64)
    rest = args[1:] if args and callable(args[0]) else args
    return ErrorSample(why, lambda m: call(make(m), *rest, **kwargs), error, match)


def _pair(m: Maker, sf_dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    data, sf = quantized(m, m.randn(4, 64), "e4m3", (1, 32))
    return data, sf.to(sf_dtype)


def _every_other(m: Maker) -> tuple[Tensor, Tensor]:
    return _pair(m)[0], m.full((4, 4), 1.0)[:, ::2]


_ERRORS = [
    _wrong("unknown format", InvalidArgumentError, "fmt must be", "e3m4", 32),
    _wrong("group of 0", InvalidArgumentError, "num_per_channels must be at least 1", "e4m3", 0),
    _wrong("packed without round", InvalidArgumentError, "use_packed_ue8m0", "e4m3", 32, use_packed_ue8m0=True),
    _wrong("e4m3 scales with round", InvalidArgumentError, "use_e4m3_sf", "e4m3", 32, round_sf=True, use_e4m3_sf=True),
    _wrong("rank 3", InvalidArgumentError, "x must have shape (M, K)", lambda m: m.randn(2, 3, 64), "e4m3", 32),
    _wrong("Q09: transposed", InvalidArgumentError, "unit stride", lambda m: m.randn(64, 4).t(), "e4m3", 32),
    _wrong(
        "Q09: every other column", InvalidArgumentError, "unit stride", lambda m: m.randn(4, 64)[:, ::2], "e4m3", 32
    ),
    _wrong("fp16", InvalidDtypeError, "x must be bfloat16", lambda m: m.randn(4, 64).half(), "e4m3", 32),
    _wrong("odd columns", InvalidArgumentError, "even number of columns", lambda m: m.randn(4, 63), "e2m1", 32),
]

_TOKEN_ERRORS = [
    *_ERRORS,
    _wrong("block size of plain data", InvalidArgumentError, "x_block_size", "e4m3", 32, (1, 32)),
    _wrong("quantized without block size", InvalidArgumentError, "x_block_size", _pair, "e4m3", 32),
    _wrong("block of 0 rows", InvalidArgumentError, "x_block_size[0]", _pair, "e4m3", 32, (0, 32)),
    _wrong("scales of other blocks", InvalidArgumentError, "x[1] must have shape", _pair, "e4m3", 32, (1, 64)),
    _wrong("fp16 scales", InvalidDtypeError, "x[1] must be", lambda m: _pair(m, torch.float16), "e4m3", 32, (1, 32)),
    _wrong("scales in no order", InvalidArgumentError, "row-major or column-major", _every_other, "e4m3", 32, (1, 32)),
    _wrong("list for a pair", InvalidDtypeError, "x must be a tensor or a pair", lambda m: list(_pair(m)), "e4m3", 32),
    ErrorSample(
        "column-major buffer",
        lambda m: _into(m, FLAGS["column-major"], m.full((6, 5), 0.0)),
        InvalidArgumentError,
        "out[1]",
    ),
    ErrorSample("buffer of another shape", lambda m: _into(m, {}, m.full((6, 4), 0.0)), InvalidArgumentError, "out[1]"),
    ErrorSample(
        "buffer of another dtype", lambda m: _into(m, FLAGS["packed"], m.full((6, 5), 0.0)), InvalidDtypeError, "out[1]"
    ),
]


def _with_sf(m: Maker, dtype: torch.dtype = BF16, fmt: str = "e4m3", gap: int = 0, **flags: Any) -> Call:
    """A matrix with its own rounded scales (or those of another mode), to be quantized with them."""
    x = m.randn(9, 320, dtype=dtype)
    _, sf = quantized(m, x.float(), fmt, (1, 32), **(flags or {"round_sf": True}))
    wide = torch.empty((9, 10 + gap), dtype=sf.dtype, device=m.device)[:, :10].copy_(sf)
    return call(x, fmt, 32, wide, **flags)


def _given(m: Maker, values: list[float], dtype: torch.dtype = FP32) -> Call:
    """Any scales: not powers of two, tiny, huge, zero."""
    x = m.randn(len(values), 64)
    x[:, 5], x[:, 6] = 0.0, -0.0
    sf = m.tensor(values, torch.float32)[:, None].expand(-1, 2).contiguous().to(dtype)
    return call(x, "e4m3", 32, sf, use_e4m3_sf=dtype != FP32)


def _clear_nan_codes(arguments: Call, results: list[Tensor]) -> None:
    """What NaN becomes is the same everywhere in e4m3; e2m1 has none, and its code there says nothing."""
    x, sf = arguments.args[0], arguments.args[3]
    factor = 1.0 / spread(sf.float(), 1, arguments.args[2], *x.shape)
    clear(results[0], (x.float() * factor).isnan())


_PRECOMPUTED = [
    Sample(f"{fmt} from {_dtype(dtype)}", bound(lambda m, f, d: _with_sf(m, d, f), f=fmt, d=dtype))
    for fmt in ("e4m3", "e2m1")
    for dtype in (BF16, FP32)
] + [
    Sample("plain scales", lambda m: _with_sf(m, round_sf=False)),
    Sample("e4m3 scales", lambda m: _with_sf(m, use_e4m3_sf=True)),
    Sample("Q07: scales with a row stride", lambda m: _with_sf(m, gap=3)),
    Sample(
        "Q11: misaligned base of data and scales",
        lambda m: call(misaligned(m, 9, 256, BF16), "e4m3", 32, misaligned(m, 9, 8, FP32).abs_().add_(0.01)),
    ),
    Sample("bf16 data, scales that are not powers of two", lambda m: _with_sf(m, BF16, "e2m1", round_sf=False)),
    Sample("scales at the edges", lambda m: _given(m, [3.0, 1e-3, 2.0**-149, 3e38, 2.0**-126, 0.0, float("inf")])),
    Sample("e4m3 scales at the edges", lambda m: _given(m, [2.0**-9, 448.0, 0.0, 1.5], torch.float8_e4m3fn)),
    Sample("odd columns", lambda m: call(m.randn(3, 35), "e4m3", 32, m.full((3, 2), 0.01))),
    Sample("strided rows", lambda m: call(strided(m, 5, 64, BF16, 64), "e4m3", 32, m.full((5, 2), 0.01))),
    Sample("no token", lambda m: call(m.randn(0, 64), "e4m3", 32, m.full((0, 2), 0.01))),
    Sample(
        "out=",
        lambda m: call(m.randn(5, 64), "e4m3", 32, m.full((5, 2), 0.01), out=_codes(m, 5, 64, torch.float8_e4m3fn)),
    ),
    Sample(
        "more than 2**31 elements",
        lambda m: call(m.large(299_594, 7168), "e4m3", 128, m.full((299_594, 56), 2.0**-7)),
        "large",
    ),
]


def _group(arguments: Call) -> tuple[int, int]:
    return 1, argument(arguments, 2, "num_per_channels")


def _bench(fmt: str, n: int, dtype: torch.dtype = BF16, **flags: Any) -> Any:
    return lambda m, rows, columns: call(bench_matrix(m, rows, columns, dtype), fmt, n, **flags)


def _point(name: str, make: Any, rows: int, columns: int) -> Point:
    return Point(f"{name} {rows}x{columns}", lambda m: make(m, rows, columns))


_MX = FLAGS["packed column-major"]
_V3 = FLAGS["column-major"]

_BENCH = [
    _point("v3-prefill e4m3/128", _bench("e4m3", 128, **_V3), 8192, 7168),
    _point("v3-prefill e4m3/128 row-major", _bench("e4m3", 128), 8192, 7168),
    _point("v3-prefill e4m3/128 fp32", _bench("e4m3", 128, FP32, **_V3), 8192, 7168),
    _point("v4-prefill e4m3/32 ue8m0", _bench("e4m3", 32, **_MX), 8192, 7168),
    _point("v4-prefill e2m1/32 ue8m0", _bench("e2m1", 32, **_MX), 8192, 7168),
    _point("prefill e2m1/32", _bench("e2m1", 32), 8192, 7168),
    _point("nvfp4-prefill e2m1/16 e4m3", _bench("e2m1", 16, use_e4m3_sf=True), 8192, 7168),
    _point("v4-prefill e2m1/32 ue8m0 fp32", _bench("e2m1", 32, FP32, **_MX), 8192, 7168),
    _point("prefill e4m3/32 ue8m0 stochastic", _bench("e4m3", 32, stochastic_cast=True, **_MX), 8192, 7168),
    _point("prefill e2m1/32 ue8m0 stochastic", _bench("e2m1", 32, stochastic_cast=True, **_MX), 8192, 7168),
    Point("requantize e4m3 1x128 to e4m3/32 ue8m0 8192x7168", lambda m: _bench_requantize(m)),
    *grid("v3 e4m3/128", _bench("e4m3", 128, **_V3)),
    *grid("v4 e4m3/32 ue8m0", _bench("e4m3", 32, **_MX)),
    *grid("v4 e2m1/32 ue8m0", _bench("e2m1", 32, **_MX)),
]


def _bench_requantize(m: Maker) -> Call:
    data = bench_matrix(m, 8192, 7168).to(torch.float8_e4m3fn)
    return call((data, m.full((8192, 56), 2.0**-3)), "e4m3", 32, (1, 128), **_MX)


CASES = {
    "quant.per_token_cast": Cases(
        samples=[
            *_shapes(),
            *_layouts(),
            *_numbers(),
            *_strides(),
            *_requantized(),
            *_stochastic(),
            *_buffers(),
            *_large(),
        ],
        errors=_TOKEN_ERRORS,
        bench=_BENCH,
        bytes_moved=all_bytes,
        unspecified=clear_by_block(_group),
    ),
    "quant.per_token_cast_with_sf_only": Cases(
        samples=[
            *_shapes(),
            *_layouts(),
            *_numbers(),
            *_strides(),
            Sample("out_sf=", lambda m: call(m.randn(6, 160), "e4m3", 32, out_sf=m.full((6, 5), -1.0))),
            Sample(
                "out_sf= with a row stride",
                lambda m: call(m.randn(6, 160), "e4m3", 32, out_sf=m.full((6, 9), -1.0)[:, :5]),
            ),
            Sample("more than 2**31 elements", lambda m: call(m.large(299_594, 7168), "e2m1", 32, **_MX), "large"),
        ],
        errors=_ERRORS,
        bench=[_point("v4-prefill e4m3/32 ue8m0", _bench("e4m3", 32, **_MX), 8192, 7168)],
        bytes_moved=all_bytes,
    ),
    "quant.per_token_cast_with_precomputed_sf": Cases(
        samples=_PRECOMPUTED,
        errors=[
            ErrorSample(
                "scales of another shape",
                lambda m: call(m.randn(4, 64), "e4m3", 32, m.full((4, 3), 1.0)),
                InvalidArgumentError,
                "sf must have shape (4, 2)",
            ),
            ErrorSample(
                "packed flag",
                lambda m: call(m.randn(4, 64), "e4m3", 32, m.full((4, 2), 1.0), use_packed_ue8m0=True, round_sf=True),
                InvalidArgumentError,
                "use_packed_ue8m0",
            ),
            ErrorSample(
                "fp32 scales called e4m3",
                lambda m: call(m.randn(4, 64), "e4m3", 32, m.full((4, 2), 1.0), use_e4m3_sf=True),
                InvalidDtypeError,
                "sf must be float8_e4m3fn",
            ),
            ErrorSample(
                "column-major scales",
                lambda m: call(m.randn(4, 64), "e4m3", 32, m.full((2, 4), 1.0).t()),
                InvalidArgumentError,
                "sf must have unit stride",
            ),
        ],
        bench=[
            Point(
                "prefill e4m3/128 8192x7168",
                lambda m: call(bench_matrix(m, 8192, 7168), "e4m3", 128, m.full((8192, 56), 2.0**-7)),
            )
        ],
        bytes_moved=all_bytes,
        unspecified=_clear_nan_codes,
    ),
}
