"""Reference of moe.topk_gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ._shared import ranking_keys


def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """First ``num_topk`` columns of a stable descending sort."""
    return torch.sort(ranking_keys(scores), dim=1, descending=True, stable=True).indices[:, :num_topk].contiguous()


REFERENCES = {"moe.topk_gate": topk_gate}
