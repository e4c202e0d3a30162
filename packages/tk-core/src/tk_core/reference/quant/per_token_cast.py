"""Reference of quant.per_token_cast (temporary minimal form for bring-up)."""

from __future__ import annotations

import torch
from torch import Tensor


def per_token_cast(x, x_sf, fmt, n, br, bc, col, rnd, packed, e4, sr, clamp, w, al) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    g = x.float().view(M, K // n, n)
    a = g.abs().amax(-1).clamp_min(clamp)
    sf = a / 448.0
    q = (g * (448.0 / a)[..., None]).clamp(-448, 448).view(M, K).to(torch.float8_e4m3fn)
    return q, sf


REFERENCES = {"quant.per_token_cast": per_token_cast}
