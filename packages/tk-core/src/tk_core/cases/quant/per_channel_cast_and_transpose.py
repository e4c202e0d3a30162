"""Cases of quant.per_channel_cast_and_transpose."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Sample, all_bytes, call
from ._casts import BF16, FP32, clear_codes
from .per_channel_cast import block_of, numbers, plain, point, shapes

_MODES: dict[str, dict[str, Any]] = {"plain": {}, "rounded": {"round_sf": True}}


def _clear(arguments: Call, results: list[Tensor]) -> None:
    clear_codes(results[0], results[1], block_of(arguments), transposed=True)


CASES = {
    "quant.per_channel_cast_and_transpose": Cases(
        samples=[
            *(
                plain(f"groups of {n}, {mode}, {str(dtype).removeprefix('torch.')}", 384, 192, n, dtype, **flags)
                for n in (32, 128)
                for mode, flags in _MODES.items()
                for dtype in (BF16, FP32)
            ),
            *shapes(),
            *numbers(_MODES),
            plain("rows not a multiple of 16: unaligned result rows", 250, 128, 128),
            plain("rows odd", 131, 64, 32),
            Sample("more than 2**31 elements", lambda m: call(m.large(299_594, 7168), "e4m3", 128), "large"),
        ],
        errors=[
            ErrorSample("e2m1", lambda m: call(m.randn(4, 64), "e2m1", 32), InvalidArgumentError, "fmt must be 'e4m3'"),
            ErrorSample(
                "group of 0", lambda m: call(m.randn(4, 64), "e4m3", 0), InvalidArgumentError, "num_per_tokens"
            ),
            ErrorSample("fp16", lambda m: call(m.randn(4, 64).half(), "e4m3", 32), InvalidDtypeError, "x must be"),
            ErrorSample("transposed", lambda m: call(m.randn(64, 4).t(), "e4m3", 32), InvalidArgumentError, "stride"),
        ],
        bench=[
            point("v3-wgrad e4m3/128", 8064, 7168, 128),
            point("v4-wgrad e4m3/32 rounded", 8064, 7168, 32, round_sf=True),
            point("v3-wgrad e4m3/128", 4096, 2048, 128),
            point("e4m3/128", 512, 7168, 128),
        ],
        bytes_moved=all_bytes,
        unspecified=_clear,
    ),
}
