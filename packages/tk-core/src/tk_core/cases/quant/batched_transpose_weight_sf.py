"""Cases of quant.batched_transpose_weight_sf."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, bytes_of, call

Weight = tuple[int, int, int | None, bool]
"""Rows, columns, groups (None: no group dimension), whether sf1 is seen transposed."""

_WEIGHTS: list[Weight] = [
    (128, 128, None, False),
    (384, 512, 2, True),
    (768, 1152, 3, False),
    (640, 1280, 1, True),
    (384, 384, None, True),
]
_LARGE: list[Weight] = [(2048, 2560, 2, False), (6144, 4096, None, False)]
_MODEL: list[Weight] = [
    (4096, 7168, 8, False),
    (7168, 2048, 8, False),
    (24576, 1536, None, False),
    (7168, 16384, None, True),
    (2304, 7168, None, False),
]


def _scales(m: Maker, weight: Weight, block: int) -> Tensor:
    rows, columns, groups, _ = weight
    batch = () if groups is None else (groups,)
    return torch.exp2(m.randint(-126, 128, (*batch, -(-rows // block), -(-columns // block))).float())


def _of(weights: list[Weight], block: int, with_outs: bool = False) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        sf = [_scales(m, w, block) for w in weights]
        flags = [w[3] for w in weights]
        if not with_outs:
            return call(sf, block, flags)
        return call(sf, block, flags, outs=[None if i == 0 else _buffers(m, w, block) for i, w in enumerate(weights)])

    return make


def _buffers(m: Maker, weight: Weight, block: int) -> tuple[Tensor, Tensor]:
    """Result buffers full of ones, which the call must overwrite, unused bytes included."""
    rows, columns, groups, transposed = weight
    per_word = m.layout.ue8m0_per_word
    dtype = torch.int32 if per_word == 4 else torch.int16
    batch = () if groups is None else (groups,)
    words0, words1 = -(-columns // block // per_word), -(-rows // block // per_word)
    sf0 = m.full((*batch, words0, rows), -1, dtype).transpose(-1, -2)
    sf1 = m.full((*batch, words1, columns), -1, dtype)
    return sf0, sf1 if transposed else sf1.transpose(-1, -2)


def _row_major_buffers(m: Maker) -> tuple[Tensor, Tensor]:
    sf0, sf1 = _buffers(m, (256, 256, None, False), 32)
    return sf0.contiguous(), sf1.contiguous()


def _edges(m: Maker) -> Call:
    """Zero and Inf pass as bytes 0 and 255."""
    sf = torch.exp2(m.randint(-126, 128, (4, 4)).float())
    sf[0, 0], sf[3, 1] = 0.0, float("inf")
    return call([sf], 32, [False])


def _misaligned(m: Maker) -> Call:
    """Scales that start one element past an allocation."""
    sf = torch.exp2(m.randint(-126, 128, (1 + 8 * 8,)).float())[1:].view(8, 8)
    return call([sf, sf.clone()], 32, [False, True])


def _bytes(arguments: Call, results: list[Tensor]) -> int:
    return bytes_of([arguments.args[0]]) + bytes_of(results)


def _one(m: Maker) -> list[Tensor]:
    return [m.full((4, 4), 2.0)]


CASES = {
    "quant.batched_transpose_weight_sf": Cases(
        samples=[
            *(Sample(f"one weight {w}, blocks of {b}", _of([w], b)) for w in _WEIGHTS[:3] for b in (32, 128)),
            Sample("several weights, blocks of 32", _of(_WEIGHTS, 32)),
            Sample("several weights, blocks of 128", _of(_WEIGHTS, 128)),
            Sample("larger weights", _of(_LARGE, 32), "full"),
            Sample("larger weights, blocks of 128", _of(_LARGE, 128), "full"),
            Sample("into buffers", _of(_WEIGHTS, 32, with_outs=True)),
            Sample("into buffers, blocks of 128", _of(_WEIGHTS, 128, with_outs=True)),
            Sample("scales 0 and Inf", _edges),
            Sample("Q11: misaligned base", _misaligned),
            Sample("a weight without columns", _of([(128, 0, None, False)], 32)),
            Sample(
                "weights without rows or columns among others",
                _of([(0, 128, 2, False), (128, 256, None, True), (256, 0, 3, True)], 32),
            ),
            Sample("a hundred weights", _of([(128, 256, None, i % 2 == 0) for i in range(100)], 128)),
        ],
        errors=[
            ErrorSample(
                "blocks of 64", lambda m: call(_one(m), 64, [False]), InvalidArgumentError, "block_size must be"
            ),
            ErrorSample(
                "too few flags", lambda m: call(_one(m), 32, []), InvalidArgumentError, "transpose_sf1s must have"
            ),
            ErrorSample(
                "bf16 scales",
                lambda m: call([m.full((4, 4), 2.0, torch.bfloat16)], 32, [False]),
                InvalidDtypeError,
                "sf[0] must be float32",
            ),
            ErrorSample(
                "transposed scales",
                lambda m: call([m.full((4, 8), 2.0).t()], 32, [False]),
                InvalidArgumentError,
                "sf[0] must be contiguous",
            ),
            ErrorSample("rank 1", lambda m: call([m.full((4,), 2.0)], 32, [False]), InvalidArgumentError, "(n, k)"),
            ErrorSample(
                "96 rows", lambda m: call([m.full((3, 4), 2.0)], 32, [False]), InvalidArgumentError, "multiple of 128"
            ),
            ErrorSample(
                "buffers of another shape",
                lambda m: call(_one(m), 32, [False], [_buffers(m, (256, 128, None, False), 32)]),
                InvalidArgumentError,
                "must have shape",
            ),
            ErrorSample(
                "buffers with other strides",
                lambda m: call([m.full((8, 8), 2.0)], 32, [False], [_row_major_buffers(m)]),
                InvalidArgumentError,
                "must have strides",
            ),
        ],
        bench=[
            Point("v3-weights 128", _of(_MODEL, 128)),
            Point("v4-weights 32", _of(_MODEL, 32)),
        ],
        bytes_moved=_bytes,
        inplace=("outs",),
    ),
}
