"""Reference of randn: Philox4x32-10 and Box-Muller, every fp32 operation rounded by itself."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .philox import draw

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _constants(words: str) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in words.split()]


_LOG = _constants("3D9021BB BDEBD1B8 3DEF251A BDFE5D4F 3E11E9BF BE2AAE50 3E4CCEAC BE7FFFFC 3EAAAAAA")
_LN2_LOW, _LN2_HIGH = _constants("B95E8083 3F318000")
_ANGLE = _constants("34C90FDB")[0]
_SIN = _constants("B94CA1F9 3C08839E BE2AAAA3")
_COS = _constants("37CCF5CE BAB6061A 3D2AAAA5")
_SQRT_HALF_BITS = 0x3F3504F3


def randn(state: Tensor, size: Sequence[int], fmt: str) -> Tensor:
    """Standard normal numbers from pairs of words; the state is advanced."""
    count = math.prod(size)
    words = draw(state, count, stream=0)
    pairs = words.view(-1, 2)
    normal = torch.stack(box_muller(pairs[:, 0], pairs[:, 1]), dim=1)
    return normal.flatten()[:count].view(tuple(size)).to(DTYPES[fmt])


def box_muller(radius_word: Tensor, angle_word: Tensor) -> tuple[Tensor, Tensor]:
    """A pair of normal numbers: a radius from one word, an angle from the other."""
    radius = (_log_uniform(radius_word) * -2).double().sqrt().float()  # fp32 sqrt is not correctly rounded on every CPU
    sin, cos = _sin_cos(angle_word)
    return radius * cos, radius * sin


def _log_uniform(word: Tensor) -> Tensor:
    """``ln(((word >> 8) + 1) / 2**24)``, at most -0.0."""
    u = ((word >> 8) + 1).float()
    bits = u.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1
    z = f * f
    p = torch.full_like(f, _LOG[0])
    for constant in _LOG[1:]:
        p = p * f + constant
    k = (exponent - 24).float()
    y = (p * f) * z
    y = y + k * _LN2_LOW
    y = y - z * 0.5
    result = f + y
    result = result + k * _LN2_HIGH
    return torch.where(result == 0, -0.0, result)


def _sin_cos(word: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of ``2 pi (word >> 8) / 2**24``."""
    t = word >> 8
    quarter = (t + (1 << 21)) >> 22
    x = (t - (quarter << 22)).float() * _ANGLE
    q = x * x
    s = q * _SIN[0] + _SIN[1]
    s = s * q + _SIN[2]
    s = (s * q) * x + x
    c = q * _COS[0] + _COS[1]
    c = c * q + _COS[2]
    c = (c * q) * q
    c = (c - q * 0.5) + 1
    quarter = quarter & 3
    swap = (quarter & 1) == 1
    sin, cos = torch.where(swap, c, s), torch.where(swap, s, c)
    return torch.where(quarter >= 2, -sin, sin), torch.where((quarter == 1) | (quarter == 2), -cos, cos)


REFERENCES = {"rand.randn": randn}
