"""The kernel of every operator that quantizes a matrix in blocks. Each vector core takes items in turn.

Bytes: x once in (twice where a block is larger than a tile), codes and scales once out.
"""

import math

import torch
from torch import Tensor

from tk_core.formats import FORMATS

from ..jit import Builder, vector_cores
from ..tile import scale_tensors
from ..tile.blocks import GIVEN, Block, Place, Scaling, Tiling, casting, plan
from ..tile.sources import InputScales, Source, Tiles, loading


def _build(
    dtype: str,
    gathered: bool,
    swiglu: bool,
    fmt: str,
    transposed: bool,
    height: int,
    width: int,
    several: bool,
    cores: int,
):
    from tilelang.ascend import language as T

    form, tiling, source = FORMATS[fmt], Tiling(height, width), Source(dtype, gathered, swiglu)
    code_dtype = "float8_e4m3fn" if fmt == "e4m3" else "int8"
    tokens, x_columns, ld, indices = (T.dynamic(n) for n in ("tokens", "x_columns", "ld", "indices"))
    q_rows, q_columns, wide_size, narrow_size = (
        T.dynamic(n) for n in ("q_rows", "q_columns", "wide_size", "narrow_size")
    )
    in_wide_size, in_narrow_size = T.dynamic("in_wide_size"), T.dynamic("in_narrow_size")
    load = loading(T, tiling, source)
    find_amax, merge_amax, make_scales, encode = casting(T, tiling, form, source, transposed, several)

    @T.macro
    def store(coded, at, codes_height, q):
        if transposed:
            T.copy(
                coded[0 : at.width, 0:codes_height], q[at.column : at.column + at.width, at.row : at.row + codes_height]
            )
        else:
            first = at.column // form.codes
            stored = at.width // form.codes
            T.copy(coded[0:codes_height, 0:stored], q[at.row : at.row + codes_height, first : first + stored])

    @T.prim_func
    def cast_blocks(
        x: T.StridedTensor((tokens, x_columns), (ld, 1), dtype),
        index: T.Tensor((indices,), T.int32),
        q: T.Tensor((q_rows, q_columns), code_dtype),
        wide: T.Tensor((wide_size,), T.float32),
        narrow: T.Tensor((narrow_size,), T.uint8),
        sf_kind: T.int32,
        row_stride: T.int64,
        column_stride: T.int64,
        row_bit: T.int32,
        column_bit: T.int32,
        in_wide: T.Tensor((in_wide_size,), T.float32),
        in_narrow: T.Tensor((in_narrow_size,), T.uint8),
        in_kind: T.int32,
        in_row_stride: T.int64,
        in_column_stride: T.int64,
        in_row_bit: T.int32,
        in_column_bit: T.int32,
        rows: T.int32,
        columns: T.int32,
        items: T.int32,
        items_across: T.int32,
        item_rows: T.int32,
        item_columns: T.int32,
        block_rows: T.int32,
        block_columns: T.int32,
        block_splits: T.int32,
        split_rows: T.int32,
        mode: T.int32,
        with_codes: T.int32,
        group: T.int32,
        qmax: T.float32,
        clamp_min: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(cores) as core:
            elements = T.alloc_shared((height, width), source.tile_dtype)
            scales = T.alloc_shared((height, width) if source.quantized else (1, 1), T.float32)
            coded = T.alloc_shared((width, height) if transposed else (height, width // form.codes), code_dtype)
            part = T.alloc_shared((tiling.splits, width), T.int32)
            most = T.alloc_shared((tiling.splits, width) if several else (1, 1), T.int32)
            factor = T.alloc_shared((tiling.splits, width), T.float32)
            top = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            high = T.alloc_var(T.int32)
            broad = T.alloc_var(T.int32)
            searched = T.alloc_var(T.int32)
            for number in T.Persistent([items], cores, core, group_size=1):
                top = T.truncdiv(number, items_across) * item_rows
                left = T.truncmod(number, items_across) * item_columns
                high = T.min(item_rows, rows - top)
                broad = T.min(item_columns, columns - left)
                tiles = Tiles(elements, scales)
                item = Place(top, left, high, broad)
                block = Block(block_rows, block_columns, block_splits, split_rows)
                given = InputScales(
                    group, in_wide, in_narrow, in_kind, (in_row_stride, in_column_stride), (in_row_bit, in_column_bit)
                )
                scaling = Scaling(
                    mode, qmax, clamp_min, wide, narrow, sf_kind, (row_stride, column_stride), (row_bit, column_bit)
                )
                searched = T.if_then_else(mode == GIVEN, 0, high)
                if several:
                    for down in T.serial(T.ceildiv(searched, height)):
                        for across in T.serial(T.ceildiv(broad, width)):
                            h = T.min(height, high - down * height)
                            w = T.min(width, broad - across * width)
                            at = Place(top + down * height, left + across * width, h, w, down * height, across * width)
                            load(x, index, given, at, columns, limit, tiles)
                            find_amax(tiles, at, block, group, part)
                            merge_amax(at, block, part, most)
                    make_scales(item, block, scaling, rows, columns, part, most, factor)
                    for down in T.serial(T.ceildiv(high, height)):
                        for across in T.serial(T.ceildiv(broad, width)):
                            h = T.min(height, high - down * height)
                            w = T.min(width, broad - across * width)
                            at = Place(top + down * height, left + across * width, h, w, down * height, across * width)
                            load(x, index, given, at, columns, limit, tiles)
                            encode(tiles, at, block, group, factor, coded)
                            store(coded, at, h * with_codes, q)
                else:
                    load(x, index, given, item, columns, limit, tiles)
                    find_amax(tiles, item._replace(height=searched), block, group, part)
                    make_scales(item, block, scaling, rows, columns, part, most, factor)
                    encode(tiles, item, block, group, factor, coded)
                    store(coded, item, high * with_codes, q)

    return cast_blocks


_CAST = Builder("quant.block_cast", _build)

_TILING = Tiling(128, 256)


def block_cast(
    x: Tensor,
    q: Tensor | None,
    sf: Tensor,
    fmt: str,
    block: tuple[int, int],
    mode: int,
    clamp_min: float = 0.0,
    *,
    x_sf: Tensor | None = None,
    group: int = 1,
    index: Tensor | None = None,
    transposed: bool = False,
    swiglu: bool = False,
    limit: float | None = None,
) -> None:
    """Quantize a matrix in blocks.

    Args:
        x: the matrix; its gate and up halves with ``swiglu``; e4m3 codes with ``x_sf``.
        q: the codes; None for scales only.
        sf: the scales, made or given.
        block: rows and columns of a block.
        mode: ``EXACT``, ``ROUNDED`` or ``GIVEN``.
        x_sf: scales of ``x``, one for each row and ``group`` columns.
        index: the row of ``x`` that each row of the result takes.
        transposed: whether ``q`` is.
        swiglu: whether the SwiGLU of ``x`` is quantized, clamped to ``limit``.
    """
    rows = x.shape[0] if index is None else index.shape[0]
    columns = x.shape[1] // 2 if swiglu else x.shape[1]
    cut = plan(rows, columns, *block, _TILING)
    if x_sf is not None:
        x = x.view(torch.uint8)
    key = (x.dtype, index is not None, swiglu, fmt, transposed, *_TILING, not cut.fits(_TILING), vector_cores(x.device))
    _CAST(
        key,
        x,
        x.new_empty(1, dtype=torch.int32) if index is None else index,
        x.new_empty((0, 0), dtype=FORMATS[fmt].dtype) if q is None else q,
        *scale_tensors.arguments(sf, block[1] == 1),
        *scale_tensors.arguments(sf if x_sf is None else x_sf, group == 1),
        *cut,
        mode,
        int(q is not None),
        min(group, columns),
        FORMATS[fmt].qmax,
        clamp_min,
        math.inf if limit is None else limit,
    )
