"""Stable top-k of each row of expert scores: ``topk_gate``."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..formats import TensorSpec
from ..op import Operator
from ..repeat import repeatable


@repeatable
def topk_gate(scores: Tensor, num_topk: int, out: Tensor | None = None) -> Tensor:
    """Select the experts with the highest scores for each token.

    ``topk_idx[t, k]`` is the expert with the ``k``-th largest score of token ``t``. Equal scores: the lower expert
    first, and -0.0 equals +0.0. NaN ranks below -inf. So ids are distinct and in ``[0, E)`` whatever the scores.

    Args:
        scores: ``(N, E)`` float32, ``N >= 0``, ``E >= 1``; ``stride(1) == 1``, any row stride.
        num_topk: ``K``, experts for each token, ``1 <= K <= E``.
        out: buffer for the result; None allocates it.

    Returns:
        ``(N, K)`` int64, contiguous: ids in descending order of score. ``out`` itself where given.

    Raises:
        InvalidArgumentError: a shape or stride outside the above, or ``num_topk`` outside ``[1, E]``.
        InvalidDtypeError: ``scores`` is not float32, or ``out`` not int64.
        UnsupportedError: legal, but the backend of ``scores.device`` has no kernel for it; the message says why.

    Gradient: none; ids are integers. Gather the scores at the ids to let gradients through.
    Determinism: bitwise reproducible, and equal to the reference: ties never depend on device or grid.
    Cost: one pass; reads ``scores``, writes ``topk_idx``; bound by instructions, about ``K`` warp reductions a token.
    Source: the stable top-k of the gate in DeepSeek-V3, section 2.1.2.

    >>> topk_gate(torch.tensor([[0.5, 2.0, 2.0, -1.0]]), 3).tolist()
    [[1, 2, 0]]
    """
    if out is None:
        return TOPK_GATE(scores, num_topk)
    return TOPK_GATE.into((out,), scores, num_topk)[0]


def _check(scores: Tensor, num_topk: int) -> None:
    op = "moe.topk_gate"
    checks.is_tensor(op, "scores", scores)
    checks.dtype(op, "scores", scores, (torch.float32,))
    checks.rank(op, "scores", scores, "(N, E)")
    checks.last_stride_1(op, "scores", scores)
    checks.at_least(op, "num_topk", num_topk, 1)
    if num_topk > scores.shape[1]:
        checks.invalid(op, "num_topk", f"be at most the number of experts E = {scores.shape[1]}", num_topk)


def _outputs(scores: Tensor, num_topk: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec((scores.shape[0], num_topk), torch.int64),)


TOPK_GATE = Operator("moe.topk_gate", "(Tensor scores, int num_topk) -> Tensor", check=_check, outputs=_outputs)
