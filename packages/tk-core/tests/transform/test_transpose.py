"""Golden results of transpose and batched_transpose."""

from __future__ import annotations

import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError
from tk_core.transform import batched_transpose, transpose

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float8_e4m3fn, torch.int8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.int64]


def _bits(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Every pattern may occur, NaN payloads included."""
    word = _WORD[dtype.itemsize]
    values = (
        torch.randint(0, 2, (rows, columns)) if dtype == torch.bool else torch.randint(-(2**62), 2**62, (rows, columns))
    )
    return values.bool() if dtype == torch.bool else values.to(word).view(dtype)


def _lists(t: torch.Tensor) -> list:
    return (t if t.dtype == torch.bool else t.view(_WORD[t.element_size()])).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (7, 1), (0, 4), (4, 0)])
def test_moves_bits(dtype, shape):
    x = _bits(*shape, dtype)
    out = transpose(x)
    rows = _lists(x)
    assert (tuple(out.shape), out.is_contiguous(), out.dtype) == (shape[::-1], True, dtype)
    assert _lists(out) == [[row[j] for row in rows] for j in range(shape[1])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_bits_of_each_matrix(dtype):
    x = torch.stack([_bits(4, 6, dtype) for _ in range(3)])[:, :3]
    out = batched_transpose(x)
    assert (tuple(out.shape), out.is_contiguous()) == ((3, 6, 3), True)
    for b in range(3):
        assert _lists(out[b]) == _lists(transpose(x[b].contiguous()))


def test_strided_rows_and_batches():
    base = torch.arange(2 * 10 * 8, dtype=torch.int32).view(2, 10, 8)
    assert torch.equal(transpose(base[0, ::2, 1:5]), base[0, ::2, 1:5].t())
    assert torch.equal(batched_transpose(base[:, ::3, :4]), base[:, ::3, :4].mT)
    assert torch.equal(batched_transpose(base.transpose(0, 1)), base.transpose(0, 1).mT)
    assert torch.equal(transpose(base[0, :1].expand(4, 8)), base[0, :1].expand(4, 8).t())


def test_more_matrices_than_a_grid_dimension_holds():
    x = torch.arange(65536 * 2, dtype=torch.int32).view(65536, 2, 1)
    assert torch.equal(batched_transpose(x).flatten(), x.flatten())


def test_refusals():
    with pytest.raises(
        InvalidArgumentError, match=r"transform\.transpose: x must have shape \(M, N\), got \(1, 2, 3\)"
    ):
        transpose(torch.ones(1, 2, 3))
    with pytest.raises(InvalidArgumentError, match="x must have unit stride along its last dimension"):
        transpose(torch.ones(2, 3).t())
    with pytest.raises(InvalidDtypeError, match="elements of 1, 2, 4 or 8 bytes, got complex128"):
        batched_transpose(torch.ones(2, 3, 4, dtype=torch.complex128))


def test_gradients_are_not_swallowed():
    with pytest.raises(InvalidArgumentError, match=r"use x\.t\(\)\.contiguous\(\)"):
        transpose(torch.ones(2, 3, requires_grad=True))


def test_a_lazy_conjugate_is_refused_since_its_memory_holds_other_values():
    with pytest.raises(InvalidArgumentError, match="resolve_conj"):
        transpose(torch.ones(2, 3, dtype=torch.complex64).conj())
