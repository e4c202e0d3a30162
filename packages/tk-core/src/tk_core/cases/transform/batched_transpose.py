"""Cases of batched_transpose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import InvalidArgumentError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, all_bytes, call

_BF16 = torch.bfloat16


def _of(batch: int, rows: int, columns: int, dtype: torch.dtype = _BF16) -> Callable[[Maker], Call]:
    return lambda m: call(m.randn(batch, rows, columns).to(dtype))


CASES = {
    "transform.batched_transpose": Cases(
        samples=[
            Sample("bf16", _of(3, 128, 64)),
            Sample("float8", _of(3, 64, 128, torch.float8_e4m3fn)),
            Sample("float32", _of(2, 64, 64, torch.float32)),
            Sample("8 bytes", lambda m: call(m.randint(-(2**40), 2**40, (2, 33, 35)))),
            Sample("edges of tiles", _of(3, 67, 131)),
            Sample("edges of tiles, float8", _of(3, 67, 131, torch.float8_e4m3fn)),
            Sample("one matrix of one element", _of(1, 1, 1)),
            Sample("no matrices", _of(0, 64, 32)),
            Sample("no rows", _of(2, 0, 32)),
            Sample("no columns", _of(2, 32, 0)),
            Sample("rows twice as far apart", lambda m: call(m.randn(3, 64, 128, dtype=_BF16)[..., :64])),
            Sample("matrices with gaps between them", lambda m: call(m.randn(3, 70, 64, dtype=_BF16)[:, :64])),
            Sample("one matrix, repeated", lambda m: call(m.randn(1, 64, 40).expand(5, 64, 40))),
            Sample("matrices interleaved by row", lambda m: call(m.randn(64, 3, 40, dtype=_BF16).transpose(0, 1))),
            Sample(
                "base pointer not aligned to 16 bytes",
                lambda m: call(m.randn(1 + 2 * 64 * 64, dtype=_BF16)[1:].view(2, 64, 64)),
            ),
            Sample("more matrices than a grid dimension holds", lambda m: call(m.randn(65536, 4, 8, dtype=_BF16))),
            Sample("more than 2^31 elements", lambda m: call(m.large(40 * 7680, 7168).view(40, 7680, 7168)), "large"),
        ],
        errors=[
            ErrorSample("rank 2", lambda m: call(m.randn(3, 4)), InvalidArgumentError, "shape (B, M, N), got (3, 4)"),
            ErrorSample("columns strided", lambda m: call(m.randn(2, 4, 8).mT), InvalidArgumentError, "unit stride"),
        ],
        bench=[
            Point("v3-experts-8", _of(8, 4032, 7168)),
            Point("v3-experts-32-fp8", _of(32, 4032, 2048, torch.float8_e4m3fn)),
        ],
        bytes_moved=all_bytes,
    )
}
