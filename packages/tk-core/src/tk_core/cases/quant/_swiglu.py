"""Inputs and comparisons that the SwiGLU cases share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...reference.quant._swiglu import rows_of_psum
from ...reference.scales import element_scales
from .. import Call, Maker, bytes_of

NAN, INF = float("nan"), float("inf")


def psum_of(m: Maker, counts: Sequence[int], alignment: int) -> tuple[Tensor, int]:
    """Ends of the rows of experts, and the rows of a buffer that holds them all, padding included."""
    ends, start = [], 0
    for count in counts:
        ends.append(start + count)
        start = -(-(start + count) // alignment) * alignment
    return m.tensor(ends, torch.int32), start


def gate_up(m: Maker, rows: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal gate and up columns."""
    return m.randn(rows, 2 * channels, dtype=dtype)


def poisoned(x: Tensor, arguments: dict[str, object]) -> Tensor:
    """The tensor with NaN in rows that are not valid."""
    return torch.where(valid_rows(x.shape[0], arguments, x.device)[:, None], x, NAN)


def valid_rows(rows: int, arguments: dict[str, object], device: torch.device) -> Tensor:
    """Which rows of a call are valid, from its keyword arguments."""
    psum, experts = arguments.get("psum_num_tokens_per_expert"), arguments.get("pos_to_expert")
    if isinstance(psum, Tensor):
        alignment = arguments.get("token_alignment")
        return rows_of_psum(rows, psum, alignment if isinstance(alignment, int) else 128)
    if isinstance(experts, Tensor):
        return experts >= 0
    return torch.ones(rows, dtype=torch.bool, device=device)


def clear_rows(arguments: Call, *results: Tensor) -> None:
    """Clear the rows of a forward pass that are not valid, which are unspecified."""
    for result in results:
        rows = valid_rows(result.shape[0], arguments.kwargs, result.device)
        bits(result)[~rows] = 0


def bits(t: Tensor) -> Tensor:
    """A view that can be indexed and assigned, of float8 too."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def clear_poisoned_codes(q: Tensor, sf: Tensor, block_rows: int, block_columns: int) -> None:
    """Clear the codes of blocks with a NaN scale, which are unspecified."""
    bits(q)[element_scales(sf, block_rows, block_columns, *q.shape).isnan()] = 0


def valid_bytes(arguments: Call, results: list[Tensor]) -> int:
    """Least bytes of a forward pass: valid rows of the input read once, those of the results written once."""
    x = arguments.args[0]
    rows = x.shape[0]
    valid = int(valid_rows(rows, arguments.kwargs, x.device).sum())
    return (bytes_of([x]) + bytes_of(r for r in results if r.shape[0] == rows)) * valid // max(rows, 1)
