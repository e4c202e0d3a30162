"""Rotary position embedding in place: ``apply_rotary``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..op import Operator
from ..repeat import repeatable


@repeatable
def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotate pairs of channels of each head by an angle that depends on the position, in place.

    The position of a token is ``p = seqlen_offset + positions[b, s]``, or ``seqlen_offset + s`` without ``positions``.
    With ``c = cos_sin_cache[p, i]`` and ``z = cos_sin_cache[p, D / 2 + i]``, the pair ``(a, b)`` of channels
    ``(i, i + D / 2)``, or ``(2i, 2i + 1)`` if ``interleaved``, becomes, in fp32 with ``fma`` rounded once::

        a' = fma(a, c, -(b * z)),  b' = fma(a, z, b * c)        # with conjugate: z replaced by -z

    rounded to the dtype of ``query``. A position outside of ``[0, L)`` reads ``c = z = 0``, so the token becomes zero;
    with ``TK_VALIDATE=1`` in the environment it raises InvalidArgumentError (which synchronizes). float64 input is
    computed in float64.

    Args:
        query: ``(N, heads, D)`` or ``(B, S, heads, D)`` bfloat16, float32 or float64, ``D`` even, at least 2; unit
            stride along the last dimension, any other strides. To rotate some channels of a head, pass a view of them:
            ``q[..., -D:]``; the others are not touched.
        cos_sin_cache: ``(L, D)`` float32, cosines in the left half and sines in the right, unit stride along the last
            dimension; no overlap with ``query`` or ``key``.
        key: as ``query``, with any number of heads; no overlap with ``query``.
        positions: ``(N,)`` or ``(B, S)`` int32 or int64; unit stride along the last dimension, any batch stride; no
            overlap with ``query`` or ``key``.
        interleaved: pair neighbouring channels (GPT-J) instead of halves (GPT-NeoX).
        conjugate: rotate back: the inverse of the rotation, and its gradient.
        seqlen_offset: added to every position; without ``positions``, ``0 <= seqlen_offset <= L - S``.

    Returns:
        None; ``query`` and ``key`` hold the result.

    Raises:
        InvalidArgumentError: a shape, stride, overlap or offset outside the above.
        InvalidDtypeError: a tensor has another dtype.
        UnsupportedError: legal, but the backend of ``query.device`` has no kernel for it; the message says why.

    Gradient: the same call with ``conjugate`` negated; tk_core.layers.rotary_embedding joins the two.
    Determinism: bitwise reproducible, and equal to the reference bit for bit.
    Cost: one pass; reads and writes ``query`` and ``key``; bound by memory bandwidth.
    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).

    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> apply_rotary(q, torch.tensor([[0.0, 1.0]]))
    >>> q.tolist()
    [[[0.0, 1.0]]]
    """
    checks.is_int("transform.apply_rotary", "seqlen_offset", seqlen_offset)
    APPLY_ROTARY(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)


def _check(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> None:
    op = "transform.apply_rotary"
    checks.is_tensor(op, "query", query)
    checks.dtype(op, "query", query, (torch.bfloat16, torch.float32, torch.float64))
    if query.dim() not in (3, 4):
        checks.invalid(op, "query", "have shape (N, heads, D) or (B, S, heads, D)", tuple(query.shape))
    _check_heads(op, "query", query)
    _check_cache(op, query, cos_sin_cache)
    if key is not None:
        _check_key(op, query, key)
    if positions is not None:
        _check_positions(op, query, cos_sin_cache, positions, seqlen_offset)
    else:
        _check_offset(op, query.shape[-3], cos_sin_cache.shape[0], seqlen_offset)
    for name, read in (("cos_sin_cache", cos_sin_cache), ("positions", positions)):
        for written_name, written in (("query", query), ("key", key)):
            if read is not None and written is not None:
                checks.disjoint(op, name, read, written_name, written)


def _check_heads(op: str, name: str, t: Tensor) -> None:
    channels = t.shape[-1]
    if channels < 2 or channels % 2:
        checks.invalid(op, name, "have an even number of channels, at least 2", channels)
    checks.last_stride_1(op, name, t)
    checks.distinct_elements(op, name, t)


def _check_cache(op: str, query: Tensor, cache: Tensor) -> None:
    checks.is_tensor(op, "cos_sin_cache", cache)
    checks.dtype(op, "cos_sin_cache", cache, (torch.float32,))
    checks.rank(op, "cos_sin_cache", cache, "(L, D)")
    checks.shape(op, "cos_sin_cache", cache, (cache.shape[0], query.shape[-1]), "(L, D)")
    checks.last_stride_1(op, "cos_sin_cache", cache)
    checks.same_device(op, "cos_sin_cache", cache, query.device, "query")


def _check_key(op: str, query: Tensor, key: Tensor) -> None:
    checks.is_tensor(op, "key", key)
    checks.dtype(op, "key", key, (query.dtype,))
    if key.dim() != query.dim() or key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        checks.invalid(op, "key", f"have the shape of query {tuple(query.shape)} but for the heads", tuple(key.shape))
    checks.same_device(op, "key", key, query.device, "query")
    _check_heads(op, "key", key)
    checks.disjoint(op, "key", key, "query", query)


def _check_positions(op: str, query: Tensor, cache: Tensor, positions: Tensor, seqlen_offset: int) -> None:
    checks.is_tensor(op, "positions", positions)
    checks.dtype(op, "positions", positions, (torch.int32, torch.int64))
    checks.shape(op, "positions", positions, query.shape[:-2], "query.shape[:-2]")
    checks.last_stride_1(op, "positions", positions)
    checks.same_device(op, "positions", positions, query.device, "query")
    checks.values_within(op, "positions", positions, -seqlen_offset, cache.shape[0] - seqlen_offset)


def _check_offset(op: str, tokens: int, length: int, seqlen_offset: int) -> None:
    checks.at_least(op, "seqlen_offset", seqlen_offset, 0)
    if tokens > length:
        checks.invalid(op, "cos_sin_cache", f"have a row for each of the S = {tokens} positions", f"L = {length}")
    if seqlen_offset + tokens > length:
        checks.invalid(op, "seqlen_offset", f"be at most L - S = {length} - {tokens}", seqlen_offset)


def _empty(outs: tuple[Any, ...], query: Tensor, cos_sin_cache: Tensor, key: Tensor | None, *rest: Any) -> bool:
    """Whether there is nothing to do: neither heads nor tokens."""
    return query.numel() == 0 and (key is None or key.numel() == 0)


APPLY_ROTARY = Operator(
    "transform.apply_rotary",
    "(Tensor(a!) query, Tensor cos_sin_cache, Tensor(b!)? key, Tensor? positions, bool interleaved, bool conjugate, "
    "SymInt seqlen_offset) -> ()",
    check=_check,
    gradient="tk_core.layers.rotary_embedding",
    empty=_empty,
)
