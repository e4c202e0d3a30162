"""torch.compile of our reference: what a user gets without a kernel library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call
from .torch import reference_call

NAME = "compile"

_compiled: dict[Any, Callable[..., Any]] = {}


def version() -> str:
    """Version of torch."""
    return torch.__version__


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """The compiled reference."""
    found = reference_call(op, arguments, layout, device)
    if found is None:
        return None
    function, args = found
    compiled = _compiled.setdefault(function, torch.compile(function))
    return lambda: compiled(*args)
