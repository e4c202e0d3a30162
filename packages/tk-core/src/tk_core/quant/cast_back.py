"""Dequantize: ``cast_back`` and ``per_token_cast_back``."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from ..formats import FLOAT_OUT, FORMAT_OF_DTYPE, TensorSpec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .cast_back_e5m6 import cast_back_e5m6
from .scales import QuantTensor, block, check_quantized, split_quantized


@repeatable
def cast_back(
    x: QuantTensor | tuple[Tensor, Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
) -> Tensor:
    """Dequantize a matrix: ``y = q * sf`` in fp32, rounded once more to nearest even for bf16.

    ``sf`` is that of the block of ``q``; UE8M0 byte 0 is 2**-127, byte 255 NaN. Codes and scales that are subnormal
    count in full; products past the range of ``fmt`` become Inf.

    Args:
        x: ``(data, sf)``. ``data``: ``(M, K)`` float8_e4m3fn or ``(M, K / 2)`` int8 of e2m1 codes, ``stride(1) == 1``,
            any row stride. ``sf``: one scale for each block, in any layout of docs/numerics.md, "Scale factors", with
            any leading stride.
        fmt: ``"bf16"`` or ``"fp32"``.
        x_block_size: ``(rows, columns)`` of a block, each at least 1; edge blocks are partial.
        x_special_fmt: None, or ``"e5m6"`` for uint8 data, which is :func:`cast_back_e5m6`.

    Returns:
        ``(M, K)`` bfloat16 or float32, contiguous.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit, but for the payload of NaN.
    Cost: one pass; reads ``data`` and ``sf``, writes the result; bound by memory bandwidth.
    Source: OCP Microscaling Formats v1.0 (UE8M0 decoding); DeepSeek-V3, section 3.3.

    >>> q = torch.tensor([[1.0, -448.0]]).to(torch.float8_e4m3fn)
    >>> cast_back((q, torch.tensor([[0.5]])), "fp32", (1, 2)).tolist()
    [[0.5, -224.0]]
    """
    op = "quant.cast_back"
    checks.one_of(op, "x_special_fmt", x_special_fmt, (None, "e5m6"))
    if x_special_fmt == "e5m6":
        return cast_back_e5m6(x, fmt, x_block_size)
    data, sf = split_quantized(op, x)
    rows, columns = block(op, "x_block_size", x_block_size)
    return CAST_BACK(data, sf, fmt, rows, columns, layout(data.device.type).ue8m0_per_word)


@repeatable
def per_token_cast_back(
    x: QuantTensor | tuple[Tensor, Tensor], fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> Tensor:
    """Dequantize a matrix with one scale for each row and group of columns: :func:`cast_back` with block ``(1, n)``.

    Args:
        x, fmt, x_special_fmt: as in :func:`cast_back`.
        num_per_channels: columns per scale.

    Returns:
        ``(M, K)`` bfloat16 or float32, contiguous.

    Raises:
        InvalidArgumentError, InvalidDtypeError, UnsupportedError: as :func:`cast_back`.

    Gradient: none.
    Determinism: as :func:`cast_back`.
    Cost: as :func:`cast_back`.
    Source: as :func:`cast_back`.

    >>> q = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    >>> per_token_cast_back((q, torch.tensor([[0.5, 4.0]])), "fp32", 1).tolist()
    [[0.5, 8.0]]
    """
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt)


def _check(x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int) -> None:
    op = "quant.cast_back"
    checks.one_of(op, "fmt", fmt, tuple(FLOAT_OUT))
    check_quantized(op, x, x_sf, x_block_rows, x_block_columns, ue8m0_per_word)


def _outputs(
    x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int
) -> tuple[TensorSpec, ...]:
    columns = FORMAT_OF_DTYPE[x.dtype].logical(x.shape[1])
    return (TensorSpec((x.shape[0], columns), FLOAT_OUT[fmt]),)


CAST_BACK = Operator(
    "quant.cast_back",
    "(Tensor x, Tensor x_sf, str fmt, int x_block_rows, int x_block_columns, int ue8m0_per_word) -> Tensor",
    check=_check,
    outputs=_outputs,
)
