"""DeepSeek's tile-kernels (2.1, or 1.0 in an environment of its own): same names and arguments as ours."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call

NAME = "tile-kernels"
_MODULES = {"transform": ("transform", "transpose")}
"""Modules of a family, in 2.1 and in 1.0, where not of its name."""


def version() -> str:
    """Version of tile-kernels."""
    importlib.import_module("tile_kernels")
    return importlib.metadata.version("tile-kernels")


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """The function of the same name, where it has one."""
    family, _, name = op.partition(".")
    args, kwargs = arguments.args, arguments.kwargs
    for part in _MODULES.get(family, (family,)):
        try:
            module = importlib.import_module(f"tile_kernels.{part}")
        except ModuleNotFoundError:
            continue
        function = getattr(module, name, None)
        if function is not None:
            return lambda: function(*args, **kwargs)
    return None
