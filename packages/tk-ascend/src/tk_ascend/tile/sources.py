"""What casts in blocks read: a matrix, its rows by index, quantized data with scales, or the two halves of SwiGLU."""

from typing import Any, NamedTuple

from . import decode, scale_tensors
from .blocks import Tiling
from .indices import kept


class Tiles(NamedTuple):
    """Tiles of UB: the elements; the second half of the row for SwiGLU; the scales of quantized elements, by group."""

    elements: Any
    up: Any
    scales: Any


class Index(NamedTuple):
    """Rows by index; with a height of 0 the rows of the matrix as they are."""

    rows: Any
    height: Any


class InputScales(NamedTuple):
    """Scales of quantized data, ``group`` columns sharing one: see ``scale_tensors.arguments``."""

    group: Any
    wide: Any
    narrow: Any
    kind: Any
    strides: tuple[Any, Any]
    bits: tuple[Any, Any]


class Source(NamedTuple):
    """How the elements of a tile are found.

    Attributes:
        dtype: of the matrix; uint8 for e4m3 codes, which have scales.
        gathered: rows may be taken by index.
        swiglu: the matrix holds the halves of SwiGLU, which is rounded to bf16.
    """

    dtype: str
    gathered: bool = False
    swiglu: bool = False

    @property
    def quantized(self) -> bool:
        return self.dtype == "uint8"

    def element(self, T: Any, tiles: Tiles, i: Any, c: Any) -> Any:
        """An element as fp32, without its scale."""
        element = tiles.elements[i, c]
        return decode.e4m3(T, element) if self.quantized else T.Cast(T.float32, element)

    def value(self, T: Any, tiles: Tiles, i: Any, c: Any, group: Any) -> Any:
        """An element as fp32."""
        element = self.element(T, tiles, i, c)
        return element * tiles.scales[i, group] if self.quantized else element

    def scaled(self, T: Any, tiles: Tiles, i: Any, c: Any, group: Any, factor: Any) -> Any:
        """An element times the factor that quantizes."""
        return self.element(T, tiles, i, c) * (tiles.scales[i, group] * factor if self.quantized else factor)


def loading(T: Any, tiling: Tiling, source: Source) -> Any:
    """The macro that fills the tiles of a place: ``load(x, index, input_scales, at, half, limit, tiles)``."""
    splits, rows, threads = tiling.splits, tiling.rows, tiling.threads

    @T.macro
    def gather(x, index, at, elements):
        with T.SimtVF(threads=threads):
            for s, c in T.Parallel(splits, tiling.width):
                token = T.alloc_var(T.int32)
                for k in T.serial(rows):
                    i = s * rows + k
                    if i < index.height and c < at.width:
                        token = index.rows[at.row + i]
                        if token >= 0 and token < x.shape[0]:
                            elements[i, c] = x[token, at.column + c]
                        else:
                            elements[i, c] = T.Cast(source.dtype, 0)

    @T.macro
    def load_scales(x, index, given, at, scales):
        with T.SimtVF(threads=threads):
            for s, g in T.Parallel(splits, tiling.width):
                token = T.alloc_var(T.int32)
                column = kept(T, T.truncdiv(at.column, given.group) + g)
                for k in T.serial(rows):
                    i = s * rows + k
                    if i < at.height and column * given.group < at.column + at.width:
                        token = at.row + i
                        if index.height > 0:
                            token = index.rows[at.row + i]
                        if token >= 0 and token < x.shape[0]:
                            place = scale_tensors.offset(T, token, column, given.strides, given.bits)
                            scales[i, g] = scale_tensors.load(T, given.wide, given.narrow, given.kind, place)
                        else:
                            scales[i, g] = 0.0

    @T.macro
    def gate(at, limit, gates, up):
        with T.SimtVF(threads=threads):
            for s, c in T.Parallel(splits, tiling.width):
                l = T.alloc_var(T.float32)
                r = T.alloc_var(T.float32)
                for k in T.serial(rows):
                    i = s * rows + k
                    if i < at.height and c < at.width:
                        l = T.Cast(T.float32, gates[i, c])
                        r = T.Cast(T.float32, up[i, c])
                        l = T.if_then_else(l > limit, limit, l)
                        r = T.if_then_else(r > limit, limit, T.if_then_else(r < -limit, -limit, r))
                        r = (l / (T.float32(1.0) + T.exp(-l))) * r
                        gates[i, c] = T.Cast(source.dtype, T.Cast(T.bfloat16, r))

    @T.macro
    def load(x, index, given, at, half, limit, tiles):
        # Rows by index are not copied as they are; the region that takes them has nothing to do else.
        h = at.height - index.height if source.gathered else at.height
        T.copy(x[at.row : at.row + h, at.column : at.column + at.width], tiles.elements[0:h, 0 : at.width])
        if source.gathered:
            gather(x, index, at, tiles.elements)
        if source.quantized:
            load_scales(x, index, given, at, tiles.scales)
        if source.swiglu:
            second = half + at.column
            T.copy(x[at.row : at.row + at.height, second : second + at.width], tiles.up[0 : at.height, 0 : at.width])
            gate(at, limit, tiles.elements, tiles.up)

    return load
