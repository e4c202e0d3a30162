"""Backward passes run on the backend of their forward pass.

PyTorch runs the backward pass of a GPU in threads of its own, which do not see the ``use_backend`` of the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from .. import registry

Backward = TypeVar("Backward", bound=Callable[..., Any])


def keep_backend(ctx: Any) -> None:
    """Note the current choice of backends, in the forward pass of an autograd function."""
    if not torch.compiler.is_compiling():
        ctx.selection = registry.selection()


def on_kept_backend(backward: Backward) -> Backward:
    """Run a backward pass under the choice that its forward pass noted."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with registry.selected(ctx.selection):
            return backward(ctx, *grads)

    return cast(Backward, run)
