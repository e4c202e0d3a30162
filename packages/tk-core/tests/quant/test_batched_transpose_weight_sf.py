"""quant.batched_transpose_weight_sf against a loop over the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tk_core
from tk_core import InvalidArgumentError, quant
from tk_core.quant.batched_transpose_weight_sf import BATCHED_TRANSPOSE_WEIGHT_SF


def _scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.exp2(torch.randint(-126, 128, shape, generator=generator).float())


def _expected(sf: Tensor, block: int, per_word: int) -> tuple[list[list[int]], list[list[int]]]:
    """The words of both results, as unsigned numbers, straight from the definition."""
    exponent = [[int(math.log2(v)) + 127 for v in row] for row in sf.tolist()]
    n, k = len(exponent), len(exponent[0])

    def words(rows: int, inner: int, at: object) -> list[list[int]]:
        result = []
        for r in range(rows * block):
            line = []
            for w in range(-(-inner // per_word)):
                inside = [t for t in range(per_word) if per_word * w + t < inner]
                line.append(sum(at(r // block, per_word * w + t) << 8 * t for t in inside))
            result.append(line)
        return result

    return words(n, k, lambda i, j: exponent[i][j]), words(k, n, lambda j, i: exponent[i][j])


def _unsigned(t: Tensor) -> list:
    mask = (1 << 8 * t.element_size()) - 1
    return (t.long() & mask).tolist()


def _bytes(word: Tensor) -> list[int]:
    return list((int(word) & 0xFFFFFFFF).to_bytes(4, "little"))


@pytest.mark.parametrize("per_word", [4, 2])
@pytest.mark.parametrize(("block", "n", "k"), [(32, 4, 8), (32, 12, 20), (128, 3, 6), (128, 1, 1)])
def test_words_shapes_and_strides(per_word: int, block: int, n: int, k: int) -> None:
    single, grouped = _scales(n, k), _scales(2, n, k)
    backend = tk_core.backends.ReferenceBackend(tk_core.backend.Layout(per_word, 0))
    with tk_core.use_backend(backend):
        plain, batch = quant.batched_transpose_weight_sf([single, grouped], block, [False, True])
    for sf, (sf0, sf1), transposed in ((single, plain, False), (grouped, batch, True)):
        groups = () if sf.dim() == 2 else (2,)
        rows, columns, words0, words1 = n * block, k * block, -(-k // per_word), -(-n // per_word)
        assert sf0.shape == (*groups, rows, words0)
        assert sf0.stride() == (*(words0 * rows for _ in groups), 1, rows)
        sf1 = sf1.transpose(-1, -2) if transposed else sf1
        assert sf1.shape == (*groups, columns, words1)
        assert sf1.stride() == (*(words1 * columns for _ in groups), 1, columns)
        for i in range(max(len(groups) and 2, 1)):
            pick = (lambda t, i=i: t[i]) if groups else (lambda t: t)
            assert [_unsigned(pick(sf0)), _unsigned(pick(sf1))] == list(_expected(pick(sf), block, per_word))


def test_example_of_the_definition() -> None:
    sf = torch.exp2(10 * torch.arange(3.0)[:, None] + torch.arange(6.0))
    sf0, sf1 = quant.batched_transpose_weight_sf([sf], 128, [False])[0]
    assert [f"{int(w) & 0xFFFFFFFF:08X}" for w in sf0[0]] == ["8281807F", "00008483"]
    assert [f"{int(sf1[c * 128, 0]) & 0xFFFFFFFF:08X}" for c in (0, 1, 5)] == ["0093897F", "00948A80", "00988E84"]


def test_buffers_are_overwritten_and_returned() -> None:
    sf = [_scales(4, 4), _scales(2, 4, 8)]
    first = quant.batched_transpose_weight_sf(sf, 32, [True, False])
    other = [_scales(4, 4) * 0 + 2.0, _scales(2, 4, 8) * 0 + 4.0]
    expected = quant.batched_transpose_weight_sf(other, 32, [True, False])
    got = quant.batched_transpose_weight_sf(other, 32, [True, False], [None, first[1]])
    assert got[1] is first[1]
    for pair, wanted in zip(got, expected):
        for a, b in zip(pair, wanted):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            assert a.data_ptr() % 32 == 0
    assert quant.batched_transpose_weight_sf([], 32, []) == []


@pytest.mark.parametrize("bad", [3.0, -2.0, math.nan, 2.0**-127, -0.0])
def test_q05_other_scales_are_refused_and_never_truncated(bad: float) -> None:
    sf = torch.ones(4, 4)
    sf[1, 2] = bad
    with pytest.raises(InvalidArgumentError, match=r"sf\[1\] must hold powers of two, got"):
        quant.batched_transpose_weight_sf([torch.ones(4, 4), sf], 32, [False, False])
    sf0, sf1 = BATCHED_TRANSPOSE_WEIGHT_SF([sf], 32, [False], 4)
    assert _bytes(sf0[32, 0]) == [127, 127, 255, 127]
    assert _bytes(sf1[64, 0]) == [127, 255, 127, 127]


def test_zero_and_inf_pass() -> None:
    sf = torch.ones(4, 4)
    sf[0, 0], sf[0, 1] = 0.0, math.inf
    sf0 = quant.batched_transpose_weight_sf([sf], 32, [False])[0][0]
    assert _bytes(sf0[0, 0]) == [0, 255, 127, 127]


def test_wrong_buffers() -> None:
    sf = [torch.ones(4, 4)]
    good = quant.batched_transpose_weight_sf(sf, 32, [False])[0]
    shifted = torch.zeros(129, dtype=torch.int32)[1:].view(1, 128).t()
    with pytest.raises(InvalidArgumentError, match=r"outs\[0\]\[0\] must start at a multiple of 32 bytes"):
        quant.batched_transpose_weight_sf(sf, 32, [False], [(shifted, good[1])])
    with pytest.raises(InvalidArgumentError, match="outs must have 1 elements, as sf has, got 0"):
        quant.batched_transpose_weight_sf(sf, 32, [False], [])
    with pytest.raises(InvalidArgumentError, match=r"outs\[0\] must be a pair of tensors or None, got Tensor"):
        quant.batched_transpose_weight_sf(sf, 32, [False], [good[0]])
    with pytest.raises(InvalidArgumentError, match="transpose_sf1s must have 1 elements"):
        quant.batched_transpose_weight_sf(sf, 32, [False, True])
