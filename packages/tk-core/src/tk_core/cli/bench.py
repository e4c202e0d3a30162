"""``tk bench``: time the benchmark points, beside other libraries or another revision."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bench import adapters, records, runner
from ..bench import first_call as first_calls
from ..errors import InvalidArgumentError
from . import app
from .common import check_output, console, default_backend, progress_bar, select_operators, usable_backend
from .precompile import meta_calls


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operators or families; all of them.")] = None,
    vs: Annotated[
        str,
        typer.Option(
            help=f"Candidates beside tk, with commas: {', '.join(adapters.names())}; NAME@FOLDER for a worker."
        ),
    ] = "",
    backend: Annotated[str | None, typer.Option(help="Backend to time; default: the one of this machine.")] = None,
    match: Annotated[str, typer.Option(help="Only points whose name contains this.")] = "",
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    table_file: Annotated[pathlib.Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
    plot_file: Annotated[pathlib.Path | None, typer.Option("--plot", help="Write a plot to this PNG file.")] = None,
    first_call: Annotated[
        bool, typer.Option("--first-call", help="Also time the first call of each operator, cold and warm.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="Also time this git revision, and compare.")] = None,
) -> None:
    """Time operators on the backend of this machine (on a CPU: the reference) beside other candidates."""
    names = select_operators(ops)
    for option, path in (("--json", json_file), ("--markdown", table_file), ("--plot", plot_file)):
        check_output(option, path)
    if plot_file is not None and plot_file.suffix != ".png":
        raise InvalidArgumentError(f"--plot must name a .png file, got {str(plot_file)!r}")
    target = default_backend() if backend is None else usable_backend(backend)
    chosen = [p for p in runner.points(names) if match in p[2].name]
    if not chosen:
        raise InvalidArgumentError(f"no benchmark point of {', '.join(names)} has {match!r} in its name")
    machine = runner.Bench(target, [v.strip() for v in vs.split(",") if v.strip()])
    out = console()
    if target.name == "reference":
        out.print("No accelerator backend is usable here: these are times of the PyTorch reference on the CPU.")
    for name, reason in machine.missing.items():
        out.print(f"candidate {name} is left out: {reason}", highlight=False)
    if hasattr(target, "prepare"):
        optional: Any = target  # prepare and recorder are not part of the contract
        optional.prepare(meta_calls(target, optional.recorder(), chosen))
    rows: records.Rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("timing", total=len(chosen))
        for op, cases, point in chosen:
            progress.update(task, description=f"{op} {point.name}")
            rows += machine.run(op, cases, point)
            progress.advance(task)
            if json_file is not None:
                records.write(json_file, rows)
    if first_call:
        _add_first_calls(target.name, rows)
        if json_file is not None:
            records.write(json_file, rows)
    _print(rows)
    if table_file is not None:
        table_file.write_text(records.markdown(rows))
    if plot_file is not None:
        records.plot(plot_file, rows)
    if base is not None:
        _against(base, names, match, target.name, rows)


def _add_first_calls(backend: str, rows: records.Rows) -> None:
    """Note the first calls of each operator at its first point."""
    ours = {r["op"]: r for r in reversed(rows) if r["candidate"] == "tk" and "error" not in r}
    found = first_calls.measure(backend, [(r["op"], r["point"]) for r in reversed(ours.values())])
    for row in ours.values():
        row["first_call_ms"] = found[row["op"], row["point"]]


def _print(rows: records.Rows) -> None:
    table = Table("operator", "point", "candidate", "device us", "cold us", "host us", "GB/s", "of copy", "result")
    for r in rows:
        if "error" in r:
            table.add_row(r["op"], r["point"], r["candidate"], "", "", "", "", "", r["error"])
            continue
        times = (f"{r[k][0]:.2f} ({r[k][1]:.2f}-{r[k][2]:.2f})" for k in ("device_us", "cold_us", "host_us"))
        table.add_row(
            r["op"], r["point"], r["candidate"], *times, f"{r['gbps']:.0f}", f"{r['share_of_copy']:.1%}",
            r["against_reference"],
        )  # fmt: skip
    console().print(table)
    for line in records.first_calls(rows):
        console().print(line, highlight=False)


def _against(revision: str, names: list[str], match: str, backend: str, rows: records.Rows) -> None:
    """Time another revision in a worktree and a process of its own."""
    root = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if root.returncode:
        raise InvalidArgumentError("--base needs to be run inside the git checkout of tk")
    with tempfile.TemporaryDirectory() as folder:
        tree, record = pathlib.Path(folder) / "tree", pathlib.Path(folder) / "rows.json"
        added = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision],
            cwd=root.stdout.strip(),
            capture_output=True,
            text=True,
        )
        if added.returncode:
            raise InvalidArgumentError(f"--base {revision}: {added.stderr.strip().splitlines()[-1]}")
        try:
            sources = ":".join(str(p / "src") for p in sorted((tree / "packages").iterdir()))
            env = {**os.environ, "PYTHONPATH": sources}
            command = [sys.executable, "-m", "tk_core", "bench", *names, "--backend", backend, "--json", str(record)]
            done = subprocess.run([*command, "--match", match], env=env, capture_output=True, text=True)
            if done.returncode:
                raise InvalidArgumentError(
                    f"--base {revision}: timing it failed: {done.stderr.strip().splitlines()[-1]}"
                )
            before = records.read(record)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root.stdout.strip(), check=False)
    table = Table("point", f"{revision} us", "here us", "verdict", title=f"device time against {revision}")
    for name, old, new, verdict in records.compare(before, rows):
        table.add_row(name, f"{old:.2f}", f"{new:.2f}", verdict)
    console().print(table)
