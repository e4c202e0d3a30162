"""Cases of moe.topk_gate."""

from __future__ import annotations

import torch

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, call

_NAN, _INF = float("nan"), float("inf")


def _randn(rows: int, experts: int, k: int) -> Sample:
    why = f"{rows} tokens, {experts} experts, top {k}"
    return Sample(why, lambda m: call(m.randn(rows, experts), k))


def _few_values(m: Maker) -> Call:
    return call(m.randint(0, 4, (65, 256)).float(), 8)


def _sprinkled(m: Maker, values: list[float], experts: int, k: int, eighths: int = 1) -> Call:
    """Normal scores, of which about ``eighths`` / 8 are replaced by each of the values in turn."""
    scores = m.randn(40, experts)
    for value in values:
        scores[m.randint(0, 8, (40, experts)) < eighths] = value
    return call(scores, k)


def _rows(m: Maker, rows: list[list[float]], k: int) -> Call:
    return call(m.tensor(rows, torch.float32), k)


def _graph_padding(m: Maker) -> Call:
    """A CUDA graph's padded rows hold NaN."""
    scores = m.randn(8, 384)
    scores[3] = _NAN
    return call(scores, 6)


def _row_strided(m: Maker) -> Call:
    return call(m.randn(17, 300)[:, :256], 8)


def _misaligned(m: Maker) -> Call:
    return call(m.randn(1 + 9 * 256)[1:].view(9, 256), 8)


def _odd_stride(m: Maker) -> Call:
    return call(m.randn(9, 129)[:, :128], 6)


def _both_zeros(m: Maker) -> Call:
    scores = m.full((3, 257), 0.0)
    scores[:, ::2] = -0.0
    return call(scores, 8)


def _into_int64(m: Maker) -> Call:
    return call(m.randn(5, 64), 6, out=m.full((5, 6), -1, torch.int64))


def _past_2_31(m: Maker) -> Call:
    return call(m.large(2**31 // 4096 + 3, 4096, torch.float32), 8)


_SHAPES = [
    (1, 256, 8),
    (64, 256, 8),
    (1, 1, 1),
    (3, 35, 9),
    (33, 16, 6),
    (5, 32, 32),
    (4, 33, 32),
    (7, 72, 6),
    (6, 108, 6),
    (5, 128, 6),
    (9, 144, 6),
    (5, 256, 9),
    (6, 257, 8),
    (5, 288, 8),
    (5, 384, 6),
    (5, 512, 8),
    (3, 1025, 32),
    (3, 4096, 8),
    (2, 4096, 32),
]


def _large_batch(rows: int, experts: int, k: int) -> Sample:
    why = f"{rows} tokens, {experts} experts, top {k}: many blocks"
    return Sample(why, lambda m: call(m.randn(rows, experts), k), "full")


CASES = {
    "moe.topk_gate": Cases(
        samples=[
            *(_randn(*shape) for shape in _SHAPES),
            Sample("equal scores: lower expert first, across lanes and segments", _few_values),
            Sample("all scores equal", lambda m: call(m.full((3, 257), 0.0), 8)),
            Sample("-0.0 ties with +0.0", _both_zeros),
            Sample("rows of NaN still give distinct ids", lambda m: call(m.full((4, 256), _NAN), 8)),
            Sample("one row of NaN leaves the others alone", _graph_padding),
            Sample("NaN of either sign ranks below -inf", lambda m: _rows(m, [[_NAN, -_INF, -_NAN, 1.0, -_INF]], 5)),
            Sample("infinities and NaN among finite scores", lambda m: _sprinkled(m, [_NAN, -_INF, _INF], 256, 8)),
            Sample("mostly -inf: ids stay distinct", lambda m: _sprinkled(m, [-_INF], 288, 32, eighths=7)),
            Sample("subnormal scores are told apart", lambda m: call(m.magnitudes(9, 256, low=-148, high=-127), 8)),
            Sample("magnitudes from subnormal to 1e38", lambda m: call(m.magnitudes(9, 256), 8)),
            Sample("padded row stride", _row_strided),
            Sample("base pointer not aligned to 16 bytes", _misaligned),
            Sample("row stride not a multiple of 16 bytes", _odd_stride),
            Sample("out= is written in 64 bits", _into_int64),
            Sample("a single column of any stride", lambda m: call(m.randn(1, 9).t(), 1)),
            Sample("no tokens", lambda m: call(m.randn(0, 256), 8)),
            _large_batch(4099, 256, 8),
            _large_batch(4001, 72, 6),
            _large_batch(2051, 1025, 9),
            Sample("more than 2^31 scores", _past_2_31, "large"),
        ],
        errors=[
            ErrorSample("rank 1", lambda m: call(m.randn(8), 2), InvalidArgumentError, "shape (N, E), got (8,)"),
            ErrorSample("rank 3", lambda m: call(m.randn(2, 2, 8), 2), InvalidArgumentError, "got (2, 2, 8)"),
            ErrorSample(
                "bfloat16 scores",
                lambda m: call(m.randn(2, 8).bfloat16(), 2),
                InvalidDtypeError,
                "float32, got bfloat16",
            ),
            ErrorSample("columns strided", lambda m: call(m.randn(8, 4).t(), 2), InvalidArgumentError, "unit stride"),
            ErrorSample("k = 0", lambda m: call(m.randn(2, 8), 0), InvalidArgumentError, "num_topk must be at least 1"),
            ErrorSample("k > E", lambda m: call(m.randn(2, 8), 9), InvalidArgumentError, "experts E = 8, got 9"),
            ErrorSample("no experts", lambda m: call(m.randn(2, 0), 1), InvalidArgumentError, "experts E = 0, got 1"),
            ErrorSample(
                "int32 buffer",
                lambda m: call(m.randn(2, 8), 2, out=m.full((2, 2), 0, torch.int32)),
                InvalidDtypeError,
                "out must be torch.int64",
            ),
        ],
        bench=[
            Point("v3-decode-1", lambda m: call(m.randn(1, 256), 8)),
            Point("v3-decode-64", lambda m: call(m.randn(64, 256), 8)),
            Point("v3-prefill-8k", lambda m: call(m.randn(8192, 256), 8)),
            Point("v3-prefill-16k", lambda m: call(m.randn(16384, 256), 8)),
            Point("v4-prefill-8k", lambda m: call(m.randn(8192, 384), 6)),
            Point("small-e72-8k", lambda m: call(m.randn(8001, 72), 6)),
        ],
    )
}
