"""Quantization of rows in groups of columns: what per_token_cast and its relatives share.

Each vector core takes spans of rows in turn; a span holds whole groups. It is copied to UB. Each group is given some
SIMT threads, whose lanes find the amax of every so many columns, over absolute bit patterns as integers, where NaN and
Inf sort above every finite value. Then one thread a group makes scale and factor, and stores the scale in its layout.
Then one thread encodes a value, or as many as share a byte or random bits.

A group that does not fit in a span is *wide*: the amax is taken from global memory, in each span that the group meets.

Bytes: the input once in, codes and scales once out; wide groups read the input once more for each span of a group.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.formats import FORMAT_OF_DTYPE, FORMATS

from ..jit import Builder, vector_cores
from ..tile import codes, decode, encode, scale_tensors, stochastic
from ..tile.indices import SPAN, THREADS, kept, within

_ALIGNMENT = 8
"""Spans start at multiples of this many columns, so that no packed codes and no random bits cross them."""
_WIDE_LANES = THREADS
_COLUMNS_PER_LANE = 32


class _Scales(NamedTuple):
    """A scale tensor in global memory: see ``scale_tensors.arguments``; and the size of its blocks."""

    wide: Any
    narrow: Any
    kind: Any
    strides: tuple[Any, Any]
    bits: tuple[Any, Any]
    block: tuple[Any, Any]


class _Span(NamedTuple):
    """A span: its row, its columns from ``start`` to ``end``, and the groups of ``group`` columns that it meets."""

    row: Any
    start: Any
    end: Any
    group: Any
    first: Any
    groups: Any


def _build(x_format: str, fmt: str, result: str, random: bool, wide_groups: bool, cores: int):
    """``result``: "codes", "values" for dequantized ones in the dtype of x, or "scales" for those alone."""
    from tilelang.ascend import language as T

    form = FORMATS[fmt]
    quantized = x_format in FORMATS
    x_dtype = "uint8" if quantized else x_format
    x_codes = FORMATS[x_format].codes if quantized else 1
    y_dtype = x_dtype if result == "values" else "uint8"
    y_room = form.width(SPAN) if result == "codes" else SPAN
    unit = 1 if result == "values" else max(form.codes, 4 if random else 1)
    unit_bytes = form.width(unit)
    rows, x_columns, ld = T.dynamic("rows"), T.dynamic("x_columns"), T.dynamic("ld")
    y_rows, y_columns, y_ld = T.dynamic("y_rows"), T.dynamic("y_columns"), T.dynamic("y_ld")
    wide_size, narrow_size = T.dynamic("wide_size"), T.dynamic("narrow_size")
    x_wide_size, x_narrow_size = T.dynamic("x_wide_size"), T.dynamic("x_narrow_size")

    def element(stored: Any, column: Any) -> Any:
        """The value, without its scale, that a stored element holds for a column."""
        if not quantized:
            return T.Cast(T.float32, stored)
        byte = kept(T, T.Cast(T.int32, stored))
        if x_format == "e4m3":
            return decode.e4m3(T, byte)
        return decode.e2m1(T, kept(T, (byte >> ((column & 1) * 4)) & 15))

    def staged(source: Any, span: _Span, column: Any) -> Any:
        """The value in a column of a span in UB, without its scale."""
        place = within(T, T.truncdiv(column - span.start, x_codes), SPAN // x_codes)
        return kept(T, element(source[place], column))

    def input_scale(scales: _Scales, row: Any, column: Any) -> Any:
        row, column = T.truncdiv(row, scales.block[0]), T.truncdiv(column, scales.block[1])
        at = scale_tensors.offset(T, row, column, scales.strides, scales.bits)
        return scale_tensors.load(T, scales.wide, scales.narrow, scales.kind, at)

    @T.macro
    def find_amax(x, source, x_scales, span, lanes, partial):
        column = T.alloc_var(T.int32)
        most = T.alloc_var(T.int32)
        for step in T.serial(SPAN // THREADS):
            for thread in T.Parallel(THREADS):
                place = kept(T, step * THREADS + thread)
                g = kept(T, T.truncdiv(place, lanes))
                if g < span.groups:
                    begin = kept(T, (span.first + g) * span.group)
                    past = kept(T, T.min(begin + span.group, x_columns * x_codes))
                    column = begin + T.truncmod(place, lanes)
                    most = 0
                    while column < past:
                        if wide_groups:
                            v = kept(T, element(x[span.row, T.truncdiv(column, x_codes)], column))
                        else:
                            v = staged(source, span, column)
                        if quantized:
                            v = kept(T, v * input_scale(x_scales, span.row, column))
                        most = T.max(most, codes.magnitude(T, v))
                        column = column + lanes
                    partial[step * THREADS + thread] = most

    @T.macro
    def make_scales(partial, lanes, scaling, sf, span, last, factor, scales):
        qmax, clamp_min, rounding, given = scaling
        most = T.alloc_var(T.int32)
        for step in T.serial(SPAN // THREADS):
            for thread in T.Parallel(THREADS):
                place = kept(T, step * THREADS + thread)
                if place < span.groups:
                    g = kept(T, span.first + place)
                    at = scale_tensors.offset(T, span.row, g, sf.strides, sf.bits)
                    if given != 0:
                        given_scale = scale_tensors.load(T, sf.wide, sf.narrow, sf.kind, at)
                        factor[step * THREADS + thread] = T.float32(1.0) / given_scale
                    else:
                        most = 0
                        for lane in T.serial(lanes):
                            most = T.max(most, partial[within(T, place * lanes + lane, SPAN)])
                        scale, inverse = encode.scale(T, most, clamp_min, qmax, rounding)
                        factor[step * THREADS + thread] = inverse
                        if result == "values":
                            scales[step * THREADS + thread] = scale
                        elif g * span.group >= span.start:
                            if sf.kind == scale_tensors.FP32:
                                sf.wide[at] = scale
                            elif sf.kind == scale_tensors.E4M3:
                                sf.narrow[at] = encode.e4m3(T, scale)
                            else:
                                sf.narrow[at] = T.Cast(T.uint8, codes.exponent(T, scale))
                                if g == last and (g & 1) == 0:
                                    sf.narrow[at + 1] = T.Cast(T.uint8, 0)

    def group_of(span: _Span, column: Any) -> Any:
        return within(T, T.truncdiv(column, span.group) - span.first, SPAN)

    @T.macro
    def load(source, factor, x_scales, span, place, values):
        """The values of one thread times their factors; +0.0 past the row, where they only serve random bits."""
        for i in T.unroll(unit):
            column = kept(T, span.start + place * unit + i)
            inverse = kept(T, factor[group_of(span, column)])
            if quantized:
                inverse = kept(T, input_scale(x_scales, span.row, column) * inverse)
            v = staged(source, span, column) * inverse
            if random:
                v = T.if_then_else(column < span.end, v, T.float32(0.0))
            values[i] = v

    @T.macro
    def store_values(values, scales, span, place, y):
        v = kept(T, values[0])
        code = encode.e4m3(T, v) if fmt == "e4m3" else codes.to_e2m1(T, v)
        value = getattr(decode, fmt)(T, kept(T, T.Cast(T.int32, code)))
        y[place] = T.Cast(y_dtype, value * scales[group_of(span, kept(T, span.start + place))])

    @T.macro
    def store_codes(values, span, place, y):
        found = T.alloc_local((unit,), T.int32)
        if random:
            word = stochastic.random_words(T, T.truncdiv(span.start, 4) + place, [values[i] for i in range(4)])[0]
        for i in T.unroll(unit):
            v = kept(T, values[i])
            if random:
                found[i] = stochastic.encode(T, v, stochastic.rotated(T, word, i), fmt)
            elif fmt == "e5m6":
                found[i] = encode.e5m6(T, v)
            elif fmt == "e2m1":
                found[i] = codes.to_e2m1(T, v)
            else:
                found[i] = T.Cast(T.int32, encode.e4m3(T, v))
        for j, byte in enumerate(encode.packed(fmt, [found[i] for i in range(unit)])):
            y[place * unit_bytes + j] = T.Cast(T.uint8, byte)

    @T.prim_func
    def token_groups(
        x: T.StridedTensor((rows, x_columns), (ld, 1), x_dtype),
        y: T.StridedTensor((y_rows, y_columns), (y_ld, 1), y_dtype),
        group: T.int32,
        lanes: T.int32,
        span: T.int32,
        y_span: T.int32,
        spans: T.int32,
        qmax: T.float32,
        clamp_min: T.float32,
        rounding: T.int32,
        given: T.int32,
        wide: T.Tensor((wide_size,), T.float32),
        narrow: T.Tensor((narrow_size,), T.uint8),
        kind: T.int32,
        row_stride: T.int64,
        column_stride: T.int64,
        row_bit: T.int32,
        column_bit: T.int32,
        x_wide: T.Tensor((x_wide_size,), T.float32),
        x_narrow: T.Tensor((x_narrow_size,), T.uint8),
        x_kind: T.int32,
        x_row_stride: T.int64,
        x_column_stride: T.int64,
        x_row_bit: T.int32,
        x_column_bit: T.int32,
        block_rows: T.int32,
        block_columns: T.int32,
    ):
        with T.Kernel(cores) as core:
            source = T.alloc_shared((SPAN // x_codes,), x_dtype)
            partial = T.alloc_shared((SPAN,), T.int32)
            factor = T.alloc_shared((SPAN,), T.float32)
            scales = T.alloc_shared((SPAN,), T.float32)
            coded = T.alloc_shared((y_room,), y_dtype)
            sf = _Scales(wide, narrow, kind, (row_stride, column_stride), (row_bit, column_bit), (1, group))
            x_strides, x_bits = (x_row_stride, x_column_stride), (x_row_bit, x_column_bit)
            x_sf = _Scales(x_wide, x_narrow, x_kind, x_strides, x_bits, (block_rows, block_columns))
            for row, part in T.Persistent([rows, spans], cores, core, group_size=1, num_stages=2):
                first_x = T.truncdiv(part * span, x_codes)
                width_x = T.min(T.truncdiv(span, x_codes), x_columns - first_x)
                T.copy(x[row, first_x : first_x + width_x], source[0:width_x])
                with T.SimtVF(threads=THREADS):
                    start = kept(T, part * span)
                    end = kept(T, T.min(start + span, x_columns * x_codes))
                    first = kept(T, T.truncdiv(start, group))
                    groups = kept(T, T.truncdiv(end - 1, group) + 1 - first)
                    last = kept(T, T.truncdiv(x_columns * x_codes - 1, group))
                    here = _Span(row, start, end, group, first, groups)
                    if given == 0:
                        find_amax(x, source, x_sf, here, lanes, partial)
                    T.sync_threads()
                    make_scales(partial, lanes, (qmax, clamp_min, rounding, given), sf, here, last, factor, scales)
                    if result != "scales":
                        T.sync_threads()
                        values = T.alloc_local((unit,), T.float32)
                        for step in T.serial(SPAN // unit // THREADS):
                            for thread in T.Parallel(THREADS):
                                place = step * THREADS + thread
                                if place * unit < end - start:
                                    load(source, factor, x_sf, here, place, values)
                                    if result == "values":
                                        store_values(values, scales, here, place, coded)
                                    else:
                                        store_codes(values, here, place, coded)
                if result != "scales":
                    first_y = part * y_span
                    width_y = T.min(y_span, y_columns - first_y)
                    T.copy(coded[0:width_y], y[row, first_y : first_y + width_y])

    return token_groups


_TOKEN_GROUPS = Builder("quant.token_groups", _build)


def quantize(
    x: Tensor,
    fmt: str,
    group: int,
    *,
    q: Tensor | None = None,
    sf: Tensor | None = None,
    x_sf: Tensor | None = None,
    x_block: tuple[int, int] = (1, 1),
    rounding: int = encode.PLAIN,
    clamp_min: float = 0.0,
    given: bool = False,
    random: bool = False,
) -> None:
    """Quantize the rows of ``x`` into ``q`` and ``sf``.

    Args:
        x: plain, or the data of a quantized matrix with scales ``x_sf`` of blocks of ``x_block``.
        fmt: format of the codes.
        group: columns per scale.
        q: codes; None: only scales. ``x`` itself: dequantized values, in place.
        sf: the scales, written in their layout; with ``given``, read instead.
        rounding: of the scales, as in :mod:`..tile.encode`.
    """
    form = FORMATS[fmt]
    x_format = FORMAT_OF_DTYPE[x.dtype].name if x_sf is not None else x.dtype
    rows, columns = x.shape[0], x.shape[1] * (2 if x_format == "e2m1" else 1)
    group = min(group, columns)
    span, wide = _span(group, columns)
    result = "scales" if q is None else "values" if q is x else "codes"
    y = x.new_empty((1, 1), dtype=torch.uint8) if q is None else q if q is x else q.view(torch.uint8)
    if q is x and wide:
        x = x.clone()  # other spans of a group are still read when the first is written
    if sf is None:
        sf = x.new_empty((1, 1), dtype=torch.float32)
    scales = scale_tensors.arguments(sf)
    _TOKEN_GROUPS(
        # Scales alone depend on the format by qmax, which is an argument.
        (x_format, "e4m3" if q is None else fmt, result, random, wide, vector_cores(x.device)),
        x if x_sf is None else x.view(torch.uint8),
        y,
        group,
        _WIDE_LANES if wide else max(1, group // _COLUMNS_PER_LANE),
        span,
        span if result == "values" else form.width(span),
        -(-columns // span),
        form.qmax,
        clamp_min,
        rounding,
        int(given),
        *scales,
        *(scales if x_sf is None else scale_tensors.arguments(x_sf, x_block[1] == 1)),
        min(x_block[0], rows),
        min(x_block[1], columns),
    )


def _span(group: int, columns: int) -> tuple[int, bool]:
    """Columns of a span, and whether groups do not fit in it."""
    whole = math.lcm(group, _ALIGNMENT)
    if group >= columns and columns <= SPAN:
        return SPAN, False
    return (SPAN, True) if whole > SPAN else (SPAN // whole * whole, False)
