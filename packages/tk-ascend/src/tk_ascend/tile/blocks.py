"""Blocks of a matrix that share a scale: how tiles of UB are cut into them, and the SIMT regions that quantize a tile.

One thread takes the amax of a column of a split, which is a part of a block's rows; then one thread a block takes the
largest of those; then one thread a block makes scale and factor, and stores the scale to global memory, through
strides, so that one kernel serves every layout; then each thread encodes a column of its rows.
"""

from typing import Any, NamedTuple

from tk_core.formats import Format, ceil_div

from . import codes, scale_tensors
from .indices import kept, within

EXACT, ROUNDED, GIVEN = range(3)
"""How a scale comes: from the amax; from the amax, rounded up to a power of two; as an argument."""


class Tiling(NamedTuple):
    """A tile of UB. Its columns, in ``splits`` parts of its rows, are the threads."""

    height: int
    width: int

    @property
    def threads(self) -> int:
        return 1024

    @property
    def splits(self) -> int:
        return self.threads // self.width

    @property
    def rows(self) -> int:
        """Rows that a thread encodes."""
        return self.height // self.splits


class Plan(NamedTuple):
    """What a core takes at a time, an item: whole blocks, and whole bytes of codes."""

    rows: int
    columns: int
    items: int
    items_across: int
    item_rows: int
    item_columns: int
    block_rows: int
    block_columns: int
    splits: int
    split_rows: int

    def fits(self, tiling: Tiling) -> bool:
        """Whether each item is one tile."""
        return min(self.item_rows, self.rows) <= tiling.height and min(self.item_columns, self.columns) <= tiling.width


def plan(rows: int, columns: int, block_rows: int, block_columns: int, tiling: Tiling) -> Plan:
    """Cut a matrix into items. A block that is larger than a tile makes an item of several tiles."""
    block_rows, block_columns = min(block_rows, rows), min(block_columns, columns)
    down = max(1, min(tiling.height // block_rows, tiling.splits))
    pair = 1 + block_columns % 2
    across = pair * max(1, tiling.width // (pair * block_columns))
    items_across = ceil_div(columns, across * block_columns)
    splits = tiling.splits // down
    return Plan(
        rows,
        columns,
        items=ceil_div(rows, down * block_rows) * items_across,
        items_across=items_across,
        item_rows=down * block_rows,
        item_columns=across * block_columns,
        block_rows=block_rows,
        block_columns=block_columns,
        splits=splits,
        split_rows=ceil_div(block_rows, splits),
    )


class Place(NamedTuple):
    """A tile or an item: its first row and column in the matrix, its size, and where it is in its item."""

    row: Any
    column: Any
    height: Any
    width: Any
    down: Any = 0
    across: Any = 0


class Block(NamedTuple):
    """The size of a block, and its splits."""

    rows: Any
    columns: Any
    splits: Any
    split_rows: Any


class Scaling(NamedTuple):
    """How scales are made, and where they are: see ``scale_tensors.arguments``."""

    mode: Any
    qmax: Any
    clamp_min: Any
    wide: Any
    narrow: Any
    kind: Any
    strides: tuple[Any, Any]
    bits: tuple[Any, Any]


def storing(T: Any) -> Any:
    """The macro that stores the UE8M0 byte of a block, for a matrix of so many rows and columns."""

    @T.macro
    def store_exponent(scaling, at, exponent, row, column, block, rows, columns):
        scaling.narrow[at] = T.Cast(T.uint8, exponent)
        # The last word has an unused byte where there is no other block for it.
        beyond = (row + scaling.bits[0]) * block.rows >= rows
        if (row & scaling.bits[0]) + (column & scaling.bits[1]) == 0 and (
            beyond or (column + scaling.bits[1]) * block.columns >= columns
        ):
            scaling.narrow[at + 1] = T.Cast(T.uint8, 0)

    return store_exponent


def casting(T: Any, tiling: Tiling, form: Format, source: Any, transposed: bool, several: bool) -> tuple[Any, ...]:
    """Macros that find the amax of columns, merge it over tiles, make the scales of blocks, and encode a tile.

    Args:
        source: what the elements of a tile are, a ``sources.Source``.
        transposed: whether the tile of codes is.
        several: whether an item has several tiles, so that their amax is merged.
    """
    splits, rows, threads = tiling.splits, tiling.rows, tiling.threads

    store_exponent = storing(T)

    def group_of(at, c, group):
        """Where the scale of a column's quantized elements is in its tile."""
        return kept(T, T.truncdiv(at.column + c, group) - T.truncdiv(at.column, group)) if source.quantized else None

    @T.macro
    def find_amax(tiles, at, block, group, part):
        with T.SimtVF(threads=threads):
            for s, c in T.Parallel(splits, tiling.width):
                largest = T.alloc_var(T.int32)
                p = T.alloc_var(T.int32)
                start = T.alloc_var(T.int32)
                stop = T.alloc_var(T.int32)
                largest = 0
                if c < at.width:
                    p = T.truncdiv(s, block.splits)
                    start = p * block.rows + (s - p * block.splits) * block.split_rows - at.down
                    stop = T.min(T.min(start + block.split_rows, (p + 1) * block.rows - at.down), at.height)
                    start = T.max(start, 0)
                    g = group_of(at, c, group)
                    for k in T.serial(T.max(stop - start, 0)):
                        i = within(T, start + k, tiling.height)
                        largest = T.max(largest, codes.magnitude(T, source.value(T, tiles, i, c, g)))
                part[s, c] = largest

    @T.macro
    def largest_part(at, block, part, p, b):
        """The amax of the parts of a block that a tile has."""
        largest = T.alloc_var(T.int32)
        start = T.alloc_var(T.int32)
        stop = T.alloc_var(T.int32)
        largest = 0
        if p * block.splits < splits:
            start = T.max(b * block.columns - at.across, 0)
            stop = T.min((b + 1) * block.columns - at.across, at.width)
            for j in T.serial(block.splits):
                for k in T.serial(T.max(stop - start, 0)):
                    s = within(T, p * block.splits + j, splits)
                    largest = T.max(largest, part[s, within(T, start + k, tiling.width)])
        return largest

    @T.macro
    def merge_amax(at, block, part, most):
        with T.SimtVF(threads=threads):
            for p, b in T.Parallel(splits, tiling.width):
                found = kept(T, largest_part(at, block, part, p, b))
                most[p, b] = T.max(found, T.if_then_else(at.down + at.across > 0, most[p, b], 0))

    @T.macro
    def make_scales(item, block, scaling, rows, columns, part, most, factor):
        with T.SimtVF(threads=threads):
            for p, b in T.Parallel(splits, tiling.width):
                scale = T.alloc_var(T.float32)
                inverse = T.alloc_var(T.float32)
                if p * block.rows < item.height and b * block.columns < item.width:
                    row = kept(T, T.truncdiv(item.row, block.rows) + p)
                    column = kept(T, T.truncdiv(item.column, block.columns) + b)
                    amax = kept(T, most[p, b] if several else largest_part(item, block, part, p, b))
                    at = scale_tensors.offset(T, row, column, scaling.strides, scaling.bits)
                    if scaling.mode == GIVEN:
                        inverse = T.float32(1.0) / scaling.wide[at]
                    elif scaling.mode == EXACT:
                        scale, inverse = codes.scale(T, amax, scaling.clamp_min, scaling.qmax, False, False)
                    else:
                        scale, inverse = codes.scale(T, amax, scaling.clamp_min, scaling.qmax, True, False)
                    factor[p, b] = inverse
                    if scaling.kind == scale_tensors.UE8M0:
                        store_exponent(scaling, at, codes.exponent(T, scale), row, column, block, rows, columns)
                    elif scaling.mode != GIVEN:
                        scaling.wide[at] = scale

    @T.macro
    def encode(tiles, at, block, group, factor, coded):
        with T.SimtVF(threads=threads // form.codes):
            for s, c in T.Parallel(splits, tiling.width // form.codes):
                p = T.alloc_var(T.int32)
                b0 = T.alloc_var(T.int32)
                b1 = T.alloc_var(T.int32)
                f0 = T.alloc_var(T.float32)
                f1 = T.alloc_var(T.float32)
                if c * form.codes < at.width:
                    p = T.truncdiv(at.down + s * rows, block.rows)
                    b0 = T.truncdiv(at.across + c * form.codes, block.columns)
                    b1 = T.truncdiv(at.across + (c + 1) * form.codes - 1, block.columns)
                    f0 = factor[within(T, p, splits), within(T, b0, tiling.width)]
                    f1 = factor[within(T, p, splits), within(T, b1, tiling.width)]
                    g = group_of(at, c, group)
                    for k in T.serial(rows):
                        i = s * rows + k
                        if i < at.height:
                            if at.down + i >= (p + 1) * block.rows:
                                p = p + 1
                                f0 = factor[within(T, p, splits), within(T, b0, tiling.width)]
                                f1 = factor[within(T, p, splits), within(T, b1, tiling.width)]
                            if form.codes == 2:
                                low = codes.to_e2m1(T, kept(T, source.scaled(T, tiles, i, 2 * c, g, f0)))
                                high = codes.to_e2m1(T, kept(T, source.scaled(T, tiles, i, 2 * c + 1, g, f1)))
                                coded[i, c] = T.Cast(T.int8, low | (high << 4))
                            elif transposed:
                                coded[c, i] = codes.to_e4m3(T, kept(T, source.scaled(T, tiles, i, c, g, f0)))
                            else:
                                coded[i, c] = codes.to_e4m3(T, kept(T, source.scaled(T, tiles, i, c, g, f0)))

    return find_amax, merge_amax, make_scales, encode
