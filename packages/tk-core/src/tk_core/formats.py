"""Number formats and tensor layouts: the vocabulary shared by interfaces, references and backends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """An element format of quantized data.

    Attributes:
        name: the name users pass as ``fmt``.
        dtype: dtype of the tensor that stores the codes.
        qmax: largest finite magnitude.
        codes: logical elements of a packed group: 1 for e4m3, 2 for e2m1, 8 for e5m6.
        storage: stored elements of that group: 1 for e4m3, 1 byte for e2m1, 12 bytes for e5m6.
    """

    name: str
    dtype: torch.dtype
    qmax: float
    codes: int
    storage: int

    def width(self, logical: int) -> int:
        """Stored columns of a row of ``logical`` elements."""
        return logical // self.codes * self.storage if self.codes > 1 else logical

    def logical(self, width: int) -> int:
        """Logical columns of a stored row of ``width`` elements."""
        return width // self.storage * self.codes if self.codes > 1 else width


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 1, 1)
E2M1 = Format("e2m1", torch.int8, 6.0, 2, 1)
E5M6 = Format("e5m6", torch.uint8, 65024.0, 8, 12)
FORMATS = {f.name: f for f in (E4M3, E2M1, E5M6)}
FORMAT_OF_DTYPE = {f.dtype: f for f in (E4M3, E2M1, E5M6)}
FLOAT_OUT = {"bf16": torch.bfloat16, "fp32": torch.float32}

PACKED_DTYPE = {4: torch.int32, 2: torch.int16}
"""dtype of a word that packs UE8M0 scale bytes, by bytes in a word."""

AMAX_CLAMP_DEFAULT = {
    ("e4m3", False): 1e-4,
    ("e4m3", True): 448.0 * 2.0**-9,
    ("e2m1", False): 6.0 * 2.0**-126,
    ("e2m1", True): 6.0 * 2.0**-9,
}
"""Smallest amax of a block, by (format, e4m3 scales): keeps scales positive and normal."""

E5M6_AMAX_CLAMP = 1e-4
"""Smallest amax of a group of e5m6."""


class TensorSpec(NamedTuple):
    """What a result looks like: enough to allocate it, to fake it, and to check a caller's buffer.

    Attributes:
        shape: sizes.
        dtype: element type.
        stride: strides in elements; None means contiguous.
        storage: elements of the storage when it is larger than shape and stride need (padding that is written, too).
        row_strided: a caller's buffer may have any leading strides, as long as the last is 1 and rows do not overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    storage: int | None = None
    row_strided: bool = False

    def batched(self, batch: int) -> TensorSpec:
        """As many of this matrix, one after the other."""
        if self.stride is None:
            return self._replace(shape=(batch, *self.shape))
        storage = self.storage if self.storage is not None else self.shape[0] * self.shape[1]
        return self._replace(shape=(batch, *self.shape), stride=(storage, *self.stride), storage=batch * storage)

    def empty(self, like: Tensor) -> Tensor:
        """Allocate it on the device of ``like``."""
        if self.stride is None:
            return like.new_empty(self.shape, dtype=self.dtype)
        if self.storage is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=like.device)
        return like.new_empty((self.storage,), dtype=self.dtype).as_strided(self.shape, self.stride)

    def maker(self, like: Tensor) -> Callable[[], Tensor]:
        """``empty(like)`` for repeated use: ``empty_like`` of a tensor of one element costs half of ``new_empty``."""
        shape, stride, storage = self.shape, self.stride, self.storage
        if stride is None:
            return functools.partial(torch.empty_like, _prototype(shape, self.dtype, like))
        if storage is None or storage == math.prod(shape):
            return functools.partial(torch.empty_strided, shape, stride, dtype=self.dtype, device=like.device)
        whole = functools.partial(torch.empty_like, _prototype((storage,), self.dtype, like))
        return lambda: torch.as_strided(whole(), shape, stride)


def _prototype(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor of one element that ``empty_like`` answers with a contiguous one of ``shape``."""
    if math.prod(shape) <= 1:  # expanding would leave strides of 0, which empty_like would keep
        return torch.empty(shape, dtype=dtype, device=like.device)
    return torch.empty((), dtype=dtype, device=like.device).expand(shape)


def ceil_div(a: int, b: int) -> int:
    """``ceil(a / b)`` for ``b > 0``."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is at least ``a``."""
    return -(-a // b) * b


def column_major(rows: int, columns: int, dtype: torch.dtype, align_bytes: int) -> TensorSpec:
    """A column-major matrix whose columns are padded to ``align_bytes`` (0: no padding), as TMA wants them."""
    ld = align(rows, align_bytes // dtype.itemsize) if align_bytes else rows
    return TensorSpec((rows, columns), dtype, (1, ld), columns * ld)


def scale_spec(
    row_blocks: int,
    column_blocks: int,
    *,
    column_major_sf: bool = False,
    packed: bool = False,
    e4m3_sf: bool = False,
    pack_rows: bool = False,
    ue8m0_per_word: int = 4,
    sf_align_bytes: int = 16,
) -> TensorSpec:
    """The scale tensor of ``row_blocks x column_blocks`` blocks (docs/numerics.md, "Scale factors").

    Args:
        column_major_sf: strides ``(1, padded rows)`` instead of row-major.
        packed: UE8M0 bytes in words of ``ue8m0_per_word``; along columns, or along rows with ``pack_rows``.
        e4m3_sf: scales in float8_e4m3fn instead of float32.
    """
    dtype = torch.float8_e4m3fn if e4m3_sf else torch.float32
    if packed:
        dtype = PACKED_DTYPE[ue8m0_per_word]
        if pack_rows:
            row_blocks = ceil_div(row_blocks, ue8m0_per_word)
        else:
            column_blocks = ceil_div(column_blocks, ue8m0_per_word)
    if column_major_sf:
        return column_major(row_blocks, column_blocks, dtype, sf_align_bytes)
    return TensorSpec((row_blocks, column_blocks), dtype)


def whole_storage(t: Tensor) -> Tensor:
    """A column-major result seen with its padding: ``(..., columns, padded rows)``, contiguous."""
    ld = t.stride(-1)
    return t.as_strided((*t.shape[:-2], t.shape[-1], ld), (*t.stride()[:-2], ld, 1))


def is_column_major(sf: Tensor) -> bool:
    """The layout rule of scale inputs: column-major iff ``stride(0) == 1`` and ``stride(1) != 1``."""
    return sf.stride(0) == 1 and sf.stride(1) != 1
