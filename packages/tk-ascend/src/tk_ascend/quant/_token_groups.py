"""Quantization of rows in groups of columns: what per_token_cast and its relatives share.

Each vector core takes spans of rows in turn; a span holds whole groups. It is copied to UB. Each group is given some
SIMT threads, whose lanes find the amax of every so many columns, over absolute bit patterns as integers, where NaN and
Inf sort above every finite value. Then one thread a group makes scale and factor, and stores the scale in its layout.
Then one thread encodes a value, or as many as share a byte or random bits.

A group that does not fit in a span is *wide*: the amax is taken from global memory, in each span that the group meets.

Bytes: the input once in, codes and scales once out; wide groups read the input once more for each span of a group.
"""

import math
from typing import Any

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


def _build(x_format: str, fmt: str, result: str, random: bool, wide_groups: bool, cores: int):
    """``result``: "codes", "values" for dequantized ones in the dtype of x, or "scales" for those alone."""
    from tilelang.ascend import language as T

    form = FORMATS[fmt]
    quantized = x_format in FORMATS
    x_dtype = "uint8" if quantized else x_format
    x_codes = FORMATS[x_format].codes if quantized else 1
    y_dtype = x_dtype if result == "values" else "uint8"
    unit = 1 if result == "values" else max(form.codes, 4 if random else 1)
    rows, x_columns, ld = T.dynamic("rows"), T.dynamic("x_columns"), T.dynamic("ld")
    y_rows, y_columns, y_ld = T.dynamic("y_rows"), T.dynamic("y_columns"), T.dynamic("y_ld")
    wide_size, narrow_size = T.dynamic("wide_size"), T.dynamic("narrow_size")
    x_wide_size, x_narrow_size = T.dynamic("x_wide_size"), T.dynamic("x_narrow_size")

    def element(raw: Any, place: Any) -> Any:
        """The value, without its scale, that a stored element holds; ``place`` is its column."""
        if not quantized:
            return kept(T, T.Cast(T.float32, raw))
        byte = kept(T, T.Cast(T.int32, raw))
        if x_format == "e4m3":
            return kept(T, decode.e4m3(T, byte))
        return kept(T, decode.e2m1(T, kept(T, (byte >> ((place & 1) * 4)) & 15)))

    def staged(source: Any, place: Any) -> Any:
        """The value in column ``place`` of a span in UB, without its scale."""
        return element(source[within(T, T.truncdiv(place, x_codes), SPAN // x_codes)], place)

    def input_scale(row: Any, column: Any, scales: tuple[Any, ...], block: tuple[Any, Any]) -> Any:
        wide, narrow, kind, strides, bits = scales
        at = scale_tensors.offset(T, T.truncdiv(row, block[0]), T.truncdiv(column, block[1]), strides, bits)
        return scale_tensors.load(T, wide, narrow, kind, at)

    def scaled(value: Any, row: Any, column: Any, scales: tuple[Any, ...], block: tuple[Any, Any]) -> Any:
        """A value with its scale."""
        return value * input_scale(row, column, scales, block) if quantized else value

    def store(y: Any, place: Any, v: list[Any], factors: Any, quad: Any) -> None:
        """The results of the values of one thread, which have been multiplied by their factors."""
        if result == "values":
            code = encode.e4m3(T, v[0]) if fmt == "e4m3" else codes.to_e2m1(T, v[0])
            value = getattr(decode, fmt)(T, kept(T, T.Cast(T.int32, code)))
            T.buffer_store(y, T.Cast(y_dtype, value * factors), [place])
            return
        if fmt == "e5m6":
            data = encode.e5m6_bytes(T, [encode.e5m6(T, value) for value in v])
        elif random:
            word = stochastic.random_words(T, quad, v)[0]
            found = [stochastic.encode(T, x, stochastic.rotated(T, word, i), fmt) for i, x in enumerate(v)]
            data = found if fmt == "e4m3" else [a | (b << 4) for a, b in zip(found[0::2], found[1::2])]
        elif fmt == "e4m3":
            data = [encode.e4m3(T, v[0])]
        else:
            low, high = (kept(T, codes.to_e2m1(T, value)) for value in v)
            data = [low | (high << 4)]
        for i, byte in enumerate(data):
            T.buffer_store(y, T.Cast(T.uint8, byte), [place * len(data) + i])

    def work(
        source: Any,
        factor: Any,
        scales: Any,
        y: Any,
        place: Any,
        row: Any,
        start: Any,
        width: Any,
        group: Any,
        x_scales: tuple[Any, ...],
        block: tuple[Any, Any],
    ) -> None:
        """What one thread does with the values of one unit."""
        first = kept(T, T.truncdiv(start, group))
        values = []
        for i in range(unit):
            column = kept(T, place * unit + i)
            g = kept(T, T.truncdiv(start + column, group) - first)
            inverse = factor[within(T, g, SPAN)]
            if quantized:
                inverse = input_scale(row, start + column, x_scales, block) * inverse
            v = staged(source, column) * inverse
            values.append(kept(T, T.if_then_else(column < width, v, T.float32(0.0)) if random else v))
        scale = scales[within(T, g, SPAN)] if result == "values" else None
        store(y, place, values, scale, T.truncdiv(start, 4) + place)

    @T.prim_func
    def token_groups(
        x: T.StridedTensor((rows, x_columns), (ld, 1), x_dtype),
        y: T.StridedTensor((y_rows, y_columns), (y_ld, 1), y_dtype),
        columns: T.int32,
        group: T.int32,
        lanes: T.int32,
        span: T.int32,
        y_span: T.int32,
        spans: T.int32,
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
            coded = T.alloc_shared((form.width(SPAN) if result == "codes" else SPAN,), y_dtype)
            x_scales = (x_wide, x_narrow, x_kind, (x_row_stride, x_column_stride), (x_row_bit, x_column_bit))
            block = (block_rows, block_columns)
            for row, part in T.Persistent([rows, spans], cores, core, group_size=1):
                first_x = T.truncdiv(part * span, x_codes)
                width_x = T.min(T.truncdiv(span, x_codes), x_columns - first_x)
                T.copy(x[row, first_x : first_x + width_x], source[0:width_x])
                with T.SimtVF(threads=THREADS):
                    start = kept(T, part * span)
                    end = kept(T, T.min(start + span, columns))
                    first = kept(T, T.truncdiv(start, group))
                    groups = kept(T, T.truncdiv(end - 1, group) + 1 - first)
                    last = kept(T, T.truncdiv(columns - 1, group))
                    most = T.alloc_var(T.int32)
                    column = T.alloc_var(T.int32)
                    for step in T.serial(SPAN // THREADS):
                        for thread in T.Parallel(THREADS):
                            place = kept(T, step * THREADS + thread)
                            g = kept(T, T.truncdiv(place, lanes))
                            if g < groups and given == 0:
                                begin = kept(T, (first + g) * group)
                                past = kept(T, T.min(begin + group, columns))
                                column = begin + T.truncmod(place, lanes)
                                most = 0
                                while column < past:
                                    if wide_groups:
                                        v = element(x[row, T.truncdiv(column, x_codes)], column)
                                    else:
                                        v = staged(source, column - start)
                                    most = T.max(
                                        most, codes.magnitude(T, kept(T, scaled(v, row, column, x_scales, block)))
                                    )
                                    column = column + lanes
                                partial[step * THREADS + thread] = most
                    T.sync_threads()
                    for step in T.serial(SPAN // THREADS):
                        for thread in T.Parallel(THREADS):
                            place = kept(T, step * THREADS + thread)
                            if place < groups:
                                g = kept(T, first + place)
                                at = scale_tensors.offset(T, row, g, (row_stride, column_stride), (row_bit, column_bit))
                                if given != 0:
                                    factor[step * THREADS + thread] = T.float32(1.0) / scale_tensors.load(
                                        T, wide, narrow, kind, at
                                    )
                                else:
                                    most = 0
                                    for lane in T.serial(lanes):
                                        most = T.max(most, partial[within(T, place * lanes + lane, SPAN)])
                                    sf, inverse = encode.scale(T, most, clamp_min, form.qmax, rounding)
                                    factor[step * THREADS + thread] = inverse
                                    if result == "values":
                                        scales[step * THREADS + thread] = sf
                                    elif g * group >= start:
                                        if kind == scale_tensors.FP32:
                                            wide[at] = sf
                                        elif kind == scale_tensors.E4M3:
                                            narrow[at] = encode.e4m3(T, sf)
                                        else:
                                            narrow[at] = T.Cast(T.uint8, codes.exponent(T, sf))
                                            if g == last and (g & 1) == 0:
                                                narrow[at + 1] = T.Cast(T.uint8, 0)
                    if result != "scales":
                        T.sync_threads()
                        for step in T.serial(SPAN // unit // THREADS):
                            for thread in T.Parallel(THREADS):
                                place = step * THREADS + thread
                                if place * unit < end - start:
                                    work(
                                        source,
                                        factor,
                                        scales,
                                        coded,
                                        place,
                                        row,
                                        start,
                                        end - start,
                                        group,
                                        x_scales,
                                        block,
                                    )
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
        (x_format, fmt, result, random, wide, vector_cores(x.device)),
        x if x_sf is None else x.view(torch.uint8),
        y,
        columns,
        group,
        _WIDE_LANES if wide else max(1, group // _COLUMNS_PER_LANE),
        span,
        span if result == "values" else form.width(span),
        -(-columns // span),
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
