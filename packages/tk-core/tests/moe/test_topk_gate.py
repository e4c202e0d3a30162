"""Golden results of moe.topk_gate: ties, non-finite scores, layout, dtype."""

from __future__ import annotations

import random

import pytest
import torch

import tk_core
from tk_core.moe import topk_gate

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "k", "ids"),
    [
        ([0.5, 2.0, 2.0, -1.0], 3, [1, 2, 0]),
        ([-0.0, 0.0, -0.0, 0.0], 4, [0, 1, 2, 3]),
        ([0.0, 1e-45, -1e-45, -0.0], 4, [1, 0, 3, 2]),
        ([-INF, NAN, -1.0, INF, -NAN, -INF], 6, [3, 2, 0, 5, 1, 4]),
        ([NAN, NAN, NAN], 3, [0, 1, 2]),
        ([-INF, -INF, 3.0], 2, [2, 0]),
        ([7.0], 1, [0]),
        ([1.0, 1.0 + 2**-23, 1.0 - 2**-24], 3, [1, 0, 2]),
    ],
)
def test_order(row: list[float], k: int, ids: list[int]):
    assert topk_gate(torch.tensor([row]), k).tolist() == [ids]


def test_agrees_with_python_sorting():
    random.seed(3)
    for experts, k in [(16, 6), (72, 6), (257, 8), (40, 32)]:
        rows = [[random.choice([-1.5, 0.25, random.gauss(0, 1), -INF]) for _ in range(experts)] for _ in range(20)]
        expected = [sorted(range(experts), key=lambda i, r=row: (-r[i], i))[:k] for row in rows]
        assert topk_gate(torch.tensor(rows), k).tolist() == expected


def test_equal_scores_give_the_first_experts_every_time():
    scores = torch.zeros(3, 257)
    scores[1] = -0.0
    for _ in range(100):
        assert topk_gate(scores, 8).tolist() == [list(range(8))] * 3


def test_a_bias_of_fp32_resolution_decides():
    """Biases 2**-8 apart near 7 are told apart; in bfloat16 they would tie."""
    scores = torch.full((1, 256), 0.5)
    scores[0, :8] += 7 + torch.arange(8) * 2.0**-8
    assert topk_gate(scores, 8).tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("nan_rows", [[0, 1, 2, 3], [3]])
def test_rows_of_nan_give_distinct_ids(nan_rows: list[int]):
    scores = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    clean = topk_gate(scores, 8)
    scores[nan_rows] = NAN
    ids = topk_gate(scores, 8)
    for row in range(4):
        assert ids[row].tolist() == (list(range(8)) if row in nan_rows else clean[row].tolist())


def test_layout_and_dtype():
    ids = topk_gate(torch.randn(1, 16), 1)
    assert (ids.dtype, ids.shape, ids.stride()) == (torch.int64, (1, 1), (1, 1))
    assert topk_gate(torch.empty(0, 256), 8).shape == (0, 8)


def test_out_is_filled_in_64_bits_and_returned():
    out = torch.full((3, 4), -1)
    assert topk_gate(torch.randn(3, 16), 4, out=out) is out
    assert bool((out >> 32 == 0).all())


def test_scores_that_require_grad_are_accepted():
    ids = topk_gate(torch.randn(2, 8, requires_grad=True), 2)
    assert not ids.requires_grad


def test_every_message_names_the_argument_and_the_value():
    with pytest.raises(tk_core.InvalidArgumentError, match=r"moe\.topk_gate: num_topk must be at most .* 8, got 9"):
        topk_gate(torch.randn(2, 8), 9)
    with pytest.raises(tk_core.InvalidDtypeError, match=r"moe\.topk_gate: scores must be float32, got float16"):
        topk_gate(torch.randn(2, 8).half(), 2)
    with pytest.raises(tk_core.InvalidDtypeError, match=r"num_topk must be an int, got float"):
        topk_gate(torch.randn(2, 8), 2.0)  # type: ignore[arg-type]
