"""Cases of transpose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import InvalidArgumentError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, all_bytes, call


def _of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Maker], Call]:
    return lambda m: call(m.randn(rows, columns).to(dtype))


CASES = {
    "transform.transpose": Cases(
        samples=[
            Sample("bf16", _of(128, 192)),
            Sample("float8", _of(128, 192, torch.float8_e4m3fn)),
            Sample("float32", _of(64, 192, torch.float32)),
            Sample("8 bytes", lambda m: call(m.randint(-(2**40), 2**40, (65, 67)))),
            Sample("packed FP4 bytes", lambda m: call(m.randint(-128, 128, (70, 130), torch.int8))),
            Sample("booleans", lambda m: call(m.randint(0, 2, (9, 5), torch.bool))),
            Sample("edges of tiles", _of(67, 131)),
            Sample("edges of tiles, float8", _of(67, 131, torch.float8_e4m3fn)),
            Sample(
                "NaN payloads and signed zeros",
                lambda m: call(m.randint(-(2**31), 2**31, (33, 40)).to(torch.int32).view(torch.float32)),
            ),
            Sample("one row", _of(1, 300)),
            Sample("one column", _of(300, 1)),
            Sample("no rows", _of(0, 64)),
            Sample("no columns", _of(64, 0)),
            Sample("rows twice as far apart", lambda m: call(m.randn(96, 256, dtype=torch.bfloat16)[:, :128])),
            Sample("odd row stride", lambda m: call(m.randn(96, 131, dtype=torch.bfloat16)[:, :128])),
            Sample(
                "base pointer not aligned to 16 bytes",
                lambda m: call(m.randn(1 + 64 * 64, dtype=torch.bfloat16)[1:].view(64, 64)),
            ),
            Sample("rows with stride 0", lambda m: call(m.randn(1, 64).expand(70, 64))),
            Sample(
                "more tiles than a grid dimension holds", lambda m: call(m.large(64, 4194368, torch.bfloat16)), "full"
            ),
            Sample("more tiles than a grid dimension holds, tall", lambda m: call(m.large(4194368, 64)), "full"),
            Sample("more than 2^31 elements", lambda m: call(m.large(299594, 7168)), "large"),
        ],
        errors=[
            ErrorSample(
                "rank 3", lambda m: call(m.randn(2, 3, 4)), InvalidArgumentError, "shape (M, N), got (2, 3, 4)"
            ),
            ErrorSample("columns strided", lambda m: call(m.randn(4, 8).t()), InvalidArgumentError, "unit stride"),
        ],
        bench=[
            Point("v3-wgrad-8k-bf16", _of(8064, 7168)),
            Point("v3-wgrad-8k-fp8", _of(8064, 7168, torch.float8_e4m3fn)),
            Point("v3-wgrad-64", _of(64, 7168)),
        ],
        bytes_moved=all_bytes,
    )
}
