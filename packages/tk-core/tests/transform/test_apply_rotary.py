"""Golden results of apply_rotary: exact rationals, views, positions out of range, refusals."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError, checks
from tk_core.transform import apply_rotary

f32 = np.float32


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _nearest(exact: Fraction) -> np.float32:
    near = f32(float(exact))
    around = [near, np.nextafter(near, f32(np.inf)), np.nextafter(near, f32(-np.inf))]
    best = min(abs(Fraction(float(v)) - exact) for v in around)
    ties = [v for v in around if abs(Fraction(float(v)) - exact) == best]
    return ties[0] if len(ties) == 1 else next(v for v in ties if int(v.view(np.uint32)) % 2 == 0)


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return _nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def _pair(a, b, c, z):
    return _fma(a, c, f32(-f32(b * z))), _fma(a, z, f32(b * c))


def _channels(i: int, half: int, interleaved: bool) -> tuple[int, int]:
    return (2 * i, 2 * i + 1) if interleaved else (i, i + half)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_exact_arithmetic(interleaved, conjugate, dtype):
    query, cache = _randn(4, 3, 10, dtype=dtype), _randn(7, 10, seed=1)
    positions = torch.tensor([6, 0, 3, 3])
    before = query.float().numpy().copy()
    apply_rotary(query, cache, positions=positions, interleaved=interleaved, conjugate=conjugate)
    expected = before.copy()
    for token in range(4):
        cos, sin = cache[positions[token]].numpy().reshape(2, 5)
        for head in range(3):
            for i in range(5):
                first, second = _channels(i, 5, interleaved)
                a, b = before[token, head, [first, second]]
                z = -sin[i] if conjugate else sin[i]
                expected[token, head, [first, second]] = _pair(a, b, cos[i], z)
    if dtype == torch.bfloat16:
        expected = expected.astype(ml_dtypes.bfloat16).astype(f32)
    assert query.float().numpy().tobytes() == expected.tobytes()


def test_quarter_turns():
    cache = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    query = torch.tensor([[[3.0, 4.0]]] * 4)
    apply_rotary(query, cache)
    assert query.squeeze(1).tolist() == [[3.0, 4.0], [-4.0, 3.0], [-3.0, -4.0], [4.0, -3.0]]
    apply_rotary(query, cache, conjugate=True)
    assert query.squeeze(1).tolist() == [[3.0, 4.0]] * 4


def test_offset_counts_like_positions():
    cache = _randn(30, 6)
    plain, shifted, given = (_randn(2, 5, 3, 6, seed=1) for _ in range(3))
    apply_rotary(plain, cache, seqlen_offset=17)
    apply_rotary(shifted, cache, positions=torch.arange(5).expand(2, 5), seqlen_offset=17)
    apply_rotary(given, cache, positions=torch.arange(17, 22, dtype=torch.int32).expand(2, 5))
    assert torch.equal(plain, shifted)
    assert torch.equal(plain, given)


def test_key_has_its_own_number_of_heads():
    cache = _randn(9, 8)
    query, key = _randn(9, 5, 8, seed=1), _randn(9, 2, 8, seed=2)
    alone = [query.clone(), key.clone()]
    assert apply_rotary(query, cache, key) is None
    for t in alone:
        apply_rotary(t, cache)
    assert torch.equal(query, alone[0])
    assert torch.equal(key, alone[1])


def test_partial_rotary_leaves_the_other_channels():
    heads = _randn(5, 4, 256, dtype=torch.bfloat16)
    before, cache = heads.clone(), _randn(5, 64, seed=1)
    apply_rotary(heads[:, :3, -64:], cache)
    assert torch.equal(heads[..., :-64], before[..., :-64])
    assert torch.equal(heads[:, 3], before[:, 3])
    rotated = before[:, :3, -64:].contiguous()
    apply_rotary(rotated, cache)
    assert torch.equal(heads[:, :3, -64:], rotated)
    assert not torch.equal(rotated, before[:, :3, -64:])


def test_positions_out_of_the_cache_give_zeros():
    query = _randn(5, 2, 64)
    positions = torch.tensor([15, 16, -1, 2**32 + 3, 0])
    apply_rotary(query, _randn(16, 64, seed=1), positions=positions)
    assert (query.abs().sum((1, 2)) > 0).tolist() == [True, False, False, False, True]


def test_positions_are_looked_at_when_validating(monkeypatch):
    monkeypatch.setattr(checks, "VALIDATE", True)
    query = _randn(2, 1, 4)
    with pytest.raises(InvalidArgumentError, match=r"positions must lie in \[-2, 14\), got values from 0 to 14"):
        apply_rotary(query, _randn(16, 4), positions=torch.tensor([0, 14]), seqlen_offset=2)
    assert torch.equal(query, _randn(2, 1, 4))


@pytest.mark.parametrize(("tokens", "offset"), [(17, 0), (5, 12), (1, 2**40), (1, -1)])
def test_tokens_past_the_cache_are_refused(tokens, offset):
    with pytest.raises(InvalidArgumentError, match=r"seqlen_offset must be at|cos_sin_cache must have a row for each"):
        apply_rotary(_randn(tokens, 1, 4), _randn(16, 4), seqlen_offset=offset)


def test_views_that_interleave_in_memory_do_not_overlap():
    both = _randn(6, 4, 128)
    expected, cache = both.clone(), _randn(6, 64, seed=1)
    apply_rotary(both[..., :64], cache, both[..., 64:])
    for part in (expected[..., :64], expected[..., 64:]):
        apply_rotary(part, cache)
    assert torch.equal(both, expected)


@pytest.mark.parametrize(
    "views",
    [
        lambda t: (t, t),
        lambda t: (t[:, :3], t[:, 2:]),
        lambda t: (t[..., :64], t[..., 32:96]),
        lambda t: (t.view(-1)[: 6 * 64].view(6, 1, 64), t.view(-1)[64 : 7 * 64].view(6, 1, 64)),
    ],
)
def test_overlapping_query_and_key_are_refused(views):
    t = _randn(6, 5, 128)
    query, key = views(t)
    with pytest.raises(InvalidArgumentError, match="key must not overlap query"):
        apply_rotary(query, _randn(6, query.shape[-1], seed=1), key)
    assert torch.equal(t, _randn(6, 5, 128))


def test_misaligned_view():
    base = _randn(5, 3, 66, dtype=torch.bfloat16)
    expected, cache = base[..., 1:65].contiguous(), _randn(5, 64, seed=1)
    apply_rotary(base[..., 1:65], cache)
    apply_rotary(expected, cache)
    assert torch.equal(base[..., 1:65], expected)


def test_non_finite_values_stay_in_their_pair():
    query = torch.ones(1, 1, 6)
    query[0, 0, 1] = math.nan
    apply_rotary(query, torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]))
    assert query.isnan().flatten().tolist() == [False, True, False, False, True, False]


def test_version_counter_advances():
    query, key = _randn(3, 1, 4), _randn(3, 1, 4)
    before = query._version, key._version
    apply_rotary(query, _randn(3, 4), key)
    assert query._version > before[0]
    assert key._version > before[1]


def test_float16_is_refused():
    with pytest.raises(InvalidDtypeError, match="query must be bfloat16 or float32 or float64, got float16"):
        apply_rotary(_randn(3, 1, 4).half(), _randn(3, 4))


def test_what_is_read_may_not_lie_where_the_rotation_writes():
    query, key, cache = torch.randn(2, 3, 4), torch.randn(2, 6, 4), torch.randn(8, 4)
    for written, name in ((query, "query"), (key, "key")):
        before = written.clone()
        with pytest.raises(InvalidArgumentError, match=f"cos_sin_cache must not overlap {name}"):
            apply_rotary(query, written.view(-1, 4), key)
        with pytest.raises(InvalidArgumentError, match=f"positions must not overlap {name}"):
            apply_rotary(query, cache, key, positions=written.view(-1).view(torch.int32)[:2])
        assert torch.equal(written, before)
