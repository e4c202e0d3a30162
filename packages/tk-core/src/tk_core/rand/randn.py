"""Standard normal random numbers: ``randn`` and ``randn_like``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidDtypeError
from ..formats import TensorSpec
from ..op import Operator
from .generator import Generator, state_for

DRAW_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_DTYPES = {fmt: dtype for dtype, fmt in DRAW_FORMATS.items()}


def randn(
    *size: int | tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    generator: Generator | Tensor | None = None,
) -> Tensor:
    """Draw standard normal numbers, the same bits on every device.

    Four numbers come from one block of Philox4x32-10 with key ``seed`` and counter ``offset + e // 4`` for element
    ``e`` in row-major order; pairs of its words go through Box-Muller in fp32, each operation rounded separately, with
    polynomials for logarithm, sine and cosine (docs/numerics.md, "Random numbers"). bf16 numbers are the fp32 ones
    rounded. ``n`` elements advance the offset by ``ceil(n / 4)`` blocks, none by nothing.

    Args:
        size: sizes, as ints or as one tuple; none gives a tensor without dimensions.
        dtype: bfloat16 or float32; None takes ``torch.get_default_dtype()``.
        device: where to draw; None takes that of ``generator``, else ``torch.get_default_device()``.
        generator: where the numbers come from, a ``Generator`` or the ``state`` of one; None takes the default
            generator of the device (``set_seed``).

    Returns:
        A contiguous tensor of that size; ``|z| < 5.78``.

    Raises:
        InvalidArgumentError: a negative size, or ``device`` is not that of ``generator``.
        InvalidDtypeError: another dtype, or a size that is no int.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: none; there is no input.
    Determinism: the bits depend on seed and offset alone, not on device, shape or dtype. The offset advances on the
        device, under CUDA graphs and torch.compile too.
    Cost: writes the result; bound by arithmetic.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); Box and Muller (1958).

    >>> randn(2, generator=Generator(seed=42)).tolist()
    [-0.9701896905899048, 0.19401903450489044]
    """
    state = state_for("rand.randn", device, generator)
    return RANDN(state, size_of("rand.randn", size), draw_format("rand.randn", dtype))


def randn_like(input: Tensor, generator: Generator | Tensor | None = None) -> Tensor:
    """Draw standard normal numbers in the shape, dtype and device of a tensor, as ``randn`` does.

    Args:
        input: bfloat16 or float32, any shape and strides; only its shape, dtype and device matter.
        generator: as for ``randn``.

    Returns:
        A contiguous tensor.

    Raises:
        InvalidArgumentError: ``generator`` is on another device.
        InvalidDtypeError: ``input`` is no tensor, or of another dtype.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: none; the numbers do not depend on ``input``.
    Determinism: as ``randn``.
    Cost: as ``randn``.
    Source: as ``randn``.

    >>> randn_like(torch.zeros(1, 2), Generator(seed=42)).tolist()
    [[-0.9701896905899048, 0.19401903450489044]]
    """
    checks.is_tensor("rand.randn_like", "input", input)
    state = state_for("rand.randn_like", input.device, generator)
    return RANDN(state, list(input.shape), draw_format("rand.randn_like", input.dtype))


def size_of(op: str, size: tuple[Any, ...]) -> list[int]:
    """Sizes given as ints, or as one tuple."""
    if len(size) == 1 and isinstance(size[0], tuple):
        size = size[0]
    for value in size:
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise InvalidDtypeError(f"{op}: size must be ints or one tuple of ints, got {type(value).__name__}")
    return list(size)


def draw_format(op: str, dtype: torch.dtype | None) -> str:
    """Name of the dtype that numbers are drawn in."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DRAW_FORMATS:
        raise InvalidDtypeError(f"{op}: dtype must be bfloat16 or float32, got {str(dtype).removeprefix('torch.')}")
    return DRAW_FORMATS[dtype]


def check_draw(op: str, state: Tensor, size: Sequence[int], fmt: str) -> None:
    """Check the arguments of an operator that draws."""
    checks.is_tensor(op, "state", state)
    checks.dtype(op, "state", state, (torch.int64,))
    checks.shape(op, "state", state, (2,), "(seed, offset)")
    checks.contiguous(op, "state", state)
    checks.one_of(op, "fmt", fmt, tuple(_DTYPES))
    for value in size:
        if value < 0:
            checks.invalid(op, "size", "have no negative element", tuple(size))


def drawn(size: Sequence[int], fmt: str) -> tuple[TensorSpec, ...]:
    """What a draw returns."""
    return (TensorSpec(tuple(size), _DTYPES[fmt]),)


def nothing_drawn(outs: tuple[Tensor, ...], *args: Any) -> bool:
    """Whether there is nothing to do: the state alone would look like work."""
    return outs[0].numel() == 0


def _check(state: Tensor, size: Sequence[int], fmt: str) -> None:
    check_draw("rand.randn", state, size, fmt)


def _outputs(state: Tensor, size: Sequence[int], fmt: str) -> tuple[TensorSpec, ...]:
    return drawn(size, fmt)


RANDN = Operator(
    "rand.randn",
    "(Tensor(a!) state, SymInt[] size, str fmt) -> Tensor",
    check=_check,
    outputs=_outputs,
    empty=nothing_drawn,
)
