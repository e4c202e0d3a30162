"""Cases of quant.cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, all_bytes, call
from ._casts import BF16, FP32, INF, NAN, bench_matrix, bound, boundaries

E4M3 = torch.float8_e4m3fn
_PAIRS = [(a, b) for a in (FP32, BF16, E4M3) for b in (FP32, BF16, E4M3)]
_STOCHASTIC = [(FP32, BF16), (FP32, E4M3), (BF16, E4M3)]
_SIZES = [1, 3, 4, 129, 4096, 65537]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(m: Maker, n: int) -> Tensor:
    """Values of every magnitude, zeros of both signs, ties of e4m3 and bf16, NaN and Inf."""
    edges = [0.0, -0.0, 447.9, 448.0, 464.0, -465.0, 1e30, 3.4e38, -3.4e38, NAN, INF, -INF, 2.0**-10, 1.5 * 2.0**-9]
    edges += [2.0**-149, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-23, 17.0, 19.0, -17.0]
    x = m.magnitudes(n) if n % 2 else m.randn(n) * 8
    edge = m.tensor(edges[:n], torch.float32)
    x[: edge.numel()] = edge
    return x


def _sample(a: torch.dtype, b: torch.dtype, n: int, stochastic: bool = False) -> Sample:
    why = f"{_name(a)} to {_name(b)}, {n} elements" + (", stochastic" if stochastic else "")
    level: Level = "quick" if n in (129, 4096) else "full"

    def make(m: Maker) -> Call:
        return call(_values(m, n).to(a), b, stochastic)

    return Sample(why, make, level)


def _large(a: torch.dtype, b: torch.dtype) -> Sample:
    return Sample(
        f"{_name(a)} to {_name(b)}, more than 2**31 elements",
        lambda m: call(m.large(2**17 + 1, 2**14, a), b),
        "large",
    )


def _misaligned(m: Maker, a: torch.dtype, b: torch.dtype, stochastic: bool) -> Call:
    return call(m.randn(1025).to(a)[1:], b, stochastic)


def _bench(a: torch.dtype, b: torch.dtype, stochastic: bool = False) -> Any:
    return lambda m: call(bench_matrix(m, 8192, 7168, FP32 if a == FP32 else BF16).to(a), b, stochastic)


CASES = {
    "quant.cast": Cases(
        samples=[
            Sample("fp32 to bf16, rank 3", lambda m: call(m.randn(3, 5, 8), BF16)),
            Sample("fp32 to e4m3, stochastic, rank 3", lambda m: call(m.randn(3, 5, 7), E4M3, True)),
            *(_sample(a, b, n) for a, b in _PAIRS for n in _SIZES),
            *(_sample(a, b, n, True) for a, b in _STOCHASTIC for n in (*_SIZES, 130, 131)),
            *(
                Sample(
                    f"no element, {_name(a)} to {_name(b)}",
                    bound(lambda m, a, b: call(m.randn(0, 5).to(a), b), a=a, b=b),
                    "full",
                )
                for a, b in _PAIRS
            ),
            Sample("a scalar", lambda m: call(m.randn(1)[0], BF16)),
            *(
                Sample(
                    f"Q11: misaligned, {_name(a)} to {_name(b)}",
                    bound(lambda m, a, b: _misaligned(m, a, b, False), a=a, b=b),
                )
                for a, b in ((FP32, BF16), (BF16, E4M3), (E4M3, BF16))
            ),
            *(
                Sample(
                    f"Q11: misaligned, {_name(a)} to {_name(b)}, stochastic",
                    bound(lambda m, a, b: _misaligned(m, a, b, True), a=a, b=b),
                )
                for a, b in _STOCHASTIC
            ),
            Sample("ties of e4m3", lambda m: call(boundaries(m, "e4m3", 64), E4M3)),
            Sample("ties of e4m3, stochastic", lambda m: call(boundaries(m, "e4m3", 64), E4M3, True)),
            Sample("subnormal bf16 results, stochastic", lambda m: call(m.randn(257) * 2.0**-130, BF16, True)),
            _large(FP32, BF16),
            _large(BF16, E4M3),
            _large(E4M3, BF16),
        ],
        errors=[
            ErrorSample("transposed", lambda m: call(m.randn(4, 5).t(), BF16), InvalidArgumentError, "contiguous"),
            ErrorSample("fp64", lambda m: call(m.randn(4).double(), BF16), InvalidDtypeError, "x must be float32"),
            ErrorSample("to fp16", lambda m: call(m.randn(4), torch.float16), InvalidArgumentError, "dtype must be"),
            ErrorSample(
                "stochastic to fp32",
                lambda m: call(m.randn(4), FP32, True),
                InvalidArgumentError,
                "stochastic_rounding",
            ),
            ErrorSample(
                "stochastic bf16 to bf16",
                lambda m: call(m.randn(4, dtype=BF16), BF16, True),
                InvalidArgumentError,
                "stochastic_rounding",
            ),
        ],
        bench=[
            *(Point(f"{_name(a)}-to-{_name(b)} 8192x7168", _bench(a, b)) for a, b in _PAIRS if a != b),
            *(Point(f"{_name(a)}-to-{_name(b)}-stochastic 8192x7168", _bench(a, b, True)) for a, b in _STOCHASTIC),
        ],
        bytes_moved=all_bytes,
    ),
}
