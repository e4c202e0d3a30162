"""Reference of quant.cast."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codes import encode, encode_stochastic, round_stochastic_bf16


def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> Tensor:
    if x.dtype == dtype:
        return x.clone()
    v = x.float().view(1, -1)
    if stochastic_rounding:
        y = round_stochastic_bf16(v) if dtype == torch.bfloat16 else encode_stochastic(v, "e4m3")
    else:
        y = encode(v, "e4m3") if dtype == torch.float8_e4m3fn else v.to(dtype)
    return y.view(x.shape)


REFERENCES = {"quant.cast": cast}
