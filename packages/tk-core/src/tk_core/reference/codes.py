"""Reference of the element formats: e4m3, e2m1 and e5m6, encoded to nearest or stochastically, and decoded.

Written on bit patterns and comparisons only, so that CPU and GPU give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import FORMATS

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E4M3_NAN = 0x7F
_MASK32 = 0xFFFFFFFF

_LAYOUT = {"e4m3": (3, -6, 0x7E), "e2m1": (1, 0, 7)}
"""Mantissa bits, exponent of the smallest normal number, and largest finite code, by format."""


def encode(v: Tensor, fmt: str) -> Tensor:
    """Round fp32 values ``(M, K)`` to nearest even, saturated; returns stored data. NaN: 0x7F in e4m3, +6 in e2m1."""
    if fmt == "e4m3":
        return _encode_e4m3(v)
    if fmt == "e2m1":
        return _pack_e2m1(_encode_e2m1(v))
    return _pack_e5m6(_encode_e5m6(v))


def decode(data: Tensor) -> Tensor:
    """Stored data of any format (known by its dtype) as fp32 values ``(M, K)``, exactly."""
    if data.dtype == torch.float8_e4m3fn:
        return data.float()
    if data.dtype == torch.int8:
        return _decode_e2m1(data)
    return _decode_e5m6(data)


def _encode_e4m3(v: Tensor) -> Tensor:
    # Clamped first: older PyTorch turns values past 448 into NaN.
    codes = v.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill(v.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def _encode_e2m1(v: Tensor) -> Tensor:
    """Codes 0 to 15 in uint8. A tie goes to the even code: strict comparison below an odd code, else not."""
    a = v.abs()
    code = (a > 0.25).to(torch.uint8)
    for reached in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += reached
    return (code | v.signbit().to(torch.uint8) << 3).masked_fill(v.isnan(), 7)


def _pack_e2m1(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)


def _decode_e2m1(data: Tensor) -> Tensor:
    codes = data.contiguous().view(torch.uint8)
    values = torch.tensor(_E2M1_VALUES, device=data.device)
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).int()].flatten(-2)


def _encode_e5m6(v: Tensor) -> Tensor:
    """Codes 0 to 4095 in int32: the top 12 bits of the fp16 below, rounded by the low 17 bits of the fp32 mantissa."""
    bits = v.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 17) - (112 << 6)
    subnormal = (v.abs().clamp(max=2.0**-14) * 2.0**20).nan_to_num().int()
    code = torch.where(magnitude >= (113 << 23), normal, subnormal)
    code = code + ((bits & 0x1FFFF) + (code & 1) > 0x10000)
    return code.clamp(max=0x7FF) | (bits >> 20 & 0x800)


def _pack_e5m6(codes: Tensor) -> Tensor:
    """Eight codes in three 32-bit words, first code in the highest bits; words little-endian."""
    rows, columns = codes.shape
    h = codes.view(rows, columns // 8, 8).unbind(-1)
    words = torch.stack(
        (
            h[0] << 20 | h[1] << 8 | h[2] >> 4,
            (h[2] & 0xF) << 28 | h[3] << 16 | h[4] << 4 | h[5] >> 8,
            (h[5] & 0xFF) << 24 | h[6] << 12 | h[7],
        ),
        dim=-1,
    )
    data = torch.stack([(words >> 8 * i & 0xFF).to(torch.uint8) for i in range(4)], dim=-1)
    return data.view(rows, columns // 8 * 12)


def _decode_e5m6(data: Tensor) -> Tensor:
    rows, width = data.shape
    b = data.contiguous().view(rows, width // 12, 3, 4).long()
    w = (b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24).unbind(-1)
    codes = torch.stack(
        (
            w[0] >> 20,
            w[0] >> 8 & 0xFFF,
            (w[0] & 0xFF) << 4 | w[1] >> 28,
            w[1] >> 16 & 0xFFF,
            w[1] >> 4 & 0xFFF,
            (w[1] & 0xF) << 8 | w[2] >> 24,
            w[2] >> 12 & 0xFFF,
            w[2] & 0xFFF,
        ),
        dim=-1,
    )
    return (codes << 4).to(torch.int16).view(torch.float16).float().view(rows, width // 12 * 8)


# ---------------------------------------------------------------------- stochastic rounding


def random_bits(v: Tensor) -> tuple[Tensor, Tensor]:
    """The words ``r0`` and ``r1`` of each quad of columns of fp32 ``(M, K)``, as int64 ``(M, ceil(K / 4))``.

    They are a hash of the four bit patterns and of the number of the quad in its row; missing columns count as +0.0.
    """
    rows, columns = v.shape
    bits = torch.nn.functional.pad(v.view(torch.int32), (0, -columns % 4)).view(rows, -1, 4).long() & _MASK32
    h = torch.arange(bits.shape[1], device=v.device) & _MASK32
    for i, factor in enumerate((0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)):
        h = h + bits[..., i] * factor
    h = h & _MASK32
    h = h ^ h >> 23
    h = h * 0x7FEB352D & _MASK32
    h = h ^ h >> 16
    r0 = h * 0x846CA68B & _MASK32
    r1 = h * 0xD35A2D97 & _MASK32
    return r0 ^ r0 >> 11, r1 ^ r1 >> 11


def encode_stochastic(v: Tensor, fmt: str) -> Tensor:
    """Round fp32 values ``(M, K)`` stochastically to e4m3 or e2m1, saturated; returns stored data.

    Between neighbouring magnitudes ``L`` and ``U`` the result is ``U`` if ``r < floor(2**32 (|v| - L) / (U - L))``,
    with ``r = rotl32(r0, 8 i)`` for element ``i`` of a quad.
    """
    mantissa, smallest, largest = _LAYOUT[fmt]
    r0 = random_bits(v)[0]
    r = torch.stack([(r0 << 8 * i | r0 >> 32 - 8 * i) & _MASK32 for i in range(4)], dim=-1)
    r = r.view(v.shape[0], -1)[:, : v.shape[1]]
    a = v.abs().clamp(max=FORMATS[fmt].qmax).nan_to_num(FORMATS[fmt].qmax)
    exponent = ((a.view(torch.int32) >> 23) - 127).clamp(min=smallest)
    steps = a.double() * torch.exp2(mantissa - exponent.double())
    lower = steps.floor()
    up = r < ((steps - lower) * 2.0**32).long()
    codes = ((exponent - smallest << mantissa) + lower.int() + up).clamp(max=largest).to(torch.uint8)
    sign = v.signbit().to(torch.uint8)
    if fmt == "e2m1":
        return _pack_e2m1((codes | sign << 3).masked_fill(v.isnan(), 7))
    return (codes | sign << 7).masked_fill(v.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def round_stochastic_bf16(v: Tensor) -> Tensor:
    """Round fp32 values ``(M, K)`` stochastically to bf16: ``hi16 + [r < lo16]``, finite values staying finite."""
    r0, r1 = random_bits(v)
    r = torch.stack((r0 & 0xFFFF, r0 >> 16, r1 & 0xFFFF, r1 >> 16), dim=-1).view(v.shape[0], -1)[:, : v.shape[1]]
    bits = v.view(torch.int32).long() & _MASK32
    magnitude = (bits >> 16 & 0x7FFF) + (r < (bits & 0xFFFF))
    magnitude = torch.where(v.isfinite(), magnitude.clamp(max=0x7F7F), bits >> 16 & 0x7FFF)
    rounded = (magnitude | bits >> 16 & 0x8000).to(torch.int16).view(torch.bfloat16)
    return rounded.masked_fill(v.isnan(), float("nan"))
