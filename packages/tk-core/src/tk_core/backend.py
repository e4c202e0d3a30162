"""The contract between tk-core and a backend: types only, plus the lookup of kernels by name.

A backend ships one wheel with an entry point in the group ``tk.backends`` that names an object with the
attributes of :class:`Backend`. docs/backend-contract.md explains each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

CONTRACT = (1, 0)
"""Version of this contract. A backend's major must be equal and its minor at most ours."""


Launch = Callable[[tuple[Tensor, ...], tuple[Any, ...]], None]
"""Fills results from the arguments of a call: ``launch(outs, args)``."""


class Layout(NamedTuple):
    """The device facts that a result may show. Operators receive them as arguments, never as globals.

    Attributes:
        ue8m0_per_word: UE8M0 scale bytes in one packed word: 4 (int32, NVIDIA) or 2 (int16, Ascend).
        sf_align_bytes: the padding of each column of a column-major scale tensor, in bytes; 0 means none.
        e4m3: dtype of 1-4-3 data.
    """

    ue8m0_per_word: int = 4
    sf_align_bytes: int = 16
    e4m3: torch.dtype = torch.float8_e4m3fn


class Refused(Exception):
    """Raised by a kernel call before anything is written: this backend cannot run this legal call. Says why."""


@runtime_checkable
class Kernel(Protocol):
    """One operator on one backend."""

    revision: int
    """``Operator.revision`` that this kernel implements; another number makes it stale, that is, not implemented."""

    def refusal(self, *args: Any) -> str | None:
        """Say in a sentence why the call cannot run here, or None. Pure, cheap, accepts meta tensors."""

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        """Fill ``outs`` (already allocated, never all empty) from the operator's arguments.

        Raises:
            Refused: with the sentence of ``refusal``, before any write.
        """


@runtime_checkable
class Backend(Protocol):
    """A set of kernels for one device type.

    A backend may also have ``bind(kernel, outs, args) -> Launch | None``: it runs the kernel, and returns what runs
    further calls that have the same signature (shapes, strides, dtypes, devices, addresses modulo 16 bytes, and equal
    other arguments), so that whatever the kernel decides from those is decided once. None: nothing can be kept.
    """

    name: str
    device_type: str
    contract: tuple[int, int]
    layout: Layout
    version: str

    def applies(self) -> bool:
        """Whether this build of torch is the one that the backend is for. Static: no driver call."""

    def unavailable(self) -> str | None:
        """Say in a sentence why driver or device cannot be used here, or None."""

    def kernel(self, op: str) -> Kernel | None:
        """The kernel of an operator such as ``"quant.per_token_cast"``, imported lazily; None if not implemented."""


def locate(package: str, op: str, table: str) -> tuple[ModuleType, Any] | None:
    """Find the entry of an operator in the file that its name leads to.

    ``quant.per_token_cast_with_sf_only`` is looked up in the dict ``table`` of the modules
    ``PACKAGE.quant.per_token_cast_with_sf_only``, ``….per_token_cast_with_sf``, …, ``….per``: variants live in
    their parent's file, so the first module that exists and lists the operator holds it.

    Returns:
        The module and the entry, or None. An import error inside an existing module is not hidden.
    """
    family, _, name = op.partition(".")
    if importlib.util.find_spec(f"{package}.{family}") is None:
        return None
    words = name.split("_")
    for length in range(len(words), 0, -1):
        path = f"{package}.{family}.{'_'.join(words[:length])}"
        if importlib.util.find_spec(path) is None:
            continue
        module = importlib.import_module(path)
        entries = getattr(module, table, None)
        if entries is not None and op in entries:
            return module, entries[op]
    return None
