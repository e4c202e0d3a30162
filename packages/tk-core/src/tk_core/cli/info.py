"""``tk info``: versions, devices, backends with the reason of each rejection, and the operator x backend matrix."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from .. import op as operators
from .. import registry
from ..backend import Backend
from ..conformance import report
from . import app
from .common import console, device_names


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _status(backend: Backend, operator: operators.Operator, shipped: dict[str, Any] | None) -> str:
    """One cell of the matrix. Kernels are looked up whether or not the device is here."""
    try:
        kernel = backend.kernel(operator.name)
    except Exception as error:  # the matrix shows a broken kernel file; it does not stop at it
        return f"broken: {type(error).__name__}: {error}"
    if kernel is None:
        return "missing"
    if kernel.revision != operator.revision:
        return f"stale: revision {kernel.revision}, needs {operator.revision}"
    if backend.name == "reference":
        return "native"
    row = (shipped or {}).get("operators", {}).get(operator.name)
    return "present, not in the shipped conformance report" if row is None else report.verdict(row)


def gather() -> dict[str, Any]:
    """Everything that ``tk info`` shows, as plain data."""
    found = registry.found()
    backends = []
    for backend in found.values():
        reason = backend.unavailable()
        chosen = registry.chosen(backend.device_type)
        backends.append(
            {
                "name": backend.name,
                "version": backend.version,
                "device_type": backend.device_type,
                "usable": reason is None,
                "reason": reason,
                "default": backend.name in chosen and len(chosen) == 1,
                **({"cache": backend.cache_info()} if hasattr(backend, "cache_info") else {}),
            }
        )
    shipped = {name: report.shipped(backend) for name, backend in found.items()}
    matrix = {
        name: {b.name: _status(b, operator, shipped[b.name]) for b in found.values()}
        for name, operator in operators.OPERATORS.items()
    }
    return {
        "versions": {
            "tk-core": _version("tk-core"),
            "tk-cuda": _version("tk-cuda"),
            "tk-ascend": _version("tk-ascend"),
            "tilelang": _version("tilelang"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "devices": device_names(),
        "backends": backends,
        "rejected": [r._asdict() for r in registry.rejected()],
        "operators": matrix,
    }


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, devices, backends and which operator each of them implements."""
    data = gather()
    if as_json:
        print(json.dumps(data, indent=1))
        return
    out = console()
    out.print("  ".join(f"[bold]{k}[/] {v or 'not installed'}" for k, v in data["versions"].items()), highlight=False)
    out.print("devices: " + ", ".join(data["devices"]), highlight=False)
    table = Table("backend", "version", "device type", "state", title="Backends", title_justify="left")
    for b in data["backends"]:
        state = "usable" if b["usable"] else f"not usable here: {b['reason']}"
        table.add_row(b["name"], b["version"], b["device_type"], state + (", default" if b["default"] else ""))
    for r in data["rejected"]:
        table.add_row(r["name"], "", "", f"rejected: {r['reason']}")
    out.print(table)
    for b in data["backends"]:
        for folder in b.get("cache", ()):
            state = folder["reason"] or ("new kernels go here" if folder["writable"] else "read only")
            size = f"{folder['entries']} entries, {folder['bytes']:,} bytes"
            out.print(f"{b['name']} kernels in {folder['path']}: {size}, {state}", highlight=False)
    names = [b["name"] for b in data["backends"]]
    table = Table("operator", *names, title="Operators", title_justify="left")
    for op, cells in data["operators"].items():
        table.add_row(op, *(cells[n] for n in names))
    out.print(table)
