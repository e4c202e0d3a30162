"""Results allocated between guard bands and filled with a poison byte: shows what a kernel forgot or overran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import op
from ..formats import TensorSpec

GUARD = 512
"""Bytes before and after each result; a multiple of every alignment that kernels ask for."""
SENTINEL = 0xA5


class Guards:
    """The buffers behind the results of a scope."""

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self._buffers: list[tuple[Tensor, int]] = []

    def allocate(self, spec: TensorSpec, like: Tensor) -> Tensor:
        """Allocate one result: guard, poison, guard."""
        stride = spec.stride
        if stride is None:
            stride = torch.empty(spec.shape, device="meta").stride()
        elements = spec.storage
        if elements is None:
            empty = any(s == 0 for s in spec.shape)
            elements = 0 if empty else 1 + sum((s - 1) * d for s, d in zip(spec.shape, stride))
        size = elements * spec.dtype.itemsize
        room = -(-size // 16) * 16
        buffer = torch.full((GUARD + room + GUARD,), SENTINEL, dtype=torch.uint8, device=like.device)
        buffer[GUARD : GUARD + size] = self.poison
        self._buffers.append((buffer, size))
        return buffer[GUARD : GUARD + room].view(spec.dtype).as_strided(spec.shape, stride)

    def overrun(self) -> str | None:
        """Which guard band was written, or None."""
        for i, (buffer, size) in enumerate(self._buffers):
            before, after = buffer[:GUARD], buffer[GUARD + size :]
            for name, band in (("before", before), ("after", after)):
                hit = torch.nonzero(band != SENTINEL)
                if hit.numel():
                    return (
                        f"wrote {hit.shape[0]} bytes {name} result[{i}], first at byte {int(hit[0])} of that guard band"
                    )
        return None

    def untouched(self) -> bool:
        """Whether no result byte was written."""
        return all(bool((b[GUARD : GUARD + size] == self.poison).all()) for b, size in self._buffers)


@contextlib.contextmanager
def guarded(poison: int) -> Iterator[Guards]:
    """Allocate all results of a scope between guards, filled with ``poison``."""
    guards = Guards(poison)
    with op.allocator(guards.allocate):
        yield guards
