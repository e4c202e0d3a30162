"""Convert a checkpoint: quantize its weights by a recipe, or turn quantized weights back into plain ones.

Output goes to ``DST.partial``, shard by shard, and becomes ``DST`` in one rename at the end. A run that is killed, or
finds the disk full, leaves only the partial folder; the same command resumes it at the first missing shard.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from .files import INDEX, Checkpoint, Shard, Spec, index_of, read_object, write
from .recipes import RECIPES, Recipe, recipe_of

INCLUDE = ("*.weight",)
EXCLUDE = ("*embed*", "*norm*", "*Norm*", "lm_head*", "*.gate.weight")
"""Embeddings, norms, the output head and router gates stay in high precision, as in DeepSeek-V3."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SUFFIXES = ("_scale_inv", "_scale_2", "_scale")
_CONFIG = "config.json"
_NOTE = "tk-conversion.json"
"""What a resumed run has to know, in the partial folder."""

Progress = Callable[[str, int], None]
"""Called with a tensor's name and its bytes when it is done."""


@dataclass
class TensorReport:
    """What happened to one weight."""

    name: str
    shape: tuple[int, ...]
    relative_error: float
    bytes_before: int
    bytes_after: int


def selected(spec: Spec, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a tensor is a weight that these patterns select."""
    return (
        len(spec.shape) == 2
        and spec.dtype in _FLOATS
        and any(fnmatch.fnmatchcase(spec.name, p) for p in include)
        and not any(fnmatch.fnmatchcase(spec.name, p) for p in exclude)
    )


class Conversion:
    """One conversion of a checkpoint.

    Args:
        source, target: a file each, or a folder each. The target must not exist, nor lie in the source.
        device: where tensors are converted.

    Raises:
        InvalidArgumentError: an argument that is not as said, or a source that holds something else than it should.
    """

    def __init__(self, source: pathlib.Path, target: pathlib.Path, device: str) -> None:
        self.checkpoint = Checkpoint(source)
        self.target = target
        self.device = _usable(device)
        if target.exists():
            raise InvalidArgumentError(f"{target} exists; choose another place, or remove it")
        if not target.parent.is_dir():
            raise InvalidArgumentError(f"the folder {target.parent} does not exist")
        if source.resolve() in target.resolve().parents:
            raise InvalidArgumentError(f"{target} lies in {source}, whose files are copied; choose another place")
        self.partial = target.with_name(target.name + ".partial")
        self._config: dict[str, Any] | None = None
        if not self.checkpoint.is_file and (source / _CONFIG).exists():
            self._config = read_object(source / _CONFIG)
        self._reports: dict[str, TensorReport] = {}

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the run that it resumes."""
        raise NotImplementedError

    def outputs(self, shard: Shard, name: str) -> list[Spec]:
        """The tensors that one becomes."""
        raise NotImplementedError

    def converted(self, shard: Shard, name: str) -> list[Tensor]:
        """The data of ``outputs``."""
        raise NotImplementedError

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of the target."""
        raise NotImplementedError

    def size(self) -> int:
        """Bytes of all source tensors, the total of ``progress``."""
        return sum(s.spec(n).bytes for s in self.checkpoint.shards for n in s.names)

    def run(self, progress: Progress) -> list[TensorReport]:
        """Convert everything; returns a report for each weight that changed.

        Raises:
            OSError: nothing can be written, or no more; with the name of the folder.
        """
        try:
            self._run(progress)
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(self.partial)) from error
        return list(self._reports.values())

    def _run(self, progress: Progress) -> None:
        self._start()
        plans = [(s, [o for n in s.names for o in self.outputs(s, n)]) for s in self.checkpoint.shards]
        for shard, specs in plans:
            done = self.partial / shard.path.name
            if done.exists():
                for name in shard.names:
                    progress(name, shard.spec(name).bytes)
                continue
            # The reports first: a shard that is there is not looked at again.
            write(done, specs, self._stream(shard, progress), shard.metadata or {"format": "pt"}, self._save_reports)
        self._finish([(s.path.name, specs) for s, specs in plans])

    def _stream(self, shard: Shard, progress: Progress) -> Iterator[Tensor]:
        for name in shard.names:
            yield from self.converted(shard, name)
            progress(name, shard.spec(name).bytes)

    def _start(self) -> None:
        if not self.partial.exists():
            self.partial.mkdir()
        if self.partial.is_dir() and {f.name for f in self.partial.iterdir()} <= {_NOTE + ".new"}:
            self._save_reports()
            return
        try:
            saved = read_object(self.partial / _NOTE)
            same = saved["settings"] == self._identity()
            reports = [TensorReport(**{**r, "shape": tuple(r["shape"])}) for r in saved["reports"]]
        except (InvalidArgumentError, KeyError, TypeError, FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise InvalidArgumentError(f"{self.partial} is left from another conversion; remove it first")
        self._reports = {r.name: r for r in reports}

    def _identity(self) -> dict[str, Any]:
        """Settings and source files: those of a resumed run are the ones of the run that it resumes."""
        files = [(s.path.name, s.path.stat()) for s in self.checkpoint.shards]
        return {**self.settings(), "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]}

    def _save_reports(self) -> None:
        text = json.dumps({"settings": self._identity(), "reports": [vars(r) for r in self._reports.values()]})
        note = self.partial / _NOTE
        fresh = note.with_name(_NOTE + ".new")
        fresh.write_text(text)
        fresh.rename(note)

    def _finish(self, shards: list[tuple[str, list[Spec]]]) -> None:
        if self.checkpoint.is_file:
            (self.partial / shards[0][0]).rename(self.target)
            shutil.rmtree(self.partial)
            return
        if (self.checkpoint.path / INDEX).exists():
            (self.partial / INDEX).write_text(json.dumps(index_of(iter(shards)), indent=2) + "\n")
        for file in self.checkpoint.other_files():
            if file.name == _NOTE:
                continue
            copy = self.partial / file.relative_to(self.checkpoint.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        if self._config is not None:
            (self.partial / _CONFIG).write_text(json.dumps(self.config(self._config), indent=2) + "\n")
        # The note last: without it a complete partial folder would be of no use.
        self.partial.rename(self.target)
        (self.target / _NOTE).unlink()


def _usable(device: str) -> torch.device:
    """A device of this machine, by name."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InvalidArgumentError(f"device must be a device such as cpu or cuda, got {device!r}") from None
    module: Any = getattr(torch, found.type, None)
    if found.type != "cpu" and not (hasattr(module, "is_available") and module.is_available()):
        raise InvalidArgumentError(f"device must be one that torch can use here, got {device!r}")
    if found.index is not None and found.type != "cpu" and found.index >= module.device_count():
        raise InvalidArgumentError(f"device must be one of the {module.device_count()} here, got {device!r}")
    return found


class Quantize(Conversion):
    """Quantize the selected weights by a recipe; other tensors are copied."""

    def __init__(
        self, source: pathlib.Path, target: pathlib.Path, recipe: str, include: Sequence[str] = INCLUDE,
        exclude: Sequence[str] = EXCLUDE, device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(source, target, device)
        if recipe not in RECIPES:
            raise InvalidArgumentError(f"recipe must be {', '.join(RECIPES)}, got {recipe!r}")
        self.recipe: Recipe = RECIPES[recipe]
        self.include, self.exclude = tuple(include), tuple(exclude)
        for shard in self.checkpoint.shards:
            for name in shard.names:
                self._check(shard.spec(name))
        if not any(selected(s.spec(n), self.include, self.exclude) for s in self.checkpoint.shards for n in s.names):
            raise InvalidArgumentError(f"no 2-D float tensor of {source} matches the patterns {self.include}")

    def _check(self, spec: Spec) -> None:
        wanted = any(fnmatch.fnmatchcase(spec.name, p) for p in self.include)
        if wanted and recipe_of(self.checkpoint.names, spec.name, spec.dtype) is not None:
            raise InvalidArgumentError(f"{spec.name} has scales beside it: the checkpoint is already quantized")
        if not selected(spec, self.include, self.exclude):
            return
        if spec.shape[1] % self.recipe.columns or 0 in spec.shape:
            raise InvalidArgumentError(
                f"{spec.name} has shape {spec.shape}; {self.recipe.name} needs rows and a multiple of "
                f"{self.recipe.columns} columns; leave it out with --exclude"
            )

    def settings(self) -> dict[str, Any]:
        return {
            "source": str(self.checkpoint.path.resolve()), "recipe": self.recipe.name,
            "include": list(self.include), "exclude": list(self.exclude),
        }  # fmt: skip

    def outputs(self, shard: Shard, name: str) -> list[Spec]:
        spec = shard.spec(name)
        if not selected(spec, self.include, self.exclude):
            return [spec]
        return [Spec(name + s.suffix, s.dtype, s.shape) for s in self.recipe.stored(*spec.shape)]

    def converted(self, shard: Shard, name: str) -> list[Tensor]:
        spec = shard.spec(name)
        tensor = shard.tensor(name)
        if not selected(spec, self.include, self.exclude):
            return [tensor]
        weight = tensor.to(self.device)
        weight = weight.float() if weight.dtype == torch.float16 else weight
        stored = self.recipe.quantize(weight)
        error = _relative_error(self.recipe.dequantize(*stored), weight)
        after = sum(s.bytes for s in self.outputs(shard, name))
        self._reports[name] = TensorReport(name, spec.shape, error, spec.bytes, after)
        return [t.cpu() for t in stored]

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "quantization_config": self.recipe.config}


def _relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` (Frobenius), row block by row block to stay small; 0 for an all-zero weight."""
    difference = total = 0.0
    for a, b in zip(got.split(4096), want.split(4096), strict=True):
        wide = b.double()
        difference += float((a.double() - wide).square().sum())
        total += float(wide.square().sum())
    return (difference / total) ** 0.5 if total else 0.0


class Dequantize(Conversion):
    """Turn quantized weights back into plain ones; other tensors are copied."""

    def __init__(self, source: pathlib.Path, target: pathlib.Path, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__(source, target, device)
        if dtype not in _FLOATS:
            raise InvalidArgumentError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        self.dtype = dtype
        names = self.checkpoint.names
        self.recipes = {
            n: recipe
            for n, shard in self.checkpoint.home.items()
            if not n.endswith(_SUFFIXES) and (recipe := recipe_of(names, n, shard.spec(n).dtype)) is not None
        }
        if not self.recipes:
            raise InvalidArgumentError(
                f"{source} holds no quantized weight (no *_scale_inv or *_scale beside a tensor)"
            )
        self.scales = {n + s.suffix for n, r in self.recipes.items() for s in r.stored(1, 2)[1:]}
        for name, recipe in self.recipes.items():
            self._check(name, recipe)

    def _check(self, name: str, recipe: Recipe) -> None:
        columns = self._shape(name, recipe)[1]
        for want in recipe.stored(self.checkpoint.home[name].spec(name).shape[0], columns):
            home = self.checkpoint.home.get(name + want.suffix)
            if home is None:
                raise InvalidArgumentError(f"{name}{want.suffix} is missing; {recipe.name} weights need it")
            spec = home.spec(name + want.suffix)
            if (spec.dtype, spec.shape) != (want.dtype, want.shape):
                raise InvalidArgumentError(
                    f"{spec.name} is {spec.dtype}{spec.shape}; a {recipe.name} weight needs {want.dtype}{want.shape}"
                )

    def _shape(self, name: str, recipe: Recipe) -> tuple[int, int]:
        """Logical shape of a quantized weight."""
        spec = self.checkpoint.home[name].spec(name)
        if len(spec.shape) != 2:
            raise InvalidArgumentError(f"{name} has shape {spec.shape}; quantized weights have two dimensions")
        return spec.shape[0], spec.shape[1] * (2 if spec.dtype == torch.uint8 else 1)

    def settings(self) -> dict[str, Any]:
        return {"source": str(self.checkpoint.path.resolve()), "dtype": str(self.dtype)}

    def outputs(self, shard: Shard, name: str) -> list[Spec]:
        if name in self.scales:
            return []
        recipe = self.recipes.get(name)
        return [shard.spec(name) if recipe is None else Spec(name, self.dtype, self._shape(name, recipe))]

    def converted(self, shard: Shard, name: str) -> list[Tensor]:
        if name in self.scales:
            return []
        recipe = self.recipes.get(name)
        if recipe is None:
            return [shard.tensor(name)]
        suffixes = [s.suffix for s in recipe.stored(1, 2)]
        stored = [self.checkpoint.home[name + s].tensor(name + s).to(self.device) for s in suffixes]
        return [recipe.dequantize(*stored).to(self.dtype).cpu()]

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in config.items() if k != "quantization_config"}
