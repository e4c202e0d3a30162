"""Public functions that skip their own work too: what a call leaves out when it repeats an earlier one.

A public function turns its arguments into those of an operator and the operator's results into its own. Both depend on
the same facts as the operator's plan (``plans``), so ``@repeatable`` keeps, for the facts of a call, a function that
goes from the tensors straight to the planned launch. That halves what the host does besides allocating and launching.
A function that runs no planned operator or more than one, or passes or returns a tensor that is neither an argument nor
a result nor from ``op.new_result``, is called as it is.
"""

from __future__ import annotations

import functools
import inspect
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
"""Held by the thread that learns: what is watched belongs to one call."""


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
    if not _lock.acquire(blocking=False):  # another thread learns, perhaps while it compiles a kernel
        return function(*args, **kwargs)
    try:
        with ops.watched() as watch:
            result = function(*args, **kwargs)
    finally:
        _lock.release()
    if len(tries) >= _MOST_CALLS:
        calls.clear()
        tries.clear()
    call = _repeating(watch, result, inspect.signature(function).bind(*args, **kwargs).arguments, function)
    tries[key] = tries.get(key, 0) + 1
    if call is not None or tries[key] >= _TRIES:
        calls[key] = call or function
    return result


def _repeating(
    watch: ops.Watch, result: Any, given: dict[str, Any], function: Callable[..., Any]
) -> Callable[..., Any] | None:
    """What a function did, for other tensors of the same facts; None if it was more than one planned operator."""
    if len(watch.runs) != 1 or watch.runs[0] is None:
        return None
    run = watch.runs[0]
    operator, plan = run.operator, run.plan
    known: dict[str, Any] = {f"_new{i}": new for i, new in enumerate(plan.results)}
    known |= {f"_fresh{i}": new for i, (_, new) in enumerate(watch.made)}
    known |= {"_function": function, "_operator": operator, "_launch": plan.launch}
    known |= {"_count": registry.count, "_server": plan.server}
    places = _places(given)
    made = [(f"_made{i}", t) for i, (t, _) in enumerate(watch.made)]
    try:
        args = [_expression(value, f"_constant{i}", places + made, known) for i, value in enumerate(run.args)]
        outs = [(f"_out{i}", t) for i, t in enumerate(run.outs)]
        shown = _returned(result, places + made + outs, known)
    except _Different:
        return None
    declared, passed = _declared(inspect.signature(function))
    lines = [f"{name} = _fresh{i}()" for i, (name, _) in enumerate(made)]
    lines.append(f"_args = ({''.join(f'{a}, ' for a in args)})")
    if any(run.args[i] is not None and args[i] not in dict(made) for i in operator.mutated):
        lines += [f"if _operator.may_overlap(_args): return _function({passed})", "_operator.bump_versions(_args)"]
    lines += [f"{name} = _new{i}()" for i, (name, _) in enumerate(outs)]
    if plan.launch is not None:
        lines.append(f"_launch(({''.join(f'{name}, ' for name, _ in outs)}), _args)")
        if plan.server is not None:
            lines.append("_count(_operator, _server)")
    body = "".join(f"    {line}\n" for line in [*lines, f"return {shown}"])
    exec(f"def _call({declared}):\n{body}", known)
    return known["_call"]


def _expression(value: Any, name: str, places: list[tuple[str, Tensor]], known: dict[str, Any]) -> str:
    """How to get an argument of an operator: a tensor from its place, anything else by name."""
    if isinstance(value, Tensor):
        same = [place for place, t in places if t is value]
        if len(same) != 1:  # made by the function, or one of two that another call may pass apart
            raise _Different
        return same[0]
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        raise _Different
    known[name] = value
    return name


def _returned(result: Any, places: list[tuple[str, Tensor]], known: dict[str, Any]) -> str:
    """An expression for a result like this one: tensors, None, and tuples of them."""
    if result is None:
        return "None"
    if isinstance(result, Tensor):
        return _expression(result, "", places, known)
    if not isinstance(result, tuple):
        raise _Different
    parts = "".join(f"{_returned(item, places, known)}, " for item in result)
    if type(result) is tuple:
        return f"({parts})"
    maker = f"_{type(result).__name__}"
    known[maker] = type(result)
    return f"{maker}({parts})"


def _declared(signature: inspect.Signature) -> tuple[str, str]:
    """Parameters as a definition without defaults declares them, and as a call passes them on."""
    names = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    passed = [*names, *(f"{name}={name}" for name in keywords)]
    return ", ".join([*names, "*", *keywords] if keywords else names), ", ".join(passed)


def _places(given: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Expressions for the tensors among arguments."""
    found = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple):
            found += [(f"{name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, Tensor)]
    return found
