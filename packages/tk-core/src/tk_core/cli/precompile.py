"""``tk precompile`` and ``tk inspect``: build kernels ahead of time, and look at what the compiler made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import registry
from ..backend import Backend
from ..bench import runner
from ..cases import Call, Cases, Maker, ShapeMaker, cases_of, tensors_in
from ..conformance.engine import public_function
from ..errors import InvalidArgumentError, NoBackendError
from . import app
from .common import console, progress_bar, select_operators

PROFILES = {"deepseek-v3": "v3", "deepseek-v4": "v4"}
"""Benchmark points whose names start with this come from the model."""

_INSPECTED_BYTES = 2**20
"""Tensors that fill tiles and are still run in an emulator within seconds."""


def _with(backend: Backend, method: str) -> Any:
    """A backend that has an optional method.

    Raises:
        NoBackendError: it has not.
    """
    if not hasattr(backend, method):
        raise NoBackendError(f"backend {backend.name!r} has nothing to {method}")
    return backend


def meta_calls(backend: Backend, recorder: Backend, points: list[Any]) -> Iterator[Callable[[], Any]]:
    """Each benchmark point as a call on meta tensors that a recording backend serves."""
    for op, _, point in points:
        if backend.kernel(op) is None:
            continue
        arguments = point.make(ShapeMaker(backend.layout))
        function = public_function(op)

        def call(function: Callable[..., Any] = function, arguments: Any = arguments) -> None:
            with registry.use_backend(recorder):
                function(*arguments.args, **arguments.kwargs)

        yield call


@app.command()
def precompile(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operators or families; all of them.")] = None,
    backend: Annotated[str, typer.Option(help="Backend whose kernels to build.")] = "cuda",
    arch: Annotated[
        str, typer.Option(help="Architectures, with commas, such as sm_90a; default: this machine's.")
    ] = "",
    profile: Annotated[str, typer.Option(help=f"Only the shapes of a model: {', '.join(PROFILES)}.")] = "",
    jobs: Annotated[int | None, typer.Option(help="Processes; default: half of the cores.")] = None,
) -> None:
    """Fill the kernel cache from the benchmark points, with or without a GPU."""
    names = select_operators(ops)
    if profile and profile not in PROFILES:
        raise InvalidArgumentError(f"--profile must be {' or '.join(PROFILES)}, got {profile!r}")
    if jobs is not None and jobs < 1:
        raise InvalidArgumentError(f"--jobs must be at least 1, got {jobs}")
    target = _with(registry.installed(backend), "precompile")
    points = [p for p in runner.points(names) if p[2].name.startswith(PROFILES.get(profile, ""))]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    counts = {"cached": 0, "compiled": 0}
    with progress_bar(*columns) as progress:
        task = progress.add_task("collecting kernels", total=None)

        def advance(done: int, total: int, name: str, state: str) -> None:
            counts[state] = counts.get(state, 0) + 1
            progress.update(task, completed=done, total=total, description=name.split(" ")[0])

        problems = target.precompile(
            meta_calls(target, target.recorder(), points), [a for a in arch.split(",") if a], jobs, advance
        )
    out = console()
    out.print(f"{counts['compiled']} compiled, {counts['cached']} were cached, {len(problems)} failed", highlight=False)
    for problem in problems:
        out.print(problem, highlight=False, markup=False)
    if problems:
        raise typer.Exit(1)


def _telling(cases: Cases, maker: Maker) -> Call:
    """Arguments of the largest quick sample of at most ``_INSPECTED_BYTES``."""
    made = [sample.make(maker) for sample in cases.samples if sample.level == "quick"]
    sizes = [sum(t.nbytes for t in tensors_in((*call.args, *call.kwargs.values()))) for call in made]
    return made[max(range(len(made)), key=lambda i: (sizes[i] <= _INSPECTED_BYTES, sizes[i]))]


@app.command()
def inspect(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator.")],
    backend: Annotated[str, typer.Option(help="Backend whose kernels to look at.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print a static report of an operator's kernels.

    On CUDA: registers, spills, shared memory, and global loads and stores by width (16x2: two of 16 bytes). On Ascend:
    bytes moved, vector instructions, buffers, and the bounds that follow. Needs no device.
    """
    names = select_operators([op])
    target = _with(registry.installed("ascend-emulator" if backend == "ascend" else backend), "inspect")
    rows = []
    for name in names:
        cases = cases_of(name)
        if cases is None or target.kernel(name) is None:
            raise NoBackendError(f"backend {backend!r} has no kernel for {name}")
        arguments = _telling(cases, Maker(torch.device("cpu"), target.layout))

        def call(name: str = name, arguments: Any = arguments) -> None:
            with registry.use_backend(target):
                public_function(name)(*arguments.args, **arguments.kwargs)

        rows += target.inspect(name, call)
    if as_json:
        print(json.dumps(rows, indent=1, default=str))
        return
    for row in rows:
        table = Table("", row["kernel"], show_header=True)
        for key, value in row.items():
            if key != "kernel":
                table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
        console().print(table)
