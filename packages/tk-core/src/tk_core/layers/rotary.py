"""Rotary embedding with gradients: ``rotary_embedding`` and the module ``RotaryEmbedding``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks
from ..transform.apply_rotary import apply_rotary
from ._backend import keep_backend, on_kept_backend


def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate pairs of channels by position, differentiably, into new tensors.

    The last ``D`` channels of each head are rotated by ``transform.apply_rotary``, the others copied. The backward pass
    is the opposite rotation.

    Args:
        query: ``(N, heads, C)`` or ``(B, S, heads, C)``, ``C >= D``; as for ``transform.apply_rotary``, and so are all
            other arguments.
        cos_sin_cache: ``(L, D)`` float32, a constant.
        key: as ``query``, with any number of heads and any ``C >= D``.

    Returns:
        The rotated query, contiguous; with ``key`` a pair of both.

    Raises:
        InvalidArgumentError, InvalidDtypeError, UnsupportedError: as ``transform.apply_rotary``.

    Gradient: of ``query`` and ``key``, once; ``cos_sin_cache`` is a constant.
    Determinism: bitwise reproducible.
    Cost: one copy and one kernel each way; nothing but the cache and positions is kept for the backward pass.
    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).

    >>> rotary_embedding(torch.tensor([[[5.0, 1.0, 0.0]]]), torch.tensor([[0.0, 1.0]])).tolist()
    [[[5.0, 0.0, 1.0]]]
    """
    op = "layers.rotary_embedding"
    checks.is_tensor(op, "cos_sin_cache", cos_sin_cache)
    checks.rank(op, "cos_sin_cache", cos_sin_cache, "(L, D)")
    checks.is_tensor(op, "query", query)
    if key is not None:
        checks.is_tensor(op, "key", key)
    for name, t in (("query", query), ("key", key)):
        if t is not None and t.dim() and t.shape[-1] < cos_sin_cache.shape[-1]:
            channels = cos_sin_cache.shape[-1]
            checks.invalid(op, name, f"have at least {channels} channels", t.shape[-1])
    rotated = _Rotary.apply(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)
    return rotated[0] if key is None else rotated


def _rotated(
    query: Tensor | None, key: Tensor | None, cos_sin_cache: Tensor, *options: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Copies with their last channels rotated."""
    copies = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in (query, key)]
    views = [t[..., t.shape[-1] - cos_sin_cache.shape[1] :] for t in copies if t is not None]
    if views:
        apply_rotary(views[0], cos_sin_cache, views[1] if len(views) == 2 else None, *options)
    return copies[0], copies[1]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        conjugate: bool,
        seqlen_offset: int,
    ) -> tuple[Tensor, ...]:
        keep_backend(ctx)
        ctx.save_for_backward(cos_sin_cache, positions)
        ctx.options = (interleaved, not conjugate, seqlen_offset)
        ctx.set_materialize_grads(False)
        rotated = _rotated(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)
        return tuple(t for t in rotated if t is not None)

    @staticmethod
    @once_differentiable
    @on_kept_backend
    def backward(ctx: Any, query_grad: Tensor | None, key_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        cos_sin_cache, positions = ctx.saved_tensors
        grads = _rotated(query_grad, key_grad, cos_sin_cache, positions, *ctx.options)
        return (*grads, None, None, None, None, None)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with a table of cosines and sines.

    Args:
        dim: rotated channels ``D`` of a head, even; heads may have more, of which the last ``D`` are rotated.
        max_positions: rows of the table.
        base: pair ``i`` turns by ``base ** (-2 i / D)`` per position.
        interleaved: pair neighbouring channels instead of halves.
        frequencies: ``(D / 2,)`` turns per position instead of those of ``base``, for scaled variants.
        device: where the table lives.
    """

    cos_sin_cache: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int,
        base: float = 10000.0,
        interleaved: bool = False,
        frequencies: Tensor | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            checks.invalid("layers.RotaryEmbedding", "dim", "be even and at least 2", dim)
        checks.at_least("layers.RotaryEmbedding", "max_positions", max_positions, 1)
        if frequencies is None:
            frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        checks.shape("layers.RotaryEmbedding", "frequencies", frequencies, (dim // 2,), "(dim / 2,)")
        self.interleaved = interleaved
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies.double().cpu()
        table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
        self.register_buffer("cos_sin_cache", table.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Move the table like any buffer, but keep it in fp32: ``model.bfloat16()`` converts weights, not angles."""
        table = self.cos_sin_cache
        super()._apply(fn, recurse)
        moved = self.cos_sin_cache
        if moved.dtype != table.dtype:
            self.cos_sin_cache = moved.to(table.dtype) if moved.is_meta else table.to(moved.device)
        return self

    def forward(
        self, query: Tensor, key: Tensor | None = None, positions: Tensor | None = None, seqlen_offset: int = 0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply ``rotary_embedding``: the rotated query, and with ``key`` both."""
        return rotary_embedding(
            query, self.cos_sin_cache, key, positions, self.interleaved, seqlen_offset=seqlen_offset
        )

    def extra_repr(self) -> str:
        """The settings."""
        length, dim = self.cos_sin_cache.shape
        return f"{dim}, max_positions={length}, interleaved={self.interleaved}"
