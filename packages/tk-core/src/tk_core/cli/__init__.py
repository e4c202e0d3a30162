"""The ``tk`` command; one module for each subcommand."""

from __future__ import annotations

from typing import Any

import typer

app = typer.Typer(
    name="tk",
    help="tk: kernels for DeepSeek-style models on every accelerator.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

UsageError: Any = typer.BadParameter.__mro__[1]
"""What wrong arguments raise; typer has it from a library of its own or from click, by version."""

from . import bench, check, info, precompile, quantize  # noqa: E402, F401  (each registers its command on the app)
