"""Sizes of row tiles in UB."""

from __future__ import annotations

UB_BYTES = 96 * 1024
"""UB for the buffers of one tile; twice this fits beside a second set (216 KB with SIMT code)."""
MAX_ROWS = 128


def room(columns: int) -> int:
    """Columns of a tile, in powers of two, so that few kernels serve all widths."""
    return max(32, 1 << (columns - 1).bit_length())


def tile_rows(row_bytes: int) -> int:
    """Rows of a tile whose row takes ``row_bytes`` in all its buffers; 0 where not even one fits."""
    return min(MAX_ROWS, UB_BYTES // row_bytes)
