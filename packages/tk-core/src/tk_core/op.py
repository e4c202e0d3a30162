"""Operators: one definition that serves eager calls, torch.compile, torch.export and every backend.

An interface file defines the public function, ``check`` and ``outputs``, and binds them once::

    OP = Operator("quant.per_token_cast", "(Tensor x, …) -> (Tensor, Tensor)", check=_check, outputs=_outputs)

``OP(*args)`` registers nothing and decides nothing about devices: it runs :meth:`Operator.run` directly for plain
eager tensors, and through ``torch.ops.tk_quant.per_token_cast`` (the same body) whenever PyTorch has to see the call.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import checks, plans, registry, schema
from .errors import DefinitionError, InvalidArgumentError, InvalidDtypeError
from .formats import TensorSpec

Outs = tuple[Tensor, ...]
Check = Callable[..., None]
Outputs = Callable[..., tuple[TensorSpec, ...]]

OPERATORS: dict[str, Operator] = {}
"""Every operator by name, in the order of definition."""

_libraries: dict[str, torch.library.Library] = {}

# Private PyTorch guards; where a torch version lacks one, calls take the op path.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_function_mode = getattr(torch._C, "_len_torch_function_stack", None)
_functorch_level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)
_short_cut = (
    os.environ.get("TK_FAST_PATH", "1") != "0"
    and _dispatch_modes is not None
    and _function_mode is not None
    and _functorch_level is not None
)
_allocate: Callable[[TensorSpec, Tensor], Tensor] | None = None
"""What allocates results instead of ``TensorSpec.empty``, if anything."""

# Calls are planned where checks look at no values: not on a CPU, and not with TK_VALIDATE=1.
_plan_on_cpu = False
_MOST_PLANS = 4096


class Run(NamedTuple):
    """A planned run of an operator: what it was given, and what came out."""

    operator: Operator
    plan: plans.Plan
    args: tuple[Any, ...]
    outs: Outs


class Watch(NamedTuple):
    """What happens in a thread: runs of operators, None for one without a plan; tensors that ``new_result`` made, each
    with what makes another."""

    thread: int
    runs: list[Run | None]
    made: list[tuple[Tensor, Callable[[], Tensor]]]


_watch: Watch | None = None


def takes_short_cut() -> bool:
    """Whether a call of plain tensors concerns nobody but the operator: no mode, no transform, no test."""
    return (
        _short_cut
        and _allocate is None
        and _watch is None
        and not _dispatch_modes()  # type: ignore[misc]
        and not _function_mode()  # type: ignore[misc]
        and _functorch_level() is None  # type: ignore[misc]
    )


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Note what happens in this thread, for a scope. One thread can do so at a time."""
    global _watch
    _watch = watch = Watch(threading.get_ident(), [], [])
    try:
        yield watch
    finally:
        _watch = None


def _watched_here() -> Watch | None:
    watch = _watch
    return watch if watch is not None and watch.thread == threading.get_ident() else None


@contextlib.contextmanager
def short_cut(enabled: bool) -> Iterator[None]:
    """Turn the eager short cut off or on for a scope, for tests that compare both call paths."""
    global _short_cut
    before, _short_cut = _short_cut, enabled
    try:
        yield
    finally:
        _short_cut = before


@contextlib.contextmanager
def allocator(allocate: Callable[[TensorSpec, Tensor], Tensor]) -> Iterator[None]:
    """Allocate results with ``allocate(spec, like)`` for a scope, for tests that poison and guard them."""
    global _allocate
    before, _allocate = _allocate, allocate
    try:
        yield
    finally:
        _allocate = before


def new_result(spec: TensorSpec, like: Tensor) -> Tensor:
    """Allocate a result that an operator writes as an optional argument, where results of operators are allocated."""
    if _allocate is not None:
        return _allocate(spec, like)
    result = spec.empty(like)
    watch = _watched_here()
    if watch is not None:
        watch.made.append((result, spec.maker(like)))
    return result


def forget_plans() -> None:
    """Plan every call anew, after a change of a setting that backends read when they launch."""
    from . import repeat

    for operator in OPERATORS.values():
        operator.forget_plans()
    repeat.forget()


def _library(family: str) -> torch.library.Library:
    if family not in _libraries:
        _libraries[family] = torch.library.Library(f"tk_{family}", "DEF")
    return _libraries[family]


class Operator:
    """One operator: its schema, its checks, what its results look like, and the ways to call it.

    Args:
        name: ``family.name``; also the public function, the file, the schema ``tk_family::name`` and the page.
        declaration: the rest of a torch.library schema, such as ``"(Tensor x, int n) -> Tensor"``. Arguments that are
            written carry ``(a!)``; results are new tensors.
        check: raises for arguments outside the domain. Same parameters as the schema.
        outputs: the specs of the results. Same parameters as the schema. It is also the fake.
        revision: raised when semantics, schema or layout change; kernels state the revision that they implement.
        gradient: name of the differentiable function, for operators that must not swallow gradients.
        empty: fills results when the input is empty but a result is not; returns whether it did.
    """

    def __init__(
        self,
        name: str,
        declaration: str,
        *,
        check: Check,
        outputs: Outputs | None = None,
        revision: int = 1,
        gradient: str | None = None,
        empty: Callable[..., bool] | None = None,
    ) -> None:
        self.name = name
        self.family, _, self.short_name = name.partition(".")
        self.check = check
        self.outputs: Outputs = outputs if outputs is not None else _no_outputs
        self.revision = revision
        self.gradient = gradient
        self.empty = empty
        parsed = torch._C.parse_schema(f"tk_{self.family}::{self.short_name}{declaration}")
        self._schema = schema.parameters_of(parsed.arguments)
        self.parameters = tuple(p.name for p in self._schema)
        self._tensors = tuple(i for i, p in enumerate(self._schema) if "Tensor" in p.kind)
        self.mutated = tuple(i for i, p in enumerate(self._schema) if p.written)
        self._without_gradient = self.mutated if gradient is None else self._tensors
        self._single = len(parsed.returns) == 1 and str(parsed.returns[0].type) == "Tensor"
        self._list = len(parsed.returns) == 1 and not self._single
        self._check_signatures()
        self._signature = plans.signature_of(self._schema)
        self._plans: dict[tuple[Any, ...], plans.Plan | None] = {}
        self._register(declaration)
        if name in OPERATORS:
            raise DefinitionError(f"operator {name} is defined twice")
        OPERATORS[name] = self

    def __repr__(self) -> str:
        return f"Operator({self.name!r})"

    def _check_signatures(self) -> None:
        functions = [self.check] if self.outputs is _no_outputs else [self.check, self.outputs]
        for function in functions:
            got = tuple(inspect.signature(function).parameters)
            if got != self.parameters:
                raise DefinitionError(
                    f"{self.name}: {function.__name__} has parameters {got}, the schema {self.parameters}"
                )

    def _register(self, declaration: str) -> None:
        library = _library(self.family)
        arguments, _, returns = declaration.rpartition("->")
        overloads = {self.short_name: declaration}
        bodies: dict[str, Callable[..., Any]] = {self.short_name: self._op_body}
        fakes: dict[str, Callable[..., Any]] = {self.short_name: self._fake}
        count = 0 if self._list else returns.count("Tensor")
        if count:
            letters = "bcdefghijklmnop"
            outs = ", ".join(f"Tensor({letters[i]}!) out_{i}" for i in range(count))
            overloads[f"{self.short_name}.out"] = f"{arguments.strip()[:-1]}, *, {outs}) -> ()"
            bodies[f"{self.short_name}.out"] = self._out_body
            fakes[f"{self.short_name}.out"] = self._out_fake
        functional = bool(count and self.mutated) and all(self._schema[i].optional for i in self.mutated)
        if functional:  # Inductor cannot compile an operator that writes arguments when all of those are None
            overloads[f"{self.short_name}.functional"] = re.sub(r"Tensor\(\w!\)", "Tensor", declaration)
            bodies[f"{self.short_name}.functional"] = self._op_body
            fakes[f"{self.short_name}.functional"] = self._fake
        for qualified, text in overloads.items():
            library.define(f"{qualified}{text}")
            library.impl(qualified, bodies[qualified], "CompositeExplicitAutograd")
            library.impl(qualified, torch.library.fallthrough_kernel, "Autograd")
            torch.library.register_fake(f"tk_{self.family}::{qualified}", fakes[qualified], lib=library)
        packet = getattr(getattr(torch.ops, f"tk_{self.family}"), self.short_name)
        self.overload = packet.default
        self.out_overload = packet.out if count else None
        self._functional_overload = packet.functional if functional else None

    # ------------------------------------------------------------------ the ways in

    def __call__(self, *args: Any) -> Any:
        """Run on plain eager tensors directly, else through torch.ops. Returns new tensors (or None)."""
        compiling = torch.compiler.is_compiling()
        watched = self._without_gradient if not compiling else self.gradient
        if watched and torch.is_grad_enabled():
            self._refuse_gradient(args)
        if compiling:
            return self._overload_for(args)(*args)
        if (
            _short_cut
            and not _dispatch_modes()  # type: ignore[misc]
            and not _function_mode()  # type: ignore[misc]
            and _functorch_level() is None  # type: ignore[misc]
        ):
            try:
                signature = self._signature(*args)
            except RuntimeError:  # a tensor without strides or memory: the check says which
                signature = None
            if signature is not None:
                plan = self._plans.get(signature)
                if plan is None or _allocate is not None:
                    return self._result(self._run_unplanned(signature, args))
                outs = self._run_planned(plan, args)
                watch = _watched_here()
                if watch is not None:
                    watch.runs.append(Run(self, plan, args, outs))
                return self._result(outs)
            if self._plain(args):
                return self._result(self.run(args))
        schema.check(self.name, self._schema, args)
        return self._overload_for(args)(*args)

    def _overload_for(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        functional = self._functional_overload
        return self.overload if functional is None or any(args[i] is not None for i in self.mutated) else functional

    def _run_planned(self, plan: plans.Plan, args: tuple[Any, ...]) -> Outs:
        """``run`` for a signature that was met before."""
        if plan.in_place and self.may_overlap(args):
            self.check(*args)
        if plan.in_place:
            self.bump_versions(args)
        outs = tuple([new() for new in plan.results])
        if plan.launch is not None:
            plan.launch(outs, args)
            if plan.server is not None:
                registry.count(self, plan.server)
        return outs

    def may_overlap(self, args: tuple[Any, ...]) -> bool:
        """Whether two tensors among the arguments share a storage."""
        storages = [t.untyped_storage()._cdata for i in self._tensors for t in _as_list(args[i])]
        return len(set(storages)) < len(storages)

    def _run_unplanned(self, signature: tuple[Any, ...], args: tuple[Any, ...]) -> Outs:
        """``run``, which plans the calls that follow when the signature comes a second time."""
        like = next(iter(_as_list(args[self._tensors[0]])), None)
        if (
            _allocate is not None
            or not isinstance(like, Tensor)
            or like.is_meta
            or checks.VALIDATE
            or (like.is_cpu and not _plan_on_cpu)
        ):
            return self.run(args)
        known = self._plans  # a setting that changes meanwhile leaves this table behind, with the plan made here
        if signature not in known:
            outs = self.run(args)
            if len(known) >= _MOST_PLANS:
                known.clear()
            known[signature] = plans.SEEN
            return outs
        bound: tuple[registry.Launch | None, str | None] = (None, None)

        def bind(outs: Outs, args: tuple[Any, ...]) -> None:
            nonlocal bound
            bound = registry.service(self, like.device.type).bind(outs, args)

        outs = self.run(args, launch=bind)
        if bound[0] is not None or self.empty is None:
            results = tuple(spec.maker(like) for spec in self.outputs(*args))
            in_place = any(args[i] is not None for i in self.mutated)
            known[signature] = plans.Plan(results, *bound, in_place)
        return outs

    def forget_plans(self) -> None:
        """Plan every call anew."""
        self._plans = {}

    def into(self, outs: Sequence[Tensor | None], *args: Any) -> Outs:
        """Run into the caller's buffers; None stands for a new one.

        Raises:
            InvalidArgumentError, InvalidDtypeError: a buffer does not match the result.
        """
        if torch.is_grad_enabled():
            self._refuse_gradient(args)
        like = self._like(args)
        specs = self._checked_specs(args)
        if not isinstance(outs, (tuple, list)) or len(outs) != len(specs):
            got = f"{len(outs)} elements" if isinstance(outs, (tuple, list)) else type(outs).__name__
            checks.invalid(self.name, "out", f"be a tuple of {len(specs)} elements, each a tensor or None", got)
        full = tuple(new_result(spec, like) if out is None else out for out, spec in zip(outs, specs))
        if not torch.compiler.is_compiling() and self._plain((*args, *full), every=True):
            self.run(args, full)
        elif self.out_overload is not None:
            self.out_overload(*args, **{f"out_{i}": out for i, out in enumerate(full)})
        else:  # a list of results has no out= form in torch.ops
            self._check_outs(full, specs, args)
            for out, result in zip(full, self.overload(*args)):
                out.copy_(result)
        return full

    def _plain(self, args: tuple[Any, ...], every: bool = False) -> bool:
        """Whether nothing of PyTorch has to see this call: no mode, no transform, no tensor subclass."""
        if not _short_cut or _dispatch_modes() or _function_mode() or _functorch_level() is not None:  # type: ignore[misc]
            return False
        values = args if every else [args[i] for i in self._tensors]
        for value in values:
            for t in value if isinstance(value, (list, tuple)) else (value,):
                kind = type(t)
                if kind is not Tensor and kind is not Parameter and isinstance(t, Tensor):
                    return False
        return True

    def _refuse_gradient(self, args: tuple[Any, ...]) -> None:
        for i in self._without_gradient:
            if isinstance(args[i], Tensor) and args[i].requires_grad:
                use = "" if self.gradient is None else f"use {self.gradient}, or "
                raise InvalidArgumentError(
                    f"{self.name}: {self.parameters[i]} requires grad, but this operator records no gradient; "
                    f"{use}call it under torch.no_grad()"
                )

    def _op_body(self, *args: Any, **kwargs: Any) -> Any:
        return self._result(self.run(self._positional(args, kwargs)))

    def _out_body(self, *args: Any, **kwargs: Any) -> None:
        outs = tuple(kwargs.pop(f"out_{i}") for i in range(len(kwargs)) if f"out_{i}" in kwargs)
        self.run(self._positional(args, kwargs), outs)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        args = self._positional(args, kwargs)
        specs = self._checked_specs(args)
        like = self._like(args)
        return self._result(tuple(spec.empty(like) for spec in specs))

    def _out_fake(self, *args: Any, **kwargs: Any) -> None:
        outs = tuple(kwargs.pop(f"out_{i}") for i in range(len(kwargs)) if f"out_{i}" in kwargs)
        args = self._positional(args, kwargs)
        self._check_outs(outs, self._checked_specs(args), args)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return (*args, *(kwargs[name] for name in self.parameters[len(args) :])) if kwargs else args

    # ------------------------------------------------------------------ the body

    def run(self, args: tuple[Any, ...], outs: Outs | None = None, launch: registry.Launch | None = None) -> Outs:
        """Check, allocate (or check ``outs``), launch on the backend that serves the device. Both paths end here."""
        watch = _watched_here()
        if watch is not None:
            watch.runs.append(None)
        like = self._like(args)
        if launch is None:
            meta = like.is_meta and not registry.selects_meta()
            launch = _no_launch if meta else registry.service(self, like.device.type).launch
        specs = self._checked_specs(args)
        if outs is not None:
            self._check_outs(outs, specs, args)
        self.bump_versions(args)
        if outs is None:
            outs = tuple(new_result(spec, like) for spec in specs)
        if self._has_work(outs, args):
            launch(outs, args)
        return outs

    def bump_versions(self, args: tuple[Any, ...]) -> None:
        """Let autograd notice what is about to be written."""
        for i in self.mutated:
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])

    def _has_work(self, outs: Outs, args: tuple[Any, ...]) -> bool:
        if self.empty is not None and self.empty(outs, *args):
            return False
        for out in outs:
            if out.numel():
                return True
        return any(args[i] is not None and args[i].numel() for i in self.mutated)

    def _like(self, args: tuple[Any, ...]) -> Tensor:
        """The tensor whose device the call runs on: the first one."""
        for i in self._tensors:
            value = args[i]
            if isinstance(value, (list, tuple)):
                if not value:
                    continue
                value = value[0]
            if isinstance(value, Tensor):
                return value
            if value is not None:
                raise InvalidDtypeError(
                    f"{self.name}: {self.parameters[i]} must be a torch.Tensor, got {type(value).__name__}"
                )
        raise InvalidArgumentError(f"{self.name}: {self.parameters[self._tensors[0]]} must be a torch.Tensor, got None")

    def _checked_specs(self, args: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
        schema.check(self.name, self._schema, args)
        self.check(*args)
        return self.outputs(*args)

    def _check_outs(self, outs: Outs, specs: tuple[TensorSpec, ...], args: tuple[Any, ...]) -> None:
        like = self._like(args)
        others = [(self.parameters[i], t) for i in self._tensors for t in _as_list(args[i])]
        for i, (out, spec) in enumerate(zip(outs, specs, strict=True)):
            name = f"out[{i}]" if len(specs) > 1 else "out"
            schema.check_tensor(self.name, name, out)
            if out.requires_grad and torch.is_grad_enabled():
                raise InvalidArgumentError(f"{self.name}: {name} must not require grad: no gradient is recorded")
            if out.dtype != spec.dtype:
                raise InvalidDtypeError(f"{self.name}: {name} must be {spec.dtype}, got {out.dtype}")
            if tuple(out.shape) != tuple(spec.shape):
                raise InvalidArgumentError(
                    f"{self.name}: {name} must have shape {tuple(spec.shape)}, got {tuple(out.shape)}"
                )
            if out.device != like.device:
                raise InvalidArgumentError(f"{self.name}: {name} must be on {like.device}, got {out.device}")
            if spec.stride is not None:
                if out.numel() and tuple(out.stride()) != tuple(spec.stride):
                    raise InvalidArgumentError(
                        f"{self.name}: {name} must have strides {tuple(spec.stride)}, got {tuple(out.stride())}"
                    )
                if spec.storage is not None and out.numel():
                    room = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()
                    if room < spec.storage:
                        raise InvalidArgumentError(
                            f"{self.name}: {name} must have room for {spec.storage} elements (padding included), "
                            f"got {room}"
                        )
            elif spec.row_strided:
                checks.last_stride_1(self.name, name, out)
                checks.distinct_elements(self.name, name, out)
            elif not out.is_contiguous():
                raise InvalidArgumentError(f"{self.name}: {name} must be contiguous, got strides {tuple(out.stride())}")
            for other_name, other in others:
                checks.disjoint(self.name, name, out, other_name, other)
            others.append((name, out))

    def _result(self, outs: Outs) -> Any:
        if self._single:
            return outs[0]
        if self._list:
            return list(outs)
        return outs if outs else None


def _as_list(value: Any) -> list[Tensor]:
    """The tensors of an argument."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _no_launch(outs: Outs, args: tuple[Any, ...]) -> None:
    """Meta tensors have shapes and no data: nothing to run, and no backend needed."""


def _no_outputs(*args: Any) -> tuple[TensorSpec, ...]:
    return ()
