"""Uniform random numbers: ``rand``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import TensorSpec
from ..op import Operator
from .generator import Generator, state_for
from .randn import check_draw, draw_format, drawn, nothing_drawn, size_of


def rand(
    *size: int | tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    generator: Generator | Tensor | None = None,
) -> Tensor:
    """Draw uniform numbers in [0, 1), the same bits on every device.

    Element ``e`` in row-major order comes from word ``w`` number ``e % 4`` of the block of Philox4x32-10 with key
    ``seed`` and counter ``offset + e // 4`` (in another stream than ``randn``). float32: ``(w >> 8) * 2**-24``;
    bfloat16: ``(w >> 24) * 2**-8``, its leading bits. ``n`` elements advance the offset by ``ceil(n / 4)`` blocks.

    Args:
        size: sizes, as ints or as one tuple; none gives a tensor without dimensions.
        dtype: bfloat16 or float32; None takes ``torch.get_default_dtype()``.
        device: where to draw; None takes that of ``generator``, else ``torch.get_default_device()``.
        generator: where the numbers come from, a ``Generator`` or the ``state`` of one; None takes the default
            generator of the device (``set_seed``).

    Returns:
        A contiguous tensor of that size.

    Raises:
        InvalidArgumentError: a negative size, or ``device`` is not that of ``generator``.
        InvalidDtypeError: another dtype, or a size that is no int.
        UnsupportedError: legal, but the backend of the device has no kernel for it; the message says why.

    Gradient: none; there is no input.
    Determinism: the bits depend on seed and offset alone, not on device or shape. The offset advances on the device,
        under CUDA graphs and torch.compile too.
    Cost: writes the result; bound by memory bandwidth and integer arithmetic.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).

    >>> u = rand(1000, generator=Generator(seed=0))
    >>> bool((u >= 0).all() and (u < 1).all())
    True
    """
    state = state_for("rand.rand", device, generator)
    return RAND(state, size_of("rand.rand", size), draw_format("rand.rand", dtype))


def _check(state: Tensor, size: Sequence[int], fmt: str) -> None:
    check_draw("rand.rand", state, size, fmt)


def _outputs(state: Tensor, size: Sequence[int], fmt: str) -> tuple[TensorSpec, ...]:
    return drawn(size, fmt)


RAND = Operator(
    "rand.rand",
    "(Tensor(a!) state, SymInt[] size, str fmt) -> Tensor",
    check=_check,
    outputs=_outputs,
    empty=nothing_drawn,
)
