"""What several subcommands share: operator names, backends, consoles."""

from __future__ import annotations

import difflib
import os
import pathlib

import torch
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from .. import op as operators
from .. import registry
from ..backend import Backend
from ..errors import InvalidArgumentError, NoBackendError


def console(stderr: bool = False) -> Console:
    """A console that does not cut tables when its output goes to a file or a pipe."""
    width = None if (os.isatty(2 if stderr else 1) or "COLUMNS" in os.environ) else 160
    return Console(stderr=stderr, width=width)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on standard error, where that is a terminal."""
    out = console(stderr=True)
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def check_output(option: str, path: pathlib.Path | None) -> None:
    """Require a place for a file before the work that fills it.

    Raises:
        InvalidArgumentError: a folder, or in a folder that does not exist.
    """
    if path is None:
        return
    if path.is_dir():
        raise InvalidArgumentError(f"{option} must name a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"{option} must name a file in a folder that exists, got {str(path)!r}")


def select_operators(names: list[str] | None) -> list[str]:
    """The operators that were named, by full name or by family; all of them by default.

    Raises:
        InvalidArgumentError: a name that is neither; suggests near ones.
    """
    everything = list(operators.OPERATORS)
    if not names:
        return everything
    chosen: list[str] = []
    for name in names:
        found = [n for n in everything if n == name or n.partition(".")[0] == name]
        if not found:
            near = difflib.get_close_matches(name, everything, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `tk info` lists the operators"
            raise InvalidArgumentError(f"no operator or family is named {name!r}{hint}")
        chosen += [n for n in found if n not in chosen]
    return chosen


def usable_backend(name: str) -> Backend:
    """A backend by name that can run here.

    Raises:
        NoBackendError: not installed, rejected, or its device is missing; says why.
    """
    backend = registry._by_name(name)
    reason = backend.unavailable()
    if reason is not None:
        raise NoBackendError(f"backend {name!r} cannot run here: {reason}")
    return backend


def default_backend() -> Backend:
    """The backend of the accelerator of this machine, else the reference."""
    for device_type in registry.device_types():
        names = registry.chosen(device_type)
        if device_type != "cpu" and len(names) == 1:
            backend = registry.found()[names[0]]
            if backend.unavailable() is None:
                return backend
    return registry.found()["reference"]


def device_names() -> list[str]:
    """The devices that torch sees."""
    names = [f"cpu ({torch.get_num_threads()} threads)"]
    for device_type in registry.device_types():
        module = None if device_type == "cpu" else getattr(torch, device_type, None)
        if module is not None and module.is_available():
            names += [f"{device_type}:{i} {module.get_device_name(i)}" for i in range(module.device_count())]
    return names
