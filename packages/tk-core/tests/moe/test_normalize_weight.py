"""Golden results of moe.normalize_weight and its gradient."""

from __future__ import annotations

import numpy
import pytest
import torch

import tk_core
from tk_core.moe import normalize_weight, normalize_weight_backward


def _rows(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_small_integers():
    denominator, normalized = normalize_weight(_rows([1.0, 3.0], [2.0, 6.0]))
    assert denominator.tolist() == [4.0, 8.0]
    assert normalized.tolist() == [[0.25, 0.75], [0.25, 0.75]]


def test_a_row_of_zeros_gives_zeros():
    denominator, normalized = normalize_weight(_rows([0.0, 0.0], [-0.0, 0.0]))
    assert denominator.tolist() == [numpy.float32(1e-20)] * 2
    assert normalized.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert torch.signbit(normalized).tolist() == [[False, False], [True, False]]


def test_tiny_weights_do_not_sum_to_one():
    tiny = numpy.float32(1e-20)
    denominator, normalized = normalize_weight(_rows([float(tiny), 0.0]))
    assert denominator.item() == tiny + tiny
    assert normalized.tolist() == [[0.5, 0.0]]


def test_the_sum_is_taken_in_ascending_order():
    """1e8 + 1 is 1e8 in fp32, so this order loses the 1 and another one would not."""
    denominator, normalized = normalize_weight(_rows([1e8, 1.0, -1e8, 1.0]))
    assert denominator.item() == 1.0
    assert normalized.tolist() == [[1e8, 1.0, -1e8, 1.0]]


def test_equals_numpy_step_by_step():
    weights = torch.rand(50, 9, generator=torch.Generator().manual_seed(1))
    total = numpy.zeros(50, numpy.float32)
    for column in weights.numpy().T:
        total = total + column
    total = total + numpy.float32(1e-20)
    denominator, normalized = normalize_weight(weights)
    assert denominator.numpy().tobytes() == total.tobytes()
    assert normalized.numpy().tobytes() == (weights.numpy() / total[:, None]).tobytes()


def test_non_finite_rows_do_not_touch_others():
    _, normalized = normalize_weight(_rows([float("nan"), 1.0], [float("inf"), 1.0], [1.0, 1.0]))
    assert normalized[0].isnan().all()
    assert normalized[1].isnan().tolist() == [True, False]
    assert normalized[1, 1].item() == 0.0
    assert normalized[2].tolist() == [0.5, 0.5]


def test_out_buffers():
    denominator, normalized = torch.full((2,), -1.0), torch.full((2, 2), -1.0)
    results = normalize_weight(_rows([1.0, 1.0], [3.0, 1.0]), out=(denominator, normalized))
    assert results[0] is denominator
    assert results[1] is normalized
    assert normalized.tolist() == [[0.5, 0.5], [0.75, 0.25]]


def test_gradients_are_never_lost_silently():
    weights = torch.rand(2, 4, requires_grad=True)
    with pytest.raises(tk_core.InvalidArgumentError, match=r"use tk_core\.layers\.normalize_weight"):
        normalize_weight(weights)
    with torch.no_grad():
        assert normalize_weight(weights)[1].shape == (2, 4)


def test_backward_by_hand():
    denominator, normalized = normalize_weight(_rows([1.0, 3.0]))
    assert normalize_weight_backward(_rows([1.0, 0.0]), denominator, normalized).tolist() == [[0.1875, -0.0625]]
    with_denominator = normalize_weight_backward(_rows([0.0, 0.0]), denominator, normalized, torch.tensor([2.0]))
    assert with_denominator.tolist() == [[2.0, 2.0]]


def test_backward_agrees_with_autograd_in_fp64():
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(20, 8, generator=generator) + 0.05
    grad, grad_denominator = torch.randn(20, 8, generator=generator), torch.randn(20, generator=generator)
    wide = weights.double().requires_grad_()
    total = wide.sum(1) + 1e-20
    torch.autograd.backward((wide / total[:, None], total), (grad.double(), grad_denominator.double()))
    denominator, normalized = normalize_weight(weights)
    got = normalize_weight_backward(grad, denominator, normalized, grad_denominator)
    torch.testing.assert_close(got.double(), wide.grad, rtol=1e-5, atol=1e-5)
