"""Reference of scale factors: amax of blocks, scales in each mode, their layouts, and quantization in blocks.

Divisions are by tensors, never by Python numbers: PyTorch turns the latter into a multiplication by a reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import FORMATS, PACKED_DTYPE
from .codes import decode, encode, encode_stochastic

_FLT_MAX = torch.finfo(torch.float32).max


def block_amax(x: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """Largest magnitude of each block of fp32 ``(M, K)``, over the elements that exist.

    Taken over bit patterns, where Inf and NaN sort above every finite value: a block that holds one gives one.
    """
    rows, columns = x.shape
    block_rows, block_columns = _at_most(block_rows, rows), _at_most(block_columns, columns)
    bits = x.abs().view(torch.int32)
    bits = pad(bits, (0, -columns % block_columns, 0, -rows % block_rows))
    row_blocks, column_blocks = bits.shape[0] // block_rows, bits.shape[1] // block_columns
    if not bits.numel():
        return x.new_zeros(row_blocks, column_blocks)
    blocks = bits.view(row_blocks, block_rows, column_blocks, block_columns)
    return blocks.amax(dim=(1, 3)).view(torch.float32)


def block_scales(
    amax: Tensor, qmax: float, clamp_min: float, round_sf: bool = False, e4m3_sf: bool = False
) -> tuple[Tensor, Tensor]:
    """The scale and the factor that quantizes, ``(sf, inv)`` in fp32, of each amax.

    The factor is at most the largest finite number, so that zeros stay zeros with the amax clamp at 0. An amax that is
    not finite gives NaN for both.
    """
    amax = amax.masked_fill(~amax.isfinite(), float("nan"))
    a = torch.maximum(amax, torch.full_like(amax, clamp_min))
    top = torch.full_like(a, qmax)
    sf = a / top
    if round_sf:
        exponent = (sf.view(torch.int32) + 0x7FFFFF) >> 23
        inv = ((254 - exponent) << 23).view(torch.float32)
        sf = (exponent << 23).view(torch.float32)
        bad = amax.isnan()
        return sf.masked_fill(bad, float("nan")), inv.masked_fill(bad, float("nan"))
    if e4m3_sf:
        sf = encode(sf, "e4m3").float()
        top, a = torch.ones_like(sf), sf
    return sf, (top / a).clamp(max=_FLT_MAX)


def spread(blocks: Tensor, block_rows: int, block_columns: int, rows: int, columns: int) -> Tensor:
    """One value for each block as one for each element of ``(rows, columns)``."""
    block_rows, block_columns = _at_most(block_rows, rows), _at_most(block_columns, columns)
    wide = blocks.repeat_interleave(block_columns, dim=1)[:, :columns] if block_columns > 1 else blocks
    return wide.repeat_interleave(block_rows, dim=0)[:rows] if block_rows > 1 else wide


def _at_most(block: int, extent: int) -> int:
    """A block past the end of a matrix takes no more memory than one that ends with it."""
    return min(block, max(extent, 1))


def quantize(
    x: Tensor,
    fmt: str,
    block_rows: int,
    block_columns: int,
    clamp_min: float,
    round_sf: bool = False,
    e4m3_sf: bool = False,
    x_sf: Tensor | None = None,
    stochastic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize fp32 (or bf16) ``(M, K)`` in blocks: stored data, and fp32 scales ``(row blocks, column blocks)``.

    With ``x_sf``, one fp32 scale for each element, ``x * x_sf`` is quantized, as ``x * (x_sf * inv)``.
    """
    x = x.float()
    size = (block_rows, block_columns)
    amax = block_amax(x if x_sf is None else x * x_sf, *size)
    sf, inv = block_scales(amax, FORMATS[fmt].qmax, clamp_min, round_sf, e4m3_sf)
    factor = spread(inv, *size, *x.shape)
    v = x * (factor if x_sf is None else x_sf * factor)
    return (encode_stochastic if stochastic else encode)(v, fmt), sf


def quantize_with(x: Tensor, fmt: str, block_rows: int, block_columns: int, sf: Tensor) -> Tensor:
    """Quantize ``(M, K)`` in blocks with given scales: stored data of ``x * (1 / sf)``."""
    sf = sf.float()
    factor = spread(torch.ones_like(sf) / sf, block_rows, block_columns, *x.shape)
    return encode(x.float() * factor, fmt)


def dequantize(data: Tensor, sf: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """The fp32 values of quantized data with scales in any layout."""
    values = decode(data)
    return values * element_scales(sf, block_rows, block_columns, *values.shape)


# ---------------------------------------------------------------------- layouts


def store_scales(
    sf: Tensor, packed: bool = False, e4m3_sf: bool = False, pack_rows: bool = False, ue8m0_per_word: int = 4
) -> Tensor:
    """Scales in the dtype and shape of their layout, row-major: fp32, e4m3, or packed UE8M0.

    Column-major results get their strides, and zeros in the padding, when they are copied into place.
    """
    if packed:
        return pack_exponents(sf.view(torch.int32) >> 23, pack_rows, ue8m0_per_word)
    return encode(sf, "e4m3") if e4m3_sf else sf


def pack_exponents(exponents: Tensor, pack_rows: bool = False, ue8m0_per_word: int = 4) -> Tensor:
    """UE8M0 bytes in little-endian words along the columns, or along the rows; unused bytes are 0."""
    data = exponents.to(torch.uint8)
    if pack_rows:
        return pack_exponents(data.t(), False, ue8m0_per_word).t().contiguous()
    data = pad(data, (0, -data.shape[1] % ue8m0_per_word)).contiguous()
    if not data.numel():
        return data.new_empty((data.shape[0], data.shape[1] // ue8m0_per_word), dtype=PACKED_DTYPE[ue8m0_per_word])
    return data.view(PACKED_DTYPE[ue8m0_per_word])


def unpack_exponents(words: Tensor, pack_rows: bool = False) -> Tensor:
    """The UE8M0 bytes of packed words, as uint8, unused ones included."""
    if pack_rows:
        return unpack_exponents(words.t()).t()
    if not words.numel():
        return words.new_empty((words.shape[0], words.shape[1] * words.element_size()), dtype=torch.uint8)
    # A copy, because a single column-major word counts as contiguous and still has another stride.
    return words.new_empty(words.shape).copy_(words).view(torch.uint8)


def decode_ue8m0(exponents: Tensor) -> Tensor:
    """UE8M0 bytes as fp32: 0 is 2**-127, 255 is NaN."""
    e = exponents.to(torch.int32)
    bits = torch.where(e == 0, 1 << 22, torch.where(e == 255, 0x7FC00000, e << 23))
    return bits.to(torch.int32).view(torch.float32)


def load_scales(sf: Tensor, block_columns: int, row_blocks: int, column_blocks: int) -> Tensor:
    """Scales in any layout, known by dtype and strides, as fp32 ``(row_blocks, column_blocks)``."""
    if sf.dtype in PACKED_DTYPE.values():
        return decode_ue8m0(unpack_exponents(sf, block_columns == 1))[:row_blocks, :column_blocks]
    return sf.float()


def element_scales(sf: Tensor, block_rows: int, block_columns: int, rows: int, columns: int) -> Tensor:
    """Scales in any layout as one fp32 scale for each element of ``(rows, columns)``."""
    blocks = load_scales(sf, block_columns, -(-rows // block_rows), -(-columns // block_columns))
    return spread(blocks, block_rows, block_columns, rows, columns)
