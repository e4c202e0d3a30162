"""Philox4x32-10 in PyTorch: 32-bit words held in int64, as PyTorch multiplies no unsigned 32-bit numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, by halves so that nothing passes 63 bits."""
    low = (x & 0xFFFF) * multiplier
    middle = (x >> 16) * multiplier + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32: four words of each counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_ in range(10):
        if round_:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def draw(state: Tensor, count: int, stream: int) -> Tensor:
    """Words for ``count`` elements, ``(blocks, 4)``, and the offset in ``state`` advanced past their blocks."""
    blocks = -(-count // 4)
    counter = state[1] + torch.arange(blocks, device=state.device)
    low, high = counter & _MASK, (counter >> 32) & _MASK
    key = (state[0] & _MASK, (state[0] >> 32) & _MASK)
    zero = torch.zeros_like(low)
    words = torch.stack(philox(key, (low, high, zero + stream, zero)), dim=1)
    state[1] += blocks
    return words
