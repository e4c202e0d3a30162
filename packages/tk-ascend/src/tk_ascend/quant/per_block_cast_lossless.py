"""per_block_cast_lossless: each vector core takes items of whole output blocks in turn.

The largest and the smallest exponent of an output block come from the scales of the input alone, one SIMT thread an
input block, merged by atomics in UB. Then one thread an output block makes its scale. Then, tile by tile, the exponents
of the input blocks are spread to UB by row, and one thread takes a column of bytes, two codes each.

Bytes: codes and scales in (scales twice), codes and scales out.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.formats import E2M1

from ..jit import Builder, vector_cores
from ..tile import codes, decode, scale_tensors
from ..tile.blocks import ROUNDED, Block, Place, Scaling, Tiling, plan, storing
from ..tile.indices import kept, within
from ..tile.sources import InputScales

_TILING = Tiling(128, 256)
_INVALID = 255
"""The exponent of what is not a positive normal power of two."""


def _exponent(T: Any, given: InputScales, row: Any, column: Any) -> Any:
    """The biased exponent of an input block's scale."""
    at = scale_tensors.offset(T, row, column, given.strides, given.bits)
    is_float = given.kind == scale_tensors.FP32
    byte = kept(T, T.if_then_else(is_float, T.int32(0), T.Cast(T.int32, given.narrow[at])))
    pattern = kept(T, codes.bits(T, kept(T, T.if_then_else(is_float, given.wide[at], T.float32(0.0)))))
    power = T.if_then_else((pattern & T.int32(0x7FFFFF)) == 0, pattern >> 23, T.int32(_INVALID))
    power = T.if_then_else(pattern > 0, power, T.int32(_INVALID))
    return kept(T, T.if_then_else(is_float, power, byte))


def _regions(T: Any, tiling: Tiling) -> tuple[Any, Any, Any, Any]:
    """Macros of the SIMT regions."""
    splits, width, rows_of_thread, threads = tiling.splits, tiling.width, tiling.rows, tiling.threads
    store_exponent = storing(T)

    def shifted(code, shift):
        """An e2m1 code times a power of two, as e4m3."""
        value = kept(T, decode.e2m1(T, kept(T, code)))
        return codes.to_e4m3(T, kept(T, value * codes.real(T, kept(T, (shift + 127) << 23))))

    @T.macro
    def find_range(item, block, given, x_block_rows, x_block_columns, most, least):
        with T.SimtVF(threads=threads):
            for p, b in T.Parallel(splits, width):
                most[p, b] = 0
                least[p, b] = _INVALID
        with T.SimtVF(threads=threads):
            for thread in T.Parallel(threads):
                across = kept(T, T.truncdiv(item.width + x_block_columns - 1, x_block_columns))
                down = kept(T, T.truncdiv(item.height + x_block_rows - 1, x_block_rows))
                high = kept(T, T.truncdiv(block.rows + x_block_rows - 1, x_block_rows))
                wide = kept(T, T.truncdiv(block.columns + x_block_columns - 1, x_block_columns))
                for step in T.serial((down * across + threads - 1) // threads):
                    number = kept(T, step * threads + thread)
                    if number < down * across:
                        i = kept(T, T.truncdiv(number, across))
                        j = kept(T, number - i * across)
                        row = T.truncdiv(item.row, x_block_rows) + i
                        column = T.truncdiv(item.column, x_block_columns) + j
                        exponent = _exponent(T, given, row, column)
                        p = within(T, T.truncdiv(i, high), splits)
                        b = within(T, T.truncdiv(j, wide), width)
                        T.atomic_max(most[p, b], exponent)
                        T.atomic_min(least[p, b], exponent)

    @T.macro
    def make_scales(item, block, scaling, rows, columns, most, least, bases):
        with T.SimtVF(threads=threads):
            for p, b in T.Parallel(splits, width):
                if p * block.rows < item.height and b * block.columns < item.width:
                    row = kept(T, T.truncdiv(item.row, block.rows) + p)
                    column = kept(T, T.truncdiv(item.column, block.columns) + b)
                    at = scale_tensors.offset(T, row, column, scaling.strides, scaling.bits)
                    base = kept(T, T.max(most[p, b] - 6, 0))
                    exact = (most[p, b] != _INVALID) and (least[p, b] + 5 >= base)
                    exponent = kept(T, T.if_then_else(exact, base, T.int32(_INVALID)))
                    bases[p, b] = base
                    if scaling.kind == scale_tensors.UE8M0:
                        store_exponent(scaling, at, exponent, row, column, block, rows, columns)
                    else:
                        scaling.wide[at] = decode.ue8m0(T, exponent)

    @T.macro
    def spread(at, given, x_block_rows, x_block_columns, exponents):
        with T.SimtVF(threads=threads):
            for s, g in T.Parallel(splits, width):
                column = kept(T, T.truncdiv(at.column, x_block_columns) + g)
                if column * x_block_columns < at.column + at.width:
                    for k in T.serial(rows_of_thread):
                        i = s * rows_of_thread + k
                        if i < at.height:
                            row = kept(T, T.truncdiv(at.row + i, x_block_rows))
                            exponents[i, g] = _exponent(T, given, row, column)

    @T.macro
    def recode(at, block, x_block_columns, packed, exponents, bases, coded):
        with T.SimtVF(threads=threads // 2):
            for s, c in T.Parallel(splits, width // 2):
                if 2 * c < at.width:
                    first = kept(T, T.truncdiv(at.column, x_block_columns))
                    g0 = kept(T, T.truncdiv(at.column + 2 * c, x_block_columns) - first)
                    g1 = kept(T, T.truncdiv(at.column + 2 * c + 1, x_block_columns) - first)
                    b0 = kept(T, T.truncdiv(at.across + 2 * c, block.columns))
                    b1 = kept(T, T.truncdiv(at.across + 2 * c + 1, block.columns))
                    for k in T.serial(rows_of_thread):
                        i = s * rows_of_thread + k
                        if i < at.height:
                            p = kept(T, T.truncdiv(at.down + i, block.rows))
                            byte = kept(T, T.Cast(T.int32, packed[i, c]))
                            base0 = bases[within(T, p, splits), within(T, b0, width)]
                            base1 = bases[within(T, p, splits), within(T, b1, width)]
                            shift0 = kept(T, exponents[i, within(T, g0, width)] - base0)
                            shift1 = kept(T, exponents[i, within(T, g1, width)] - base1)
                            coded[i, 2 * c] = shifted(byte & 15, shift0)
                            coded[i, 2 * c + 1] = shifted(byte >> 4, shift1)

    return find_range, make_scales, spread, recode


def _build(height: int, width: int, several: bool, cores: int):
    from tilelang.ascend import language as T

    tiling = Tiling(height, width)
    x_rows, x_columns, ld = (T.dynamic(n) for n in ("x_rows", "x_columns", "ld"))
    wide_size, narrow_size = T.dynamic("wide_size"), T.dynamic("narrow_size")
    in_wide_size, in_narrow_size = T.dynamic("in_wide_size"), T.dynamic("in_narrow_size")
    q_rows, q_columns = T.dynamic("q_rows"), T.dynamic("q_columns")
    find_range, make_scales, spread, recode = _regions(T, tiling)

    @T.macro
    def cast_tile(x, q, at, block, given, x_block_rows, x_block_columns, packed, exponents, bases, coded):
        first = at.column // 2
        T.copy(x[at.row : at.row + at.height, first : first + at.width // 2], packed[0 : at.height, 0 : at.width // 2])
        spread(at, given, x_block_rows, x_block_columns, exponents)
        recode(at, block, x_block_columns, packed, exponents, bases, coded)
        T.copy(coded[0 : at.height, 0 : at.width], q[at.row : at.row + at.height, at.column : at.column + at.width])

    @T.prim_func
    def recode_blocks(
        x: T.StridedTensor((x_rows, x_columns), (ld, 1), T.uint8),
        q: T.Tensor((q_rows, q_columns), "float8_e4m3fn"),
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
        x_block_rows: T.int32,
        x_block_columns: T.int32,
    ):
        with T.Kernel(cores) as core:
            packed = T.alloc_shared((height, width // 2), T.uint8)
            exponents = T.alloc_shared((height, width), T.int32)
            coded = T.alloc_shared((height, width), "float8_e4m3fn")
            most = T.alloc_shared((tiling.splits, width), T.int32)
            least = T.alloc_shared((tiling.splits, width), T.int32)
            bases = T.alloc_shared((tiling.splits, width), T.int32)
            top = T.alloc_var(T.int32)
            left = T.alloc_var(T.int32)
            high = T.alloc_var(T.int32)
            broad = T.alloc_var(T.int32)
            for number in T.Persistent([items], cores, core, group_size=1):
                top = T.truncdiv(number, items_across) * item_rows
                left = T.truncmod(number, items_across) * item_columns
                high = T.min(item_rows, rows - top)
                broad = T.min(item_columns, columns - left)
                item = Place(top, left, high, broad)
                block = Block(block_rows, block_columns, block_splits, split_rows)
                given = InputScales(
                    1, in_wide, in_narrow, in_kind, (in_row_stride, in_column_stride), (in_row_bit, in_column_bit)
                )
                scaling = Scaling(
                    ROUNDED, 0.0, 0.0, wide, narrow, sf_kind, (row_stride, column_stride), (row_bit, column_bit)
                )
                find_range(item, block, given, x_block_rows, x_block_columns, most, least)
                make_scales(item, block, scaling, rows, columns, most, least, bases)
                if several:
                    for down in T.serial(T.ceildiv(high, height)):
                        for across in T.serial(T.ceildiv(broad, width)):
                            h = T.min(height, high - down * height)
                            w = T.min(width, broad - across * width)
                            at = Place(top + down * height, left + across * width, h, w, down * height, across * width)
                            cast_tile(
                                x, q, at, block, given, x_block_rows, x_block_columns, packed, exponents, bases, coded
                            )
                else:
                    cast_tile(x, q, item, block, given, x_block_rows, x_block_columns, packed, exponents, bases, coded)

    return recode_blocks


_RECODE = Builder("quant.per_block_cast_lossless", _build)


class PerBlockCastLossless:
    """``quant.per_block_cast_lossless``."""

    revision = 1

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        x_sf: Tensor,
        x_block_rows: int,
        x_block_columns: int,
        block_rows: int,
        block_columns: int,
        use_tma_aligned_col_major_sf: bool,
        use_packed_ue8m0: bool,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> None:
        q, sf = outs
        rows, columns = x.shape[0], E2M1.logical(x.shape[1])
        cut = plan(rows, columns, block_rows, block_columns, _TILING)
        _RECODE(
            (*_TILING, not cut.fits(_TILING), vector_cores(x.device)),
            x.view(torch.uint8),
            q,
            *scale_tensors.arguments(sf, block_columns == 1),
            *scale_tensors.arguments(x_sf, x_block_columns == 1),
            *cut,
            min(x_block_rows, rows),
            min(x_block_columns, columns),
        )


KERNELS: dict[str, Any] = {"quant.per_block_cast_lossless": PerBlockCastLossless()}
