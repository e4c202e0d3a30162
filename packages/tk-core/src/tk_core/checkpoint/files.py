"""Safetensors files: shards with their index, and a writer that streams tensors, so memory holds one at a time."""

from __future__ import annotations

import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgumentError

INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


class Spec(NamedTuple):
    """A tensor of a file before its data is known."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        InvalidArgumentError: it holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


class Shard:
    """A safetensors file that is read lazily.

    Raises:
        InvalidArgumentError: the file is corrupt, or not a safetensors file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file: Any = safe_open(path, "pt").__enter__()
            self.names: list[str] = list(self._file.keys())
            self.metadata: dict[str, str] = dict(self._file.metadata() or {})
            self._slices = {name: self._file.get_slice(name) for name in self.names}
        except (SafetensorError, OSError, ValueError) as error:
            raise InvalidArgumentError(f"{path} is not a readable safetensors file: {error}") from error

    def spec(self, name: str) -> Spec:
        """Name, dtype and shape of a tensor, without its data.

        Raises:
            InvalidArgumentError: a dtype that torch has no type for.
        """
        part = self._slices[name]
        dtype = part.get_dtype()
        if dtype not in _NAMES:
            raise InvalidArgumentError(f"{self.path}: tensor {name} has dtype {dtype}, which is not supported")
        return Spec(name, _NAMES[dtype], tuple(part.get_shape()))

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        return self._file.get_tensor(name)


class Checkpoint:
    """A checkpoint: one file, or a folder of shards with an index.

    Raises:
        InvalidArgumentError: nothing there, no safetensors file in it, or an index that contradicts its shards.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.is_file = path.is_file()
        self.weight_map: dict[str, str] = {}
        if self.is_file:
            files = [path]
        elif path.is_dir():
            files = self._indexed() if (path / INDEX).exists() else sorted(path.glob("*.safetensors"))
        else:
            raise InvalidArgumentError(f"{path} does not exist")
        if not files:
            raise InvalidArgumentError(f"{path} holds no .safetensors file")
        self.shards = [Shard(f) for f in files]
        self.home: dict[str, Shard] = {}
        for shard in self.shards:
            for name in shard.names:
                if name in self.home:
                    raise InvalidArgumentError(f"tensor {name} is in {self.home[name].path.name} and {shard.path.name}")
                self.home[name] = shard
        for name, file in self.weight_map.items():
            if name not in self.home or self.home[name].path.name != file:
                raise InvalidArgumentError(f"{path / INDEX} puts tensor {name} in {file}, which does not hold it")

    def _indexed(self) -> list[pathlib.Path]:
        index = self.path / INDEX
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidArgumentError(
                f"{index} is not a safetensors index: weight_map must be an object, got {type(weight_map).__name__}"
            )
        for tensor, name in weight_map.items():
            # A shard keeps its name where the conversion goes, so one in another folder could replace another there.
            if not isinstance(name, str) or name in ("", "..") or name != pathlib.PurePath(name).name:
                raise InvalidArgumentError(f"{index} puts tensor {tensor} in {name!r}; a file of the folder is needed")
        self.weight_map = weight_map
        files = [self.path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise InvalidArgumentError(f"{index} names {file.name}, which is missing")
        return files

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self.home)

    def other_files(self) -> list[pathlib.Path]:
        """What else the folder holds: config, tokenizer, …"""
        if self.is_file:
            return []
        skip = {shard.path for shard in self.shards} | {self.path / INDEX}
        return [f for f in sorted(self.path.rglob("*")) if f.is_file() and f not in skip]


def write(
    path: pathlib.Path,
    specs: list[Spec],
    tensors: Iterable[Tensor],
    metadata: dict[str, str],
    before_done: Callable[[], None] = lambda: None,
) -> None:
    """Write a safetensors file whose tensors come one by one; the file appears when it is complete.

    Format: 8 bytes little-endian header size, a JSON header, the data in header order (safetensors format, README).

    Args:
        before_done: called when all is written, before the file appears.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for spec in specs:
        start, end = end, end + spec.bytes
        header[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise InvalidArgumentError(f"{spec.name}: expected {spec}, got {tensor.dtype}{tuple(tensor.shape)}")
            file.write(_bytes(tensor).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    before_done()
    unfinished.rename(path)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def index_of(shards: Iterator[tuple[str, list[Spec]]]) -> dict[str, Any]:
    """The index of some shards."""
    weight_map, size = {}, 0
    for file, specs in shards:
        for spec in specs:
            weight_map[spec.name] = file
            size += spec.bytes
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
