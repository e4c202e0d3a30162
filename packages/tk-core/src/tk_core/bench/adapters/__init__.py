"""Candidates of a benchmark, one file each.

An adapter module has ``NAME``, ``version()`` and ``bind(op, arguments, layout, device)``: a call without arguments
that does what the public function does with these arguments, or None where the library has no such operator (or only
one whose format differs). Importing it must not import the library; ``version()`` does, and its ImportError is shown.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...backend import Layout
from ...cases import Call
from ...conformance.engine import public_function
from ...errors import InvalidArgumentError


class Adapter(Protocol):
    """What an adapter module provides."""

    NAME: str

    def version(self) -> str:
        """Version of the library; raises ImportError where it is not installed."""

    def bind(self, op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
        """The call to time, or None where the library has no such operator."""


def names() -> list[str]:
    """Names of all candidates."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__))


def adapter(name: str) -> Adapter:
    """A candidate by name.

    Raises:
        InvalidArgumentError: no such adapter.
    """
    if name not in names():
        raise InvalidArgumentError(f"no candidate is named {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")  # type: ignore[return-value]


def only(op: str, arguments: Call, allowed: set[str]) -> dict[str, Any] | None:
    """The arguments of a call by name, or None where one outside ``allowed`` differs from its default."""
    signature = inspect.signature(public_function(op))
    bound = signature.bind(*arguments.args, **arguments.kwargs)
    for name, value in bound.arguments.items():
        if name not in allowed and value is not signature.parameters[name].default:
            return None
    return dict(bound.arguments)
