"""Reference of quant.cast_back."""

from __future__ import annotations

from torch import Tensor

from ...formats import FLOAT_OUT
from ..scales import dequantize


def cast_back(
    x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int
) -> Tensor:
    return dequantize(x, x_sf, x_block_rows, x_block_columns).to(FLOAT_OUT[fmt])


REFERENCES = {"quant.cast_back": cast_back}
