"""Argument checks in one wording: ``OP: NAME must …, got …``. Each raises before anything is allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import InvalidArgumentError, InvalidDtypeError

VALIDATE = os.environ.get("TK_VALIDATE") == "1"
"""Whether checks look at the values of tensors on accelerators, which synchronizes."""

# A private PyTorch guard; where a torch version lacks it, no transform is seen.
_functorch_level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None)

_COMPARABLE = (str, int, torch.dtype, type(None))


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
    if not isinstance(value, _COMPARABLE) or value not in allowed:
        invalid(op, name, "be " + " or ".join(repr(a) for a in allowed), repr(value))


def is_int(op: str, name: str, value: Any) -> None:
    """Require an int, which a bool is not."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidDtypeError(f"{op}: {name} must be an int, got {type(value).__name__}")


def at_least(op: str, name: str, value: int, low: int) -> None:
    """Require an int of at least ``low``."""
    is_int(op, name, value)
    if value < low:
        invalid(op, name, f"be at least {low}", value)


def at_most(op: str, name: str, value: int, high: int) -> None:
    """Require an int of at most ``high``."""
    if value > high:
        invalid(op, name, f"be at most {high}", value)


def is_bool(op: str, name: str, value: Any) -> None:
    """Require a bool."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise InvalidDtypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def is_float(op: str, name: str, value: Any) -> None:
    """Require a float or an int, which a bool is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise InvalidDtypeError(f"{op}: {name} must be a float, got {type(value).__name__}")


def requires(op: str, name: str, value: bool, other: str, other_value: bool) -> None:
    """Require that one flag comes only together with another."""
    if value and not other_value:
        invalid(op, name, f"be used only together with {other}=True", f"{other}=False")


def excludes(op: str, name: str, value: bool, other: str, other_value: bool) -> None:
    """Require that two flags are not both set."""
    if value and other_value:
        invalid(op, name, f"not be combined with {other}", "both")


def same_length(op: str, name: str, value: Sequence[Any], other: str, other_value: Sequence[Any]) -> None:
    """Require as many elements as another list has."""
    if len(value) != len(other_value):
        invalid(op, name, f"have {len(other_value)} elements, as {other} has", len(value))


def finite_at_least(op: str, name: str, value: float, low: float) -> None:
    """Require a finite number of at least ``low``."""
    is_float(op, name, value)
    if not low <= value < math.inf:
        invalid(op, name, f"be finite and at least {low}", value)


def is_concrete(t: Tensor) -> bool:
    """Whether a tensor has an address to look at: not while compiling or under vmap, not fake, not on meta."""
    if torch.compiler.is_compiling() or _functorch_level() is not None or type(t) not in (Tensor, torch.nn.Parameter):
        return False
    return t.device.type != "meta" and t.layout == torch.strided and not t.is_nested


def validates(t: Tensor) -> bool:
    """Whether to look at the values of an argument: on a CPU, elsewhere only with ``TK_VALIDATE=1``.

    On an accelerator it is a synchronization.
    """
    return is_concrete(t) and (t.device.type == "cpu" or VALIDATE)


def disjoint(op: str, name: str, t: Tensor, other_name: str, other: Tensor) -> None:
    """Require that two tensors share no element."""
    if is_concrete(t) and is_concrete(other) and _overlap(t, other):
        invalid(op, name, f"not overlap {other_name}", "memory in common")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors may share memory: false only where it is certain that they do not."""
    if not a.numel() or not b.numel():
        return False
    starts = [a.data_ptr(), b.data_ptr()]
    dims = [
        sorted(((d * t.element_size(), s) for s, d in zip(t.shape, t.stride()) if s > 1 and d), reverse=True)
        for t in (a, b)
    ]
    return _ranges_meet(starts, dims, (a.element_size(), b.element_size()))


def _ranges_meet(starts: list[int], dims: list[list[tuple[int, int]]], sizes: tuple[int, int]) -> bool:
    """Compare address ranges; where the outermost strides agree, compare again within one period of that stride."""
    ends = [x + sum(d * (s - 1) for d, s in dim) + size for x, dim, size in zip(starts, dims, sizes)]
    if ends[0] <= starts[1] or ends[1] <= starts[0]:
        return False
    if not dims[0] or not dims[1] or dims[0][0][0] != dims[1][0][0]:
        return True
    period = dims[0][0][0]
    inner = [dim[1:] for dim in dims]
    shift = (starts[1] - starts[0]) % period
    # The second range may lie after the first within a period, or before it as its next repetition.
    return _ranges_meet([0, shift], inner, sizes) or _ranges_meet([period, shift], inner, sizes)


def distinct_elements(op: str, name: str, t: Tensor) -> None:
    """Require that no two indices of a tensor that is written share an element. A traced call checks when it runs."""
    if torch.compiler.is_compiling():
        return
    reach = 1
    for stride, size in sorted((d, s) for s, d in zip(t.shape, t.stride()) if s > 1):
        if stride < reach:
            invalid(op, name, "have no overlapping rows", f"shape {_shape(t)} with strides {tuple(t.stride())}")
        reach += stride * (size - 1)


def values_within(op: str, name: str, index: Tensor, low: int, high: int) -> None:
    """With ``TK_VALIDATE=1``, require ``low <= value < high`` of all elements. Reads them back, so not by default."""
    if not VALIDATE or not is_concrete(index) or not index.numel():
        return
    smallest, largest = int(index.min()), int(index.max())
    if smallest < low or largest >= high:
        invalid(op, name, f"lie in [{low}, {high})", f"values from {smallest} to {largest}")
