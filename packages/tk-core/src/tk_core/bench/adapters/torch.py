"""PyTorch eager: our reference, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...backend import Layout, locate
from ...cases import Call
from ...conformance.engine import public_function
from ..flat import flat_calls

NAME = "torch"


def version() -> str:
    """Version of torch."""
    return torch.__version__


def reference_call(
    op: str, arguments: Call, layout: Layout, device: torch.device
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The reference behind a public call with its flat arguments; None where the call is made of several operators."""
    calls = flat_calls(public_function(op), arguments, device.type, layout)
    if len(calls) != 1:
        return None
    name, args = calls[0]
    found = locate("tk_core.reference", name, "REFERENCES")
    return None if found is None else (found[1], args)


def bind(op: str, arguments: Call, layout: Layout, device: torch.device) -> Callable[[], Any] | None:
    """The reference."""
    found = reference_call(op, arguments, layout, device)
    if found is None:
        return None
    function, args = found
    return lambda: function(*args)
