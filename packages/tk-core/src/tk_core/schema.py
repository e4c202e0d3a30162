"""What an operator's schema says of its arguments, and the check that a call keeps to it.

PyTorch checks the same when a call goes through ``torch.ops``; eager calls do not, and its errors are not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import checks
from .errors import InvalidDtypeError

_INT64 = 1 << 63


class Parameter(NamedTuple):
    """One argument of a schema.

    Attributes:
        name: as the schema names it.
        kind: a key of ``_CHECKS``.
        optional: whether None is allowed.
        written: whether the operator writes it.
    """

    name: str
    kind: str
    optional: bool
    written: bool


def parameters_of(arguments: Sequence[Any]) -> tuple[Parameter, ...]:
    """The parameters of a parsed schema."""
    return tuple(_parameter(a) for a in arguments)


def _parameter(argument: Any) -> Parameter:
    kind = str(argument.real_type)
    optional = kind.startswith("Optional[")
    if optional:
        kind = kind[len("Optional[") : -1]
    return Parameter(argument.name, kind, optional, argument.alias_info is not None)


def check(op: str, parameters: tuple[Parameter, ...], args: tuple[Any, ...]) -> None:
    """Require arguments of the types that a schema states.

    Raises:
        InvalidDtypeError: an argument has another type.
        InvalidArgumentError: an integer does not fit in 64 bits; a tensor is sparse, nested or a lazy negation.
    """
    for parameter, value in zip(parameters, args, strict=True):
        if value is not None or not parameter.optional:
            _CHECKS[parameter.kind](op, parameter.name, value)


def check_tensor(op: str, name: str, value: Any) -> None:
    """Require a tensor whose memory holds its values."""
    checks.is_tensor(op, name, value)
    if value.layout != torch.strided or value.is_nested:
        checks.invalid(op, name, "be a dense tensor", "a nested one" if value.is_nested else f"layout {value.layout}")
    if torch.compiler.is_compiling():  # which resolves lazy views
        return
    if value.is_neg() or value.is_conj():
        view = "negated" if value.is_neg() else "conjugated"
        checks.invalid(op, name, "hold its values (see Tensor.resolve_neg and resolve_conj)", f"a lazily {view} view")


def _int(op: str, name: str, value: Any) -> None:
    checks.is_int(op, name, value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        checks.invalid(op, name, "fit in 64 bits", value)


def _float(op: str, name: str, value: Any) -> None:
    checks.is_float(op, name, value)
    if isinstance(value, int):
        _int(op, name, value)


def _instance(word: str, *types: type) -> Callable[[str, str, Any], None]:
    def check(op: str, name: str, value: Any) -> None:
        if not isinstance(value, types):
            raise InvalidDtypeError(f"{op}: {name} must be {word}, got {type(value).__name__}")

    return check


def _each(check: Callable[[str, str, Any], None]) -> Callable[[str, str, Any], None]:
    sequence = _instance("a list", list, tuple)

    def check_all(op: str, name: str, value: Any) -> None:
        sequence(op, name, value)
        for i, item in enumerate(value):
            check(op, f"{name}[{i}]", item)

    return check_all


_CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    "Tensor": check_tensor,
    "List[Tensor]": _each(check_tensor),
    "int": _int,
    "SymInt": _int,
    "List[int]": _each(_int),
    "List[SymInt]": _each(_int),
    "float": _float,
    "bool": checks.is_bool,
    "List[bool]": _each(checks.is_bool),
    "str": _instance("a str", str),
    "ScalarType": _instance("a torch.dtype", torch.dtype),
}
