"""Dequantize packed 12-bit e5m6 codes."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from ..formats import E5M6, FLOAT_OUT, TensorSpec
from ..op import Operator
from ..registry import layout
from ..repeat import repeatable
from .scales import QuantTensor, block, check_quantized, split_quantized


@repeatable
def cast_back_e5m6(x: QuantTensor | tuple[Tensor, Tensor], fmt: str, x_block_size: tuple[int, int]) -> Tensor:
    """Dequantize packed e5m6 codes: ``y = fp16(code << 4) * sf`` in fp32, rounded once more to nearest even for bf16.

    Args:
        x: ``(data, sf)``. ``data``: ``(M, 3 K / 2)`` uint8 as :func:`per_token_cast_to_e5m6` writes it, ``K`` a
            multiple of 8; ``stride(1) == 1``, any row stride. ``sf``: one scale for each block, in any layout of
            docs/numerics.md, "Scale factors".
        fmt: ``"bf16"`` or ``"fp32"``.
        x_block_size: ``(rows, columns)`` of a block, each at least 1; edge blocks are partial.

    Returns:
        ``(M, K)`` bfloat16 or float32, contiguous. Codes of fp16 Inf and NaN decode as such.

    Raises:
        InvalidArgumentError: a shape, stride or flag combination outside the above.
        InvalidDtypeError: another dtype.
        UnsupportedError: the backend of the device cannot run the call.

    Gradient: none.
    Determinism: bitwise reproducible, and equal to the reference bit for bit, but for the payload of NaN.
    Cost: one pass; reads ``data`` and ``sf``, writes the result; bound by memory bandwidth.
    Source: the 1-5-6 format that tile-kernels 1.0 defines: an IEEE 754 binary16 without its last four bits.

    >>> q = torch.tensor([[56, 0, 12, 60, 0, 0, 191, 7, 0, 0, 0, 0]], dtype=torch.uint8)
    >>> cast_back_e5m6((q, torch.tensor([[2.0]])), "fp32", (1, 8)).tolist()
    [[2.0, -4.0, 1.0, 130048.0, 0.0, 0.0, 0.0, 0.0]]
    """
    op = "quant.cast_back_e5m6"
    data, sf = split_quantized(op, x)
    rows, columns = block(op, "x_block_size", x_block_size)
    return CAST_BACK_E5M6(data, sf, fmt, rows, columns, layout(data.device.type).ue8m0_per_word)


def _check(x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int) -> None:
    op = "quant.cast_back_e5m6"
    checks.one_of(op, "fmt", fmt, tuple(FLOAT_OUT))
    check_quantized(op, x, x_sf, x_block_rows, x_block_columns, ue8m0_per_word, formats=(E5M6,))


def _outputs(
    x: Tensor, x_sf: Tensor, fmt: str, x_block_rows: int, x_block_columns: int, ue8m0_per_word: int
) -> tuple[TensorSpec, ...]:
    return (TensorSpec((x.shape[0], E5M6.logical(x.shape[1])), FLOAT_OUT[fmt]),)


CAST_BACK_E5M6 = Operator(
    "quant.cast_back_e5m6",
    "(Tensor x, Tensor x_sf, str fmt, int x_block_rows, int x_block_columns, int ue8m0_per_word) -> Tensor",
    check=_check,
    outputs=_outputs,
)
