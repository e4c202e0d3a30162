"""Quantizing a tile of fp32 values in UB to e4m3, in groups of consecutive columns of a row.

One SIMT thread a group finds the amax, makes scale and factor, and stores the scale to global memory, in the layout
that ``scale_tensors.arguments`` describes at run time; then one thread an element encodes.
"""

from typing import Any, NamedTuple

from . import codes
from .indices import kept, within
from .scale_tensors import UE8M0

TILES = ((16, 512), (1, 8192))
"""Rows and columns of tiles, few so that few kernels serve all shapes."""


class Tiling(NamedTuple):
    """How rows are cut: the size of a tile, and the columns that one takes."""

    height: int
    width: int
    step: int


class Place(NamedTuple):
    """Where a tile is in its matrix: its first row and group, and its size.

    Attributes:
        groups: of a row.
        apart: groups between the tiles of two halves.
        offset: of the matrix in the memory of scales.
    """

    top: Any
    group: Any
    tall: Any
    wide: Any
    groups: Any
    apart: Any = 0
    offset: Any = 0


def tiling(columns: int, group: int, packed: bool, tiles: tuple[tuple[int, int], ...] = TILES) -> Tiling | None:
    """The tiles for rows of a width: all columns, or whole words of scales; None where no tile holds a word."""
    word = 2 * group if packed else group
    for height, width in tiles:
        if min(word, columns) <= width:
            step = columns if columns <= width else width // word * word
            return Tiling(height, width, step)
    return None


def unsupported(columns: int, group: int, packed: bool, tiles: tuple[tuple[int, int], ...] = TILES) -> str | None:
    """Why no tile can take groups of a size."""
    if tiling(columns, group, packed, tiles) is not None:
        return None
    most = tiles[-1][1] // (2 if packed else 1)
    return f"groups of at most {most} of {columns} channels fit in the unified buffer, got num_per_channels = {group}"


def quantizer(T: Any, height: int, width: int, threads: int, halves: int = 1) -> Any:
    """A macro that quantizes ``values[:tall, :wide]`` to ``coded``, for tiles of a size.

    With two halves, the tile of the second half of the columns is below the first. Rows with a flag in ``absent``,
    where it is given, get scale 0. ``factors`` is scratch of the size of the values.
    """

    @T.macro
    def quantize(
        values: Any,
        factors: Any,
        coded: Any,
        wide_sf: Any,
        narrow_sf: Any,
        kind: Any,
        row_stride: Any,
        group_stride: Any,
        rounded: Any,
        group: Any,
        clamp_min: Any,
        at: Any,
        absent: Any = None,
    ) -> None:
        with T.SimtVF(threads=threads):
            for i, g in T.Parallel(halves * height, width):
                most = T.alloc_var(T.int32)
                power = T.alloc_var(T.int32)
                scale = T.alloc_var(T.float32)
                inverse = T.alloc_var(T.float32)
                place = T.alloc_var(T.int64)
                end = kept(T, at.wide)
                start = kept(T, g * group)
                if i % height < kept(T, at.tall) and start < end:
                    most = 0
                    for k in T.serial(T.min(group, end - start)):
                        most = T.max(most, codes.magnitude(T, values[i, within(T, start + k, width)]))
                    a = kept(T, T.max(codes.real(T, most), clamp_min))
                    scale = a / T.float32(448.0)
                    power = (codes.bits(T, scale) + T.int32(0x7FFFFF)) >> 23
                    if rounded == 0:
                        inverse = T.min(T.float32(448.0) / a, T.float32(3.4028234663852886e38))
                    else:
                        scale = codes.real(T, power << 23)
                        inverse = codes.real(T, (T.int32(254) - power) << 23)
                    if most >= T.int32(codes.INFINITY_BITS):
                        scale = T.float32(float("nan"))
                        inverse = scale
                        power = 255
                    if absent is not None:  # noqa: SIM102 - known when the kernel is built
                        if absent[i % height] != 0:
                            scale = T.float32(0.0)
                            power = 0
                    factors[i, g] = inverse
                    place = T.Cast(T.int64, kept(T, at.top + i % height)) * row_stride + at.offset
                    number = kept(T, at.group + g + i // height * at.apart)
                    if kind == UE8M0:
                        place = place + T.Cast(T.int64, number >> 1) * group_stride
                        narrow_sf[place + (number & 1)] = T.Cast(T.uint8, power)
                        if (number & 1) == 0 and number + 1 == at.groups:
                            narrow_sf[place + 1] = T.uint8(0)
                    else:
                        wide_sf[place + T.Cast(T.int64, number) * group_stride] = scale
        with T.SimtVF(threads=threads):
            for i, j in T.Parallel(halves * height, width):
                if i % height < kept(T, at.tall) and j < kept(T, at.wide):
                    factor = kept(T, factors[i, within(T, T.truncdiv(j, group), width)])
                    coded[i, j] = codes.to_e4m3(T, kept(T, values[i, j] * factor))

    return quantize
