"""The ``tk`` command; one module for each subcommand."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="tk",
    help="tk: kernels for DeepSeek-style models on every accelerator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

from . import bench, check, info, precompile, quantize  # noqa: E402, F401  (each registers its command on the app)
