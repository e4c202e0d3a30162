"""Inputs of every operator: one place that feeds ``tk check``, the conformance plugin, ``tk bench`` and the docs.

``cases/FAMILY/NAME.py`` defines ``CASES = {"FAMILY.NAME": Cases(...)}``; variants live in their parent's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..backend import Layout, locate

Level = Literal["quick", "full", "large"]
LEVELS: tuple[Level, ...] = ("quick", "full", "large")


class Call(NamedTuple):
    """Arguments of one call of the public function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """Write the arguments of a sample as one would write the call."""
    return Call(args, kwargs)


class Maker:
    """Makes the inputs of a sample: seeded, with the same values on every device.

    Attributes:
        device: where tensors are made.
        layout: layout of the backend under test, for inputs that carry packed scales.
    """

    def __init__(self, device: torch.device | str, layout: Layout, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.layout = layout
        self._generator = torch.Generator().manual_seed(seed)

    def to(self, t: Tensor) -> Tensor:
        """Move a tensor made on the CPU, keeping its strides and offset-free storage layout."""
        return t.to(self.device)

    def tensor(self, data: Any, dtype: torch.dtype) -> Tensor:
        """A literal."""
        return torch.tensor(data, dtype=dtype).to(self.device)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """A constant."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform values in [0, 1)."""
        return torch.rand(shape, generator=self._generator).to(dtype).to(self.device)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform integers in [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self._generator).to(dtype).to(self.device)

    def magnitudes(self, *shape: int, low: int = -110, high: int = 120, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of every magnitude: each has an exponent drawn uniformly from [low, high]."""
        exponents = torch.randint(low, high + 1, shape, generator=self._generator).float()
        values = torch.randn(shape, generator=self._generator) * torch.exp2(exponents)
        return values.clamp(-1e38, 1e38).to(dtype).to(self.device)

    def large(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Values made on the device, for inputs too large to make on the CPU: a repeated pattern of exact numbers."""
        period = torch.randn((1, columns), generator=self._generator).to(dtype).to(self.device)
        return period.expand(rows, columns).contiguous()


class ShapeMaker(Maker):
    """Makes meta tensors: shapes and dtypes without data, to find out which kernels a call needs."""

    def __init__(self, layout: Layout) -> None:
        super().__init__("meta", layout)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._empty(shape, dtype)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._empty(shape, dtype)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return self._empty(shape, dtype)

    def magnitudes(self, *shape: int, low: int = -110, high: int = 120, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._empty(shape, dtype)

    def large(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self._empty((rows, columns), dtype)


@dataclass(frozen=True)
class Sample:
    """One input with the reason that it exists.

    Attributes:
        why: the code path, fault or boundary that it guards.
        make: builds the arguments.
        level: ``quick`` for every run; ``full`` for the long one; ``large`` only where device memory allows (GPUs).
    """

    why: str
    make: Callable[[Maker], Call]
    level: Level = "quick"


@dataclass(frozen=True)
class ErrorSample:
    """A call outside the domain, the error type, and a part of its message."""

    why: str
    make: Callable[[Maker], Call]
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Tolerance:
    """How near a kernel must come to the reference, and why not bit for bit.

    Attributes:
        reason: the derivation.
        rtol, atol: as in torch.testing.assert_close, in the result's dtype.
        compare: replaces the comparison by numbers: takes (expected results, actual results) and returns what is wrong,
            or None.
    """

    reason: str
    rtol: float = 0.0
    atol: float = 0.0
    compare: Callable[[list[Tensor], list[Tensor]], str | None] | None = None


BITWISE = Tolerance("equal bit for bit")


@dataclass(frozen=True)
class Point:
    """A benchmark point, named after the model and phase that it comes from."""

    name: str
    make: Callable[[Maker], Call]


@dataclass(frozen=True)
class Cases:
    """Everything the conformance and the benchmarks need to know of one operator.

    Attributes:
        samples, errors: inputs inside and outside the domain.
        bench: benchmark points.
        tolerance: against the reference on the same device.
        bytes_moved: least bytes of a call, from its arguments and results: inputs read once, outputs written once.
        flops: floating-point operations of a call, where they matter.
        unspecified: clears parts of the results that are unspecified for a call (codes of a block with a NaN), in
            place, before a comparison: takes the call and the list of results.
        inplace: names or positions of arguments that the call writes.
    """

    samples: Sequence[Sample]
    errors: Sequence[ErrorSample] = ()
    bench: Sequence[Point] = ()
    tolerance: Tolerance = BITWISE
    bytes_moved: Callable[[Call, list[Tensor]], int] | None = None
    flops: Callable[[Call], int] | None = None
    unspecified: Callable[[Call, list[Tensor]], None] | None = None
    inplace: Sequence[str | int] = field(default=())

    def written(self, arguments: Call) -> list[Tensor]:
        """The argument tensors that a call writes."""
        return tensors_in([arguments.kwargs.get(i) if isinstance(i, str) else arguments.args[i] for i in self.inplace])


def cases_of(op: str) -> Cases | None:
    """The cases of an operator, or None where it has none."""
    found = locate("tk_core.cases", op, "CASES")
    return None if found is None else found[1]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return []


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of all tensors in some values, padding not counted."""
    return sum(t.numel() * t.element_size() for value in values for t in tensors_in(value))


def all_bytes(arguments: Call, results: list[Tensor]) -> int:
    """The usual ``bytes_moved``: every tensor argument read once, every result written once."""
    return bytes_of([*arguments.args, *arguments.kwargs.values()]) + bytes_of(results)
