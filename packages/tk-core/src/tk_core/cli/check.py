"""``tk check``: the conformance suite on whatever is here."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..cases import LEVELS, Level
from ..conformance import engine, report
from ..errors import InvalidArgumentError
from . import app
from .common import check_output, console, default_backend, progress_bar, select_operators, usable_backend


@app.command()
def check(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operators or families; all of them.")] = None,
    backend: Annotated[str | None, typer.Option(help="Backend to check; default: the one of this machine.")] = None,
    level: Annotated[str, typer.Option(help="quick, full, or large (inputs past 2^31 elements).")] = "quick",
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Compare every operator with its reference on the conformance cases; non-zero exit on any mismatch."""
    if level not in LEVELS:
        raise InvalidArgumentError(f"--level must be {', '.join(LEVELS)}, got {level!r}")
    chosen: Level = level  # type: ignore[assignment]
    names = select_operators(ops)
    check_output("--json", json_file)
    target = default_backend() if backend is None else usable_backend(backend)
    jobs = [(name, job) for name in names for job in engine.plan(name, chosen, target)]
    outcomes: list[engine.Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task(f"checking {target.name}", total=len(jobs))
        for name, job in jobs:
            progress.update(task, description=f"{target.name} {name}")
            outcomes.append(job())
            progress.advance(task)
    if json_file is not None:
        json_file.write_text(json.dumps(report.document(target, outcomes), indent=1, sort_keys=True) + "\n")
    _print(target.name, level, outcomes)
    if any(o.status == "failed" for o in outcomes):
        raise typer.Exit(1)


def _print(backend: str, level: str, outcomes: list[engine.Outcome]) -> None:
    out = console()
    if backend == "reference":
        out.print("This checks the PyTorch reference: its calls, layouts and errors. `--backend` names another one.")
    table = Table(
        "operator", "equal", "refused", "wrong", "errors checked", "verdict", title=f"{backend}, level {level}"
    )
    rows = report.summary(outcomes)
    for op, row in rows.items():
        counts = (row["passed"], len(row["refused"]), len(row["failed"]), row["errors_checked"])
        table.add_row(op, *map(str, counts), report.verdict(row))
    out.print(table)
    for o in outcomes:
        for problem in o.problems:
            out.print(f"[red]wrong[/] {o.op}: {o.sample}: {problem}", highlight=False, markup=True)
        if o.refusal:
            out.print(f"refused {o.op}: {o.sample}: {o.refusal}", highlight=False, markup=False)
    failed = sum(o.status == "failed" for o in outcomes)
    out.print(f"{len(outcomes) - failed} passed, {failed} failed", highlight=False)
