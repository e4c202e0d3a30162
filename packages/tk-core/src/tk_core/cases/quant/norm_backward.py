"""Cases of norm_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, Tolerance, all_bytes, call
from .._near import differs

_BF16, _FP32 = torch.bfloat16, torch.float32
_ROUNDING = {_BF16: 2.0**-7, _FP32: 1e-5}


def _compare(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """``(x_grad, weight_grad?)``, and the weight gradient again where it was given."""
    for e, a in zip(expected, actual):
        if e.dim() == 1:
            found = differs("weight_grad", e, a, rtol=8e-3 if e.dtype == _BF16 else 1e-4, atol=2e-4)
        else:
            found = differs("x_grad", e, a, rtol=_ROUNDING.get(e.dtype, 1e-12), atol=1e-5)
        if found is not None:
            return found
    return None


def _call(
    m: Maker,
    rows: int,
    channels: int,
    dtype: torch.dtype = _BF16,
    weight: bool = True,
    residual: bool = False,
    **options: Any,
) -> Call:
    x = options.pop("x", None)
    x = m.randn(rows, channels, dtype=dtype) if x is None else x
    grad = options.pop("grad", None)
    grad = m.randn(rows, channels, dtype=dtype) if grad is None else grad
    rstd = (x.float().square().mean(1) + 1e-6).rsqrt()
    w = m.randn(channels, dtype=dtype) if weight else None
    if residual:
        options["residual_out_grad"] = m.randn(rows, channels, dtype=dtype)
    return call(grad, x, w, rstd, **options)


def _sample(why: str, rows: int, channels: int, level: Any = "quick", **options: Any) -> Sample:
    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in options.items()}
        return _call(m, rows, channels, **made)

    return Sample(why, make, level)


def _zeros(m: Maker) -> Call:
    """One row of zeros: a weight gradient from partial sums that nobody initialized would show."""
    return call(m.randn(1, 4), m.full((1, 4), 0.0), m.randn(4), m.tensor([1e3], _FP32))


def _unit_vector(m: Maker) -> Call:
    """The gradient is the input itself: x_grad is [0.000799, 0, 0, 0]."""
    x = m.tensor([[1.0, 0.0, 0.0, 0.0]], _FP32)
    return call(x, x, None, (x.square().mean(1) + 1e-4).rsqrt())


def _large(m: Maker) -> Call:
    x = m.large(299594, 7168)
    return call(x, x, x[0], m.full((299594,), 1.0))


def _error(why: str, match: str, error: type[Exception] = InvalidArgumentError, **changes: Any) -> ErrorSample:
    names = ("out_grad", "x", "weight", "rstd")

    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in changes.items()}
        base = _call(m, 4, 64)
        args = [made.pop(name, arg) for name, arg in zip(names, base.args)]
        return call(*args, **made)

    return ErrorSample(why, make, error, match)


def _accumulated(dtype: torch.dtype) -> Callable[[Maker], Tensor]:
    return lambda m: m.randn(192, dtype=dtype)


CASES = {
    "quant.norm_backward": Cases(
        samples=[
            _sample("bf16", 33, 192),
            _sample("bf16, with a residual's gradient", 33, 256, residual=True),
            _sample("float32", 33, 192, dtype=_FP32, residual=True),
            _sample("without a weight", 9, 192, weight=False),
            _sample("without a weight, float32, residual", 9, 192, dtype=_FP32, weight=False, residual=True),
            _sample("scaled", 9, 192, out_scale=0.3, residual=True),
            _sample("added to a bf16 gradient", 9, 192, weight_grad=_accumulated(_BF16)),
            _sample("added to a float32 gradient", 9, 192, weight_grad=_accumulated(_FP32), out_scale=0.3),
            _sample("float32, added to a bf16 gradient", 9, 192, dtype=_FP32, weight_grad=_accumulated(_BF16)),
            _sample("one row", 1, 256, residual=True),
            Sample("one row of zeros", _zeros),
            Sample("the gradient is the input itself, a unit vector", _unit_vector),
            _sample("no rows", 0, 192),
            _sample("no rows, added to a gradient", 0, 192, weight_grad=_accumulated(_FP32)),
            _sample("one channel", 5, 1),
            _sample("100 channels", 5, 100),
            _sample("37 channels, float32", 5, 37, dtype=_FP32),
            _sample("7168 channels, fewer rows than multiprocessors", 70, 7168),
            _sample("8328 channels", 3, 8328),
            _sample("65536 channels", 3, 65536, residual=True),
            _sample("65536 channels, float32", 2, 65536, dtype=_FP32),
            _sample("more rows than multiprocessors", 300, 64),
            _sample(
                "padded rows",
                9,
                96,
                x=lambda m: m.randn(9, 112, dtype=_BF16)[:, 8:104],
                grad=lambda m: m.randn(9, 100, dtype=_BF16)[:, :96],
            ),
            _sample(
                "a gradient whose rows have stride 0", 9, 96, grad=lambda m: m.randn(1, 96, dtype=_BF16).expand(9, 96)
            ),
            _sample(
                "base pointer not aligned to 16 bytes",
                5,
                96,
                x=lambda m: m.randn(1 + 5 * 96, dtype=_BF16)[1:].view(5, 96),
            ),
            _sample("many blocks", 8001, 4096, "full", residual=True),
            Sample("more than 2^31 elements", _large, "large"),
        ],
        errors=[
            _error("rank 3", "x must have shape (T, H)", x=lambda m: m.randn(1, 4, 64)),
            _error(
                "a gradient of another dtype",
                "out_grad must be bfloat16",
                InvalidDtypeError,
                out_grad=lambda m: m.randn(4, 64),
            ),
            _error(
                "a gradient of other rows",
                "out_grad must have shape (4, 64)",
                out_grad=lambda m: m.randn(3, 64, dtype=_BF16),
            ),
            _error(
                "a gradient expanded from one number",
                "unit stride",
                out_grad=lambda m: m.full((1, 1), 1.0, _BF16).expand(4, 64),
            ),
            _error("rstd of other rows", "rstd must have shape (4,)", rstd=lambda m: m.rand(5)),
            _error("rstd in bf16", "rstd must be float32", InvalidDtypeError, rstd=lambda m: m.rand(4, dtype=_BF16)),
            _error(
                "a weight gradient without a weight",
                "only together with weight",
                weight=None,
                weight_grad=lambda m: m.rand(64),
            ),
            _error(
                "a weight gradient of other channels",
                "weight_grad must have shape (64,)",
                weight_grad=lambda m: m.rand(63),
            ),
            _error(
                "a weight gradient with gaps", "weight_grad must be contiguous", weight_grad=lambda m: m.rand(128)[::2]
            ),
            _error(
                "a weight gradient in int32",
                "weight_grad must be",
                InvalidDtypeError,
                weight_grad=lambda m: m.tensor([0] * 64, torch.int32),
            ),
        ],
        bench=[
            Point("v3-train-8k", lambda m: _call(m, 8192, 7168)),
            Point("v3-train-8k-residual", lambda m: _call(m, 8192, 7168, residual=True)),
            Point("v4-train-8k-4096", lambda m: _call(m, 8192, 4096, residual=True)),
        ],
        tolerance=Tolerance(
            "two fp32 sums in any fixed order: over channels, whose error enters x_grad times xhat * rstd, over rows "
            "for the weight gradient",
            compare=_compare,
        ),
        bytes_moved=all_bytes,
        inplace=("weight_grad",),
    ),
}
