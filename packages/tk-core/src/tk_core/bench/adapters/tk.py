"""tk itself: the public function on the backend under test."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout
from ...cases import Call
from ...conformance.engine import public_function

NAME = "tk"


def version() -> str:
    """Version of tk-core."""
    return importlib.metadata.version("tk-core")


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """The public function."""
    function, args, kwargs = public_function(op), arguments.args, arguments.kwargs
    return (lambda: function(*args, **kwargs)) if kwargs else (lambda: function(*args))
