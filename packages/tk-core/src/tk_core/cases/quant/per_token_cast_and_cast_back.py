"""Cases of quant.per_token_cast_and_cast_back."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Cases, ErrorSample, Level, Maker, Point, Sample, bytes_of, call
from ._casts import (
    BF16,
    FP32,
    around,
    bench_matrix,
    bound,
    boundaries,
    grid,
    misaligned,
    poisoned,
    strided,
    subnormals,
)

_MODES: dict[str, dict[str, Any]] = {"plain": {}, "rounded": {"round_sf": True}, "e4m3 scales": {"use_e4m3_sf": True}}


def _plain(
    why: str, rows: int, columns: int, fmt: str, n: int, dtype: Any = BF16, level: Level = "quick", **flags: Any
) -> Sample:
    return Sample(why, lambda m: call(m.randn(rows, columns, dtype=dtype), fmt, n, **flags), level)


def _modes() -> list[Sample]:
    samples = []
    for mode, flags in _MODES.items():
        for fmt, qmax in (("e4m3", 448.0), ("e2m1", 6.0)):
            for dtype in (BF16, FP32):
                of = f"{mode}, {fmt}, {str(dtype).removeprefix('torch.')}"
                for n in (16, 32, 64, 128):
                    level: Level = "quick" if n == 32 else "full"
                    samples.append(_plain(f"{of}, groups of {n}", 7, 5 * n, fmt, n, dtype, level, **flags))
                samples += [
                    Sample(
                        f"amax around qmax * 2**n, {of}",
                        bound(
                            lambda m, f, q, d, flags: call(around(m, q, 32, d), f, 32, **flags),
                            f=fmt,
                            q=qmax,
                            d=dtype,
                            flags=flags,
                        ),
                    ),
                    Sample(
                        f"NaN and Inf, {of}",
                        bound(
                            lambda m, f, d, flags: call(poisoned(m, 13, 160, d), f, 32, **flags),
                            f=fmt,
                            d=dtype,
                            flags=flags,
                        ),
                    ),
                ]
            samples += [
                Sample(
                    f"ties, {mode}, {fmt}",
                    bound(lambda m, f, flags: call(boundaries(m, f, 64), f, 64, **flags), f=fmt, flags=flags),
                ),
                Sample(
                    f"zeros, subnormals, huge values, {mode}, {fmt}",
                    bound(lambda m, f, flags: call(subnormals(m, 160), f, 32, **flags), f=fmt, flags=flags),
                ),
            ]
    return samples


def _bench(fmt: str, n: int, **flags: Any) -> Any:
    return lambda m, rows, columns: call(bench_matrix(m, rows, columns), fmt, n, **flags)


def _point(name: str, make: Any, rows: int, columns: int) -> Point:
    return Point(f"{name} {rows}x{columns}", lambda m: make(m, rows, columns))


def _overlapping(m: Maker) -> Any:
    return m.randn(1, 64).expand(4, 64)


CASES = {
    "quant.per_token_cast_and_cast_back": Cases(
        samples=[
            *_modes(),
            _plain("one token, K = 7168", 1, 7168, "e4m3", 128),
            _plain("no token", 0, 128, "e4m3", 32),
            _plain("K = 192 with groups of 128: a partial last group", 3, 192, "e4m3", 128),
            _plain("K = 35, odd", 5, 35, "e4m3", 32),
            _plain("K = 100, e2m1", 5, 100, "e2m1", 32, FP32),
            _plain("groups of three columns", 4, 22, "e2m1", 3),
            _plain("K = 576, rows past a tile", 131, 576, "e2m1", 64),
            _plain("whole rows as groups", 3, 2048, "e4m3", 2048),
            _plain("groups far wider than K", 3, 192, "e4m3", 2**40),
            Sample("row stride of twice K", lambda m: call(strided(m, 9, 256, BF16, 256), "e4m3", 32)),
            Sample("odd row stride", lambda m: call(strided(m, 9, 256, BF16, 3), "e4m3", 32)),
            Sample("Q11: misaligned base", lambda m: call(misaligned(m, 9, 256, BF16), "e4m3", 32)),
            Sample("more than 2**31 elements", lambda m: call(m.large(299_594, 7168), "e4m3", 128), "large"),
        ],
        errors=[
            ErrorSample("fp16", lambda m: call(m.randn(4, 64).half(), "e4m3", 32), InvalidDtypeError, "x must be"),
            ErrorSample(
                "unknown format", lambda m: call(m.randn(4, 64), "e5m6", 32), InvalidArgumentError, "fmt must be"
            ),
            ErrorSample(
                "transposed", lambda m: call(m.randn(64, 4).t(), "e4m3", 32), InvalidArgumentError, "unit stride"
            ),
            ErrorSample(
                "rows that overlap", lambda m: call(_overlapping(m), "e4m3", 32), InvalidArgumentError, "do not overlap"
            ),
            ErrorSample(
                "both modes",
                lambda m: call(m.randn(4, 64), "e4m3", 32, True, True),
                InvalidArgumentError,
                "use_e4m3_sf",
            ),
        ],
        bench=[
            _point("qat-prefill e4m3/128", _bench("e4m3", 128), 8192, 7168),
            _point("qat-prefill e4m3/32 rounded", _bench("e4m3", 32, round_sf=True), 8192, 7168),
            _point("qat-prefill e2m1/32 rounded", _bench("e2m1", 32, round_sf=True), 8192, 7168),
            _point("qat-prefill e2m1/16 e4m3", _bench("e2m1", 16, use_e4m3_sf=True), 8192, 7168),
            *grid("qat e4m3/128", _bench("e4m3", 128)),
        ],
        bytes_moved=lambda arguments, results: 2 * bytes_of(arguments.args),
        inplace=(0,),
    ),
}
