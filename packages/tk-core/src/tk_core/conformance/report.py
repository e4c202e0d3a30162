"""Conformance reports: the JSON that ships in a backend's wheel, and the list of refusals that may not grow unseen."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import pathlib
from typing import Any

import torch

from ..backend import Backend
from .engine import Outcome, device_of

NATIVE_SHARE = 0.9
"""Share of its samples that an operator must run to count as native."""


def summary(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Per operator: counts, the refusals by sample, the failures by sample. Error samples are not counted as run."""
    table: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        row = table.setdefault(o.op, {"passed": 0, "refused": {}, "failed": {}, "errors_checked": 0})
        if o.status == "failed":
            row["failed"][o.sample] = o.problems
        elif o.sample.startswith("error: "):
            row["errors_checked"] += 1
        elif o.status == "refused":
            row["refused"][o.sample] = o.refusal
        else:
            row["passed"] += 1
    return dict(sorted(table.items()))


def verdict(row: dict[str, Any]) -> str:
    """``native``, ``partial (n of m)`` or ``wrong (n of m)`` for one operator of a summary."""
    refused, failed = len(row["refused"]), len(row["failed"])
    total = row["passed"] + refused + failed
    if failed:
        return f"wrong ({failed} of {total})"
    if total and row["passed"] / total >= NATIVE_SHARE:
        return "native"
    return f"partial ({row['passed']} of {total})"


def describe_device(backend: Backend) -> str:
    """The device that a backend's samples ran on."""
    device = device_of(backend)
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(0)


def document(backend: Backend, outcomes: list[Outcome]) -> dict[str, Any]:
    """The report of a run: versions, device, counts, refusals."""
    return {
        "backend": backend.name,
        "version": backend.version,
        "tk_core": importlib.metadata.version("tk-core"),
        "torch": torch.__version__,
        "device": describe_device(backend),
        "operators": summary(outcomes),
    }


def write(path: pathlib.Path, backend: Backend, outcomes: list[Outcome]) -> None:
    """Write the report of a run as JSON."""
    path.write_text(json.dumps(document(backend, outcomes), indent=1, sort_keys=True) + "\n")


def shipped(backend: Backend) -> dict[str, Any] | None:
    """The report in the backend's wheel: ``conformance-NAME.json`` beside its module, or None."""
    package = type(backend).__module__.partition(".")[0]
    try:
        file = importlib.resources.files(package) / f"conformance-{backend.name}.json"
    except (ModuleNotFoundError, TypeError):
        return None
    return json.loads(file.read_text()) if file.is_file() else None


def new_refusals(document: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """Refusals of a run's report that the committed report does not list."""
    known = committed.get("operators", {})
    return [
        f"{op}: {sample}: {why}"
        for op, row in document["operators"].items()
        for sample, why in row["refused"].items()
        if sample not in known.get(op, {}).get("refused", {})
    ]
