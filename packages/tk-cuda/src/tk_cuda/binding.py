"""Bind a kernel to the signature of a call.

A kernel's ``__call__`` chooses what to compile, views its tensors as the launcher wants them, allocates scratch, and
launches: all of it decided by the signature. ``bind`` watches one call and writes the function that repeats its
launches for the tensors of another: ``k0(args[0], outs[0], outs[1].as_strided(…), 0.0001)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tk_core.backend import Kernel, Launch
from tk_core.formats import TensorSpec

from .jit import noting

_FACTORIES = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})

Step = tuple[Callable[..., Any], tuple[Any, ...]]


class _Unbound(Exception):
    """The call does something that no other call can repeat from its tensors alone."""


class _Watch(TorchDispatchMode):
    """What a kernel does to tensors: launches and in-place operators in order, and the scratch that it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.scratch: list[Tensor] = []
        self.opaque = False

    def note(self, launcher: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.steps.append((launcher, args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _FACTORIES:
            self.scratch.append(result)
        elif func._schema.is_mutable and not kwargs:
            self.steps.append((func, tuple(args)))
        elif not func.is_view:
            self.opaque = True
        return result


def bind(kernel: Kernel, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Launch | None:
    """Run a kernel; returns what runs it again for other tensors of the same signature, or None."""
    watch = _Watch()
    with noting(watch.note), watch:
        kernel(outs, *args)
    if watch.opaque:
        return None
    try:
        return _repeat(watch, outs, args)
    except _Unbound:
        return None


def _repeat(watch: _Watch, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Launch:
    bases = {f"outs[{i}]": t for i, t in enumerate(outs)}
    bases |= {f"args[{i}]": t for i, t in enumerate(args) if isinstance(t, Tensor)}
    lists = [(f"args[{i}]", value) for i, value in enumerate(args) if isinstance(value, list)]
    bases |= {f"{name}[{j}]": t for name, value in lists for j, t in enumerate(value) if isinstance(t, Tensor)}
    scratch = {f"s{i}": t for i, t in enumerate(watch.scratch)}
    names: dict[str, Any] = {"as_strided": torch.as_strided}
    lines = []
    for name, t in scratch.items():
        stride = None if t.is_contiguous() else tuple(t.stride())
        names[f"new_{name}"] = TensorSpec(tuple(t.shape), t.dtype, stride).maker(t)
        lines.append(f"    {name} = new_{name}()")
    for function, values in watch.steps:
        names[kernel := f"k{len(names)}"] = function
        said = []
        for value in values:
            if isinstance(value, Tensor):
                said.append(_expression(value, bases | scratch, names))
            else:
                names[constant := f"c{len(names)}"] = value
                said.append(constant)
        lines.append(f"    {kernel}({', '.join(said)})")
    source = "\n".join(["def launch(outs, args):", *lines])
    exec(source, names)
    return names["launch"]


def _expression(t: Tensor, bases: dict[str, Tensor], names: dict[str, Any]) -> str:
    """How to get the like of a tensor from the tensors of another call."""
    same = [name for name, base in bases.items() if base is t]
    if same:
        if len(same) > 1:  # another call may pass two tensors here
            raise _Unbound
        return same[0]
    storage = t.untyped_storage()._cdata
    owners = [name for name, base in bases.items() if base.untyped_storage()._cdata == storage]
    if len(owners) != 1:
        raise _Unbound
    base = bases[owners[0]]
    text = owners[0]
    if base.data_ptr() != t.data_ptr():
        raise _Unbound
    if base.dtype != t.dtype:
        names[dtype := f"d{len(names)}"] = t.dtype
        text += f".view({dtype})"
        base = base.view(t.dtype)
    if base.shape != t.shape or base.stride() != t.stride():
        names[shape := f"d{len(names)}"] = tuple(t.shape)
        names[stride := f"d{len(names)}"] = tuple(t.stride())
        text = f"as_strided({text}, {shape}, {stride})"
    return text
