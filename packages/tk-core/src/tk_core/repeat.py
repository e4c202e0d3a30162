"""Public functions that skip their own work too: what a call leaves out when it repeats an earlier one.

A public function turns its arguments into those of an operator and the operator's results into its own. Both depend on
the same facts as the operator's plan (``plans``), so ``@repeatable`` keeps, for the facts of a call, a function that
goes from the tensors straight to the planned launch. That halves what the host does besides allocating and launching.
A function that does anything else, runs no planned operator or more than one, or returns something else than its
results, is called as it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from . import op as ops
from . import plans, registry

F = TypeVar("F", bound=Callable[..., Any])

_TRIES = 4
"""Calls that may fail to be kept before a function is called as it is: an operator plans the second call only."""
_MOST_CALLS = 4096

_tables: list[_Table] = []
_lock = threading.Lock()


class _Different(Exception):
    """An argument of which not all facts are known."""


class _Table:
    """What is kept of one function."""

    def __init__(self) -> None:
        self.calls: dict[Any, Callable[..., Any]] = {}
        self.tries: dict[Any, int] = {}

    def forget(self) -> None:
        """A call that is being kept meanwhile goes into the table that is left behind."""
        self.calls, self.tries = {}, {}


def forget() -> None:
    """Forget what is kept of every function, after a change of a setting that functions or backends read."""
    for table in _tables:
        table.forget()


def _facts(value: Any) -> Any:
    """What checks, results and kernels may depend on, of a tensor, a pair of tensors, or None."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        if value.is_neg() or value.is_conj() or (value.is_cpu and not ops._plan_on_cpu):
            raise _Different
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.data_ptr() % plans.ALIGNMENT,
            value.requires_grad,
        )
    if value is None:
        return None
    if isinstance(value, tuple):
        return (kind, *map(_facts, value))
    raise _Different


def _exact(value: Any) -> Any:
    """A tuple of numbers, with their types: 1 equals 1.0 and True."""
    return (*value, *map(type, value)) if type(value) is tuple else value


def repeatable(function: F) -> F:
    """Let a public function skip its own work in calls that repeat an earlier one in everything but values.

    Its results may depend on nothing but its arguments, the selected backend, and settings whose change calls
    ``op.forget_plans``. Annotations say which arguments hold tensors.
    """
    parameters = list(inspect.signature(function).parameters.values())
    known: dict[str, Any] = {  # underscores: parameters may have any other name
        "_in_full": function,
        "_compiling": torch.compiler.is_compiling,
        "_ready": ops.takes_short_cut,
        "_selected": registry.selection,
        "_records": torch.is_grad_enabled,
        "_facts": _facts,
        "_exact": _exact,
        "_Different": _Different,
        "_table": _Table(),
        "_learn": _learn,
    }
    declared, passed, parts = [], [], []
    keyword_only = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            declared.append("*")
        if p.default is not p.empty:
            known[f"_default_{p.name}"] = p.default
        declared.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
        passed.append(f"{p.name}={p.name}" if keyword_only else p.name)
        if "Tensor" in str(p.annotation):
            parts.append(f"_facts({p.name})")
        elif "tuple" in str(p.annotation):
            parts.append(f"_exact({p.name})")
        elif "float" in str(p.annotation):
            parts.append(f"{p.name} or repr({p.name}), {p.name}.__class__")  # 0.0 equals -0.0
        else:
            parts.append(f"{p.name}, {p.name}.__class__")
    arguments = ", ".join(passed)
    source = f"""
def {function.__name__}({", ".join(declared)}):
    if not _compiling() and _ready():
        try:
            _key = (_selected(), _records(), {", ".join(parts)})
            _call = _table.calls.get(_key)
        except (_Different, TypeError, RuntimeError):  # the function says what is wrong
            return _in_full({arguments})
        if _call is not None:
            return _call({arguments})
        return _learn(_table, _key, _in_full, {arguments})
    return _in_full({arguments})
"""
    exec(source, known)
    _tables.append(known["_table"])
    return functools.update_wrapper(known[function.__name__], function)  # type: ignore[return-value]


def _learn(table: _Table, key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls, tries = table.calls, table.tries
    with _lock, ops.watched() as runs:  # one at a time: what is watched belongs to no other thread's call
        result = function(*args, **kwargs)
    if len(calls) >= _MOST_CALLS:
        calls.clear()
        tries.clear()
    call = _repeating(runs, result, inspect.signature(function).bind(*args, **kwargs).arguments, function)
    tries[key] = tries.get(key, 0) + 1
    if call is not None or tries[key] >= _TRIES:
        calls[key] = call or function
    return result


def _repeating(
    runs: list[ops.Run | None], result: Any, given: dict[str, Any], function: Callable[..., Any]
) -> Callable[..., Any] | None:
    """What a function did, for other tensors of the same facts; None if it was more than one planned operator."""
    if len(runs) != 1 or runs[0] is None:
        return None
    run = runs[0]
    places = _places(given)
    known: dict[str, Any] = {"_operator": run.operator, "_plan": run.plan, "_run": run.operator._run_planned}
    said = []
    for i, value in enumerate(run.args):
        if isinstance(value, Tensor):
            same = [place for place, t in places if t is value]
            if len(same) != 1:  # made by the function, or one of two that another call may pass apart
                return None
            said.append(same[0])
        elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            return None
        else:
            known[f"_c{i}"] = value
            said.append(f"_c{i}")
    shaped = _shaped(result, run.outs, known)
    if shaped is None:
        return None
    declared = [
        f"*, {p.name}" if p.kind is p.KEYWORD_ONLY and first else p.name
        for p, first in _with_first_keyword(inspect.signature(function))
    ]
    source = f"def _call({', '.join(declared)}):\n"
    args = f"({''.join(f'{s}, ' for s in said)})"
    if run.plan.in_place or run.plan.launch is None:
        source += f"    _outs = _run(_plan, {args})\n"
    else:  # the same, without a loop
        known |= {f"_new{i}": new for i, new in enumerate(run.plan.results)}
        known |= {"_launch": run.plan.launch, "_count": registry.count, "_server": run.plan.server}
        news = "".join(f"_new{i}(), " for i in range(len(run.plan.results)))
        source += f"    _outs = ({news})\n    _launch(_outs, {args})\n"
        if run.plan.server is not None:
            source += "    _count(_operator, _server)\n"
    exec(f"{source}    return {shaped}", known)
    return known["_call"]


def _with_first_keyword(signature: inspect.Signature) -> list[tuple[inspect.Parameter, bool]]:
    """Parameters, each with whether it is the first that has to be named."""
    parameters = list(signature.parameters.values())
    before = itertools.chain([None], parameters)
    return [(p, b is None or b.kind is not p.KEYWORD_ONLY) for p, b in zip(parameters, before)]


def _places(given: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Expressions for the tensors among arguments."""
    found = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple):
            found += [(f"{name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, Tensor)]
    return found


def _shaped(result: Any, outs: tuple[Tensor, ...], known: dict[str, Any]) -> str | None:
    """An expression that makes a result like this one of an operator's results."""
    if result is None:
        return None if outs else "None"
    if len(outs) == 1 and result is outs[0]:
        return "_outs[0]"
    if not isinstance(result, tuple) or len(result) != len(outs) or any(r is not o for r, o in zip(result, outs)):
        return None
    if type(result) is tuple:
        return "_outs"
    known["_made"] = type(result)._make  # type: ignore[attr-defined]
    return "_made(_outs)"
