"""What casts in blocks read: a matrix, its rows by index, quantized data with scales, or the two halves of SwiGLU."""

from typing import Any, NamedTuple

from . import decode, scale_tensors
from .blocks import Tiling
from .indices import kept, within


class Tiles(NamedTuple):
    """Tiles of UB: the elements; the second half of the row for SwiGLU; the scales of quantized elements, by group."""

    elements: Any
    up: Any
    scales: Any


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
        gathered: rows are taken by index.
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

    def _scale(self, T: Any, tiles: Tiles, i: Any, group: Any) -> Any:
        return tiles.scales[i, within(T, group, tiles.scales.shape[1])]

    def value(self, T: Any, tiles: Tiles, i: Any, c: Any, group: Any) -> Any:
        """An element as fp32."""
        element = self.element(T, tiles, i, c)
        return element * self._scale(T, tiles, i, group) if self.quantized else element

    def scaled(self, T: Any, tiles: Tiles, i: Any, c: Any, group: Any, factor: Any) -> Any:
        """An element times the factor that quantizes."""
        return self.element(T, tiles, i, c) * (self._scale(T, tiles, i, group) * factor if self.quantized else factor)


def loading(T: Any, tiling: Tiling, source: Source) -> Any:
    """The macro that fills the tiles of a place: ``load(x, index, input_scales, at, half, limit, tiles)``."""
    splits, rows, threads = tiling.splits, tiling.rows, tiling.threads

    @T.macro
    def fetch(x, index, given, at, tiles):
        """Rows by index, and scales: what is not copied by DMA. A thread takes a column, and a group of columns."""
        with T.SimtVF(threads=threads):
            for s, c in T.Parallel(splits, tiling.width):
                token = T.alloc_var(T.int32)
                for k in T.serial(rows):
                    i = s * rows + k
                    if i < at.height:
                        token = at.row + i
                        if source.gathered:
                            token = index[at.row + i]
                            if c < at.width:
                                if token >= 0 and token < x.shape[0]:
                                    tiles.elements[i, c] = x[token, at.column + c]
                                else:
                                    tiles.elements[i, c] = T.Cast(source.dtype, 0)
                        if source.quantized:
                            column = kept(T, T.truncdiv(at.column, given.group) + c)
                            if column * given.group < at.column + at.width:
                                if token >= 0 and token < x.shape[0]:
                                    place = scale_tensors.offset(T, token, column, given.strides, given.bits)
                                    scale = scale_tensors.load(T, given.wide, given.narrow, given.kind, place)
                                    tiles.scales[i, c] = scale
                                else:
                                    tiles.scales[i, c] = 0.0

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
        if not source.gathered:
            T.copy(
                x[at.row : at.row + at.height, at.column : at.column + at.width],
                tiles.elements[0 : at.height, 0 : at.width],
            )
        if source.gathered or source.quantized:
            fetch(x, index, given, at, tiles)
        if source.swiglu:
            second = half + at.column
            T.copy(x[at.row : at.row + at.height, second : second + at.width], tiles.up[0 : at.height, 0 : at.width])
            gate(at, limit, tiles.elements, tiles.up)

    return load
