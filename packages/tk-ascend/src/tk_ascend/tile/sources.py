"""What casts in blocks read: a matrix, its rows by index, quantized data with scales, or the two halves of SwiGLU."""

from typing import Any, NamedTuple

from . import decode, scale_tensors
from .activation import activation
from .blocks import Tiling
from .indices import kept, within


class Tiles(NamedTuple):
    """Tiles of UB: the elements, and the scales of quantized ones, by group of columns."""

    elements: Any
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

    @property
    def copied(self) -> bool:
        """Whether the elements come as they are, by DMA."""
        return not (self.gathered or self.swiglu)

    @property
    def tile_dtype(self) -> str:
        """Of the elements in their tile."""
        return "bfloat16" if self.swiglu else self.dtype

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
    def fetch(x, index, given, at, half, limit, tiles):
        """What is not copied by DMA: rows by index, SwiGLU, scales. A thread takes a column, and a group of columns."""
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
                        if source.swiglu and c < at.width:
                            value = activation(T, x[token, at.column + c], x[token, half + at.column + c], limit)
                            tiles.elements[i, c] = T.Cast(T.bfloat16, value)
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
    def load(x, index, given, at, half, limit, tiles):
        if source.copied:
            T.copy(
                x[at.row : at.row + at.height, at.column : at.column + at.width],
                tiles.elements[0 : at.height, 0 : at.width],
            )
        if not source.copied or source.quantized:
            fetch(x, index, given, at, half, limit, tiles)

    return load
