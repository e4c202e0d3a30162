"""Reference of apply_rotary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arithmetic import fma


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> None:
    """Rotate in float32, or in the float64 of ``query``, and write the tensors."""
    if positions is None:
        positions = torch.arange(query.shape[-3], device=query.device).expand(query.shape[:-2])
    cos, sin = _angles(cos_sin_cache, positions.long() + seqlen_offset)
    if conjugate:
        sin = -sin
    for t in (query, key):
        if t is not None:
            _rotate(t, cos, sin, interleaved)


def _angles(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(..., 1, D / 2)``; zeros at positions outside of the cache."""
    length, channels = cos_sin_cache.shape
    rows = torch.cat([cos_sin_cache, cos_sin_cache.new_zeros(1, channels)])
    known = (positions >= 0) & (positions < length)
    cos, sin = rows[torch.where(known, positions, length)].unsqueeze(-2).chunk(2, dim=-1)
    return cos, sin


def _rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = t.shape[-1] // 2
    a, b = (t[..., 0::2], t[..., 1::2]) if interleaved else (t[..., :half], t[..., half:])
    compute = torch.float64 if t.dtype == torch.float64 else torch.float32
    first, second, c, z = a.to(compute), b.to(compute), cos.to(compute), sin.to(compute)
    rotated = fma(first, c, -(second * z)), fma(first, z, second * c)
    a.copy_(rotated[0])
    b.copy_(rotated[1])


REFERENCES = {"transform.apply_rotary": apply_rotary}
