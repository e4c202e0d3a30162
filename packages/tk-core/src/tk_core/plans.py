"""Plans: what an eager call leaves out when it repeats an earlier one in everything but addresses and values.

Its signature, see :func:`signature_of`, decides what the checks say, what the results look like and which kernel runs,
so a plan keeps the outcome of all three: 20 us of host time become 2. Where checks look at values nothing is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import registry, schema

Signature = Callable[..., "tuple[Any, ...] | None"]

ALIGNMENT = 16
"""Bytes. A signature holds addresses modulo this, since the accesses of a kernel may depend on them."""

SEEN: Any = None
"""Stands for the plan of a signature that was met once: only the second call pays for making a plan."""


class Plan(NamedTuple):
    """What a call of a known signature does.

    Attributes:
        results: allocate the results, one function each.
        launch: fills them; None where there is nothing to do.
        server: the backend to count the call for, where ``launch`` does not count it itself.
        in_place: whether arguments are written in place; that they overlap others shows in no signature.
    """

    results: tuple[Callable[[], Tensor], ...]
    launch: registry.Launch | None
    server: str | None
    in_place: bool


_EXACT_TYPE = {
    "int": "type({0}) is int",
    "SymInt": "type({0}) is int",
    "float": "(type({0}) is float or type({0}) is int)",
    "bool": "({0} is True or {0} is False)",
    "str": "type({0}) is str",
    "ScalarType": "type({0}) is dtype",
    "Tensor": "(type({0}) is Tensor or type({0}) is Parameter) and not {0}.is_neg()",
}
"""What has to hold of an argument for equal keys to mean equal arguments: 1 equals 1.0 and True, and a lazily negated
view has all facts of what it views. A conjugated one is complex, which only transposes take, and they look first."""


_FACTS = f"({{0}}.shape, {{0}}.stride(), {{0}}.dtype, {{0}}.device, {{0}}.data_ptr() % {ALIGNMENT})"


def signature_of(parameters: tuple[schema.Parameter, ...]) -> Signature:
    """A function of an operator's arguments: all that its checks, results and kernels may depend on, as a key.

    Args:
        parameters: of the operator.

    Returns:
        The function; its result is None where an argument is not a plain tensor, or not exactly of the type that the
        schema states. It is generated for each operator, since a loop over the arguments would cost more than a plan
        saves.
    """
    names = [f"a{i}" for i in range(len(parameters))]
    exact = ["True"]
    parts = ["selected()"]
    for a, parameter in zip(names, parameters):
        kind = parameter.kind
        if kind == "List[Tensor]":
            item = _EXACT_TYPE["Tensor"].format("t")
            condition = f"type({{0}}) is list and False not in [{item} for t in {{0}}]"
        else:
            condition = "type({0}) is list" if kind.startswith("List[") else _EXACT_TYPE[kind]
        exact.append((f"({a} is None or {condition})" if parameter.optional else condition).format(a))
        if kind == "Tensor":
            facts = _FACTS.format(a)
            parts.append(f"None if {a} is None else {facts}" if parameter.optional else facts)
        elif kind == "List[Tensor]":
            parts.append(f"tuple([{_FACTS.format('t')} for t in {a}])")
        elif kind == "float":
            parts.append(f"{a} or repr({a})")  # 0.0 equals -0.0
        else:
            parts.append(f"tuple({a})" if kind.startswith("List[") else a)
    source = f"lambda {', '.join(names)}: ({', '.join(parts)}) if {' and '.join(exact)} else None"
    known = {"Tensor": Tensor, "Parameter": Parameter, "dtype": torch.dtype, "selected": registry.selection}
    return eval(source, known)
