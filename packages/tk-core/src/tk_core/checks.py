"""Argument checks in one wording: ``OP: NAME must …, got …``. Each raises before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import InvalidArgumentError, InvalidDtypeError


def invalid(op: str, name: str, must: str, got: Any) -> NoReturn:
    """Raise InvalidArgumentError for one argument."""
    raise InvalidArgumentError(f"{op}: {name} must {must}, got {got}")


def _shape(t: Tensor) -> str:
    return f"({', '.join(str(s) for s in t.shape)}{',' if t.dim() == 1 else ''})"


def is_tensor(op: str, name: str, t: Any) -> None:
    """Require a tensor."""
    if not isinstance(t, Tensor):
        raise InvalidDtypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")


def rank(op: str, name: str, t: Tensor, letters: str) -> None:
    """Require the rank of a shape written in letters, such as ``"(M, K)"``."""
    if t.dim() != letters.count(",") + (0 if letters.endswith(",)") else 1):
        invalid(op, name, f"have shape {letters}", _shape(t))


def shape(op: str, name: str, t: Tensor, expected: Sequence[int], letters: str = "") -> None:
    """Require exact sizes."""
    if t.dim() != len(expected) or any(a != b for a, b in zip(t.shape, expected)):
        sizes = ", ".join(str(s) for s in expected) + ("," if len(expected) == 1 else "")
        invalid(op, name, f"have shape ({sizes})" + (f" = {letters}" if letters else ""), _shape(t))


def dtype(op: str, name: str, t: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Require one of some dtypes."""
    if t.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise InvalidDtypeError(f"{op}: {name} must be {names}, got {str(t.dtype).removeprefix('torch.')}")


def same_device(op: str, name: str, t: Tensor, device: torch.device, other: str = "x") -> None:
    """Require the device of another argument."""
    if t.device != device:
        invalid(op, name, f"be on the device of {other} ({device})", t.device)


def last_stride_1(op: str, name: str, t: Tensor) -> None:
    """Require unit stride along the last dimension (any stride where it has at most one element)."""
    if t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel() > 0:
        invalid(op, name, "have unit stride along its last dimension", f"strides {tuple(t.stride())}")


def contiguous(op: str, name: str, t: Tensor) -> None:
    """Require a contiguous tensor."""
    if not t.is_contiguous():
        invalid(op, name, "be contiguous", f"shape {_shape(t)} with strides {tuple(t.stride())}")


def one_of(op: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Require one of some values."""
    if value not in allowed:
        invalid(op, name, "be " + " or ".join(repr(a) for a in allowed), repr(value))


def at_least(op: str, name: str, value: int, low: int) -> None:
    """Require an int of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidDtypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < low:
        invalid(op, name, f"be at least {low}", value)


def requires(op: str, name: str, value: bool, other: str, other_value: bool) -> None:
    """Require that one flag comes only together with another."""
    if value and not other_value:
        invalid(op, name, f"be used only together with {other}=True", f"{other}=False")


def excludes(op: str, name: str, value: bool, other: str, other_value: bool) -> None:
    """Require that two flags are not both set."""
    if value and other_value:
        invalid(op, name, f"not be combined with {other}", "both")
