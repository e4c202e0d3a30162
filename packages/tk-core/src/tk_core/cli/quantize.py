"""``tk quantize`` and ``tk dequantize``: convert safetensors checkpoints."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..checkpoint import convert, recipes
from ..errors import InvalidArgumentError
from . import app
from .common import check_output, console, progress_bar

_Source = Annotated[pathlib.Path, typer.Argument(help="A .safetensors file, or a folder of them with its index.")]
_Target = Annotated[
    pathlib.Path, typer.Argument(help="Where to write: a file or a folder, as the source; must not exist.")
]
_Device = Annotated[str, typer.Option(help="Device that converts, such as cuda.")]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _convert(conversion: convert.Conversion) -> list[convert.TensorReport]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("converting", total=conversion.size())

        def advance(name: str, size: int) -> None:
            progress.update(task, advance=size, description=name)

        return conversion.run(advance)


@app.command()
def quantize(
    source: _Source,
    target: _Target,
    recipe: Annotated[str, typer.Option(help=f"{', '.join(recipes.RECIPES)}.")],
    include: Annotated[
        list[str] | None,
        typer.Option(help=f"Names of weights, with wildcards; may be repeated. Default: {' '.join(convert.INCLUDE)}"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help=f"Names to leave as they are; may be repeated. Default: {' '.join(convert.EXCLUDE)}"),
    ] = None,
    report: Annotated[pathlib.Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    device: _Device = "cpu",
) -> None:
    """Quantize the weights of a checkpoint; tensors that no pattern selects are copied.

    A killed run leaves TARGET.partial; the same command resumes it.
    """
    check_output("--report", report)
    conversion = convert.Quantize(
        source, target, recipe, include or convert.INCLUDE, convert.EXCLUDE if exclude is None else exclude, device
    )
    reports = _convert(conversion)
    table = Table("tensor", "shape", "relative error", "bytes before", "bytes after", title=f"{recipe}: {target}")
    for r in reports:
        shape = "x".join(map(str, r.shape))
        table.add_row(r.name, shape, f"{r.relative_error:.3e}", f"{r.bytes_before:,}", f"{r.bytes_after:,}")
    out = console()
    out.print(table)
    before, after = sum(r.bytes_before for r in reports), sum(r.bytes_after for r in reports)
    worst = max(reports, key=lambda r: r.relative_error)
    out.print(
        f"{len(reports)} weights: {before:,} to {after:,} bytes; largest relative error {worst.relative_error:.3e} "
        f"({worst.name})",
        highlight=False,
    )
    if report is not None:
        report.write_text(json.dumps([vars(r) for r in reports], indent=1) + "\n")


@app.command()
def dequantize(
    source: _Source,
    target: _Target,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: _Device = "cpu",
) -> None:
    """Turn a quantized checkpoint (any recipe of `tk quantize`) back into a plain one."""
    if dtype not in _DTYPES:
        raise InvalidArgumentError(f"--dtype must be {', '.join(_DTYPES)}, got {dtype!r}")
    conversion = convert.Dequantize(source, target, _DTYPES[dtype], device)
    _convert(conversion)
    console().print(f"{len(conversion.recipes)} weights dequantized to {dtype}: {target}", highlight=False)
