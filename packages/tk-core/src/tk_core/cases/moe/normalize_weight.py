"""Cases of moe.normalize_weight and its gradient."""

from __future__ import annotations

import torch

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, call

_NAN, _INF = float("nan"), float("inf")
_SHAPES = [(1, 8), (64, 8), (257, 8), (5, 1), (9, 2), (130, 6), (33, 7), (33, 9), (17, 32), (5, 37), (3, 257)]


def _forward(rows: int, k: int) -> Sample:
    return Sample(f"{rows} tokens, top {k}", lambda m: call(m.rand(rows, k)))


def _special_rows(m: Maker) -> Call:
    rows = [
        [0.0, 0.0, 0.0, 0.0],
        [-0.0, -0.0, -0.0, -0.0],
        [1e-22, 0.0, 0.0, 0.0],
        [1e-45, 1e-45, 0.0, 0.0],
        [1.0, -1.0, 0.0, 0.0],
        [-1.0, -2.0, 0.5, 0.25],
        [_NAN, 1.0, 1.0, 1.0],
        [_INF, 1.0, 1.0, 1.0],
        [3e38, 3e38, 1.0, 1.0],
        [1e8, 1.0, -1e8, 1.0],
    ]
    return call(m.tensor(rows, torch.float32))


def _rounding(m: Maker) -> Call:
    return call(m.magnitudes(600, 8, low=-20, high=20))


def _row_strided(m: Maker) -> Call:
    return call(m.rand(19, 11)[:, :8])


def _misaligned(m: Maker) -> Call:
    return call(m.rand(1 + 19 * 8)[1:].view(19, 8))


def _past_2_31(m: Maker) -> Call:
    return call(m.large(2**31 // 8 + 5, 8, torch.float32))


def _gradient(rows: int, k: int, with_denominator: bool) -> Sample:
    def make(m: Maker) -> Call:
        weights = m.rand(rows, k) + 0.1
        denominator = weights.sum(1)
        extra = m.randn(rows) if with_denominator else None
        return call(m.randn(rows, k), denominator, weights / denominator[:, None], extra)

    return Sample(
        f"{rows} tokens, top {k}" + (", with a gradient of the denominator" if with_denominator else ""), make
    )


def _gradient_special(m: Maker) -> Call:
    grad = m.tensor([[1.0, 2.0], [_NAN, 1.0], [_INF, 1.0], [1.0, 1.0], [1.0, -2.0]], torch.float32)
    denominator = m.tensor([2.0, 1.0, 1.0, 0.0, 1e-20], torch.float32)
    return call(grad, denominator, m.full((5, 2), 0.5))


def _gradient_expanded(m: Maker) -> Call:
    """What ``.sum(1).backward()`` of one column sum produces: rows with stride 0."""
    return call(m.randn(1, 8).expand(21, 8), m.rand(21) + 1.0, m.rand(21, 8))


def _gradient_strided(m: Maker) -> Call:
    return call(m.randn(21, 13)[:, :6], m.rand(21) + 1.0, m.rand(21, 9)[:, 1:7])


CASES = {
    "moe.normalize_weight": Cases(
        samples=[
            *(_forward(*shape) for shape in _SHAPES),
            Sample("zeros, tiny sums, cancellation, NaN, Inf, overflow", _special_rows),
            Sample("wide magnitudes: the order of the sum shows", _rounding),
            Sample("padded row stride", _row_strided),
            Sample("base pointer not aligned to 16 bytes", _misaligned),
            Sample("a single column of any stride", lambda m: call(m.rand(1, 9).t())),
            Sample("no tokens", lambda m: call(m.rand(0, 8))),
            Sample("a buffer for one result", lambda m: call(m.rand(5, 8), out=(None, m.full((5, 8), -1.0)))),
            Sample("32768 tokens: many blocks", lambda m: call(m.rand(32768, 8)), "full"),
            Sample("more than 2^31 weights", _past_2_31, "large"),
        ],
        errors=[
            ErrorSample("rank 1", lambda m: call(m.rand(8)), InvalidArgumentError, "shape (N, K), got (8,)"),
            ErrorSample("float64", lambda m: call(m.rand(2, 8).double()), InvalidDtypeError, "float32, got float64"),
            ErrorSample("columns strided", lambda m: call(m.rand(8, 2).t()), InvalidArgumentError, "unit stride"),
            ErrorSample("no columns", lambda m: call(m.rand(2, 0)), InvalidArgumentError, "at least 1 column, got 0"),
            ErrorSample(
                "buffer of another shape",
                lambda m: call(m.rand(2, 8), out=(m.rand(3), None)),
                InvalidArgumentError,
                "out[0] must have shape (2,)",
            ),
        ],
        bench=[
            Point("v3-decode-64", lambda m: call(m.rand(64, 8))),
            Point("v3-prefill-8k", lambda m: call(m.rand(8192, 8))),
            Point("v3-prefill-32k", lambda m: call(m.rand(32768, 8))),
            Point("v4-prefill-32k", lambda m: call(m.rand(32768, 6))),
        ],
    ),
    "moe.normalize_weight_backward": Cases(
        samples=[
            _gradient(1, 8, False),
            _gradient(64, 8, True),
            _gradient(130, 6, False),
            _gradient(33, 1, True),
            _gradient(17, 32, False),
            _gradient(5, 37, True),
            Sample("NaN, Inf and zero denominators", _gradient_special),
            Sample("rows with stride 0", _gradient_expanded),
            Sample("padded and misaligned rows", _gradient_strided),
            Sample("no tokens", lambda m: call(m.rand(0, 8), m.rand(0), m.rand(0, 8))),
        ],
        errors=[
            ErrorSample(
                "other shape of the results",
                lambda m: call(m.rand(2, 8), m.rand(2), m.rand(2, 6)),
                InvalidArgumentError,
                "normalized must have shape (2, 8)",
            ),
            ErrorSample(
                "denominator of other rows",
                lambda m: call(m.rand(2, 8), m.rand(3), m.rand(2, 8)),
                InvalidArgumentError,
                "denominator must have shape (2,)",
            ),
            ErrorSample(
                "denominator strided",
                lambda m: call(m.rand(2, 8), m.rand(4)[::2], m.rand(2, 8)),
                InvalidArgumentError,
                "denominator must be contiguous",
            ),
            ErrorSample(
                "bfloat16 gradient",
                lambda m: call(m.rand(2, 8).bfloat16(), m.rand(2), m.rand(2, 8)),
                InvalidDtypeError,
                "grad must be float32",
            ),
        ],
        bench=[Point("v3-prefill-32k", lambda m: call(m.randn(32768, 8), m.rand(32768) + 1.0, m.rand(32768, 8)))],
    ),
}
