"""Golden results of SwiGLU: the specification's numbers, and a witness in numpy and ml_dtypes, element by element."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core import InvalidArgumentError, checks, config, registry
from tk_core.backend import Layout
from tk_core.quant import (
    per_channel_cast,
    per_token_cast,
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
    swiglu_forward_and_per_token_cast,
)

f32 = np.float32


@pytest.fixture(autouse=True)
def _defaults():
    yield
    config.reset_runtime_config()


def _words(t: torch.Tensor) -> list[int]:
    return [v & 0xFFFFFFFF for v in t.contiguous().view(torch.int32).flatten().tolist()]


def _codes(q: torch.Tensor) -> list[int]:
    return q.contiguous().view(torch.uint8).flatten().tolist()


def _spec_rows() -> torch.Tensor:
    x = torch.zeros(2, 64)
    x[:, :4] = torch.tensor([1.0, -2.0, 3.0, -200.0])
    x[:, 32:36] = torch.tensor([2.0, 4.0, -5.0, 1.0])
    return x.bfloat16()


def _exp(x: np.float32) -> np.float32:
    """Correctly rounded where fp64 is not within an ulp of a tie, which these inputs are not."""
    with np.errstate(over="ignore"):
        return f32(np.exp(np.float64(x)))


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """One rounding of the exact value, to nearest even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = f32(float(exact))
    if not np.isfinite(near):
        return near
    around = [near, np.nextafter(near, f32(np.inf)), np.nextafter(near, f32(-np.inf))]
    distances = [abs(Fraction(float(v)) - exact) for v in around]
    best = min(distances)
    ties = [v for v, d in zip(around, distances) if d == best]
    return ties[0] if len(ties) == 1 else next(v for v in ties if int(v.view(np.uint32)) % 2 == 0)


def _witness(l, r, w, clamp):
    """``(v, t, l', r')`` of one element."""
    if clamp is not None:
        l, r = min(l, f32(clamp)), min(max(r, f32(-clamp)), f32(clamp))
    with np.errstate(over="ignore"):
        t = f32(f32(1) + _exp(-l))
        act = f32(f32(l / t) * r)
    return (act if w is None else f32(act * w)), t, l, r


def _data(rows: int, channels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 2 * channels, generator=torch.Generator().manual_seed(seed)) * 3


# ---------------------------------------------------------------------- forward


def test_specification_values_and_counts():
    count = torch.tensor([10, 20, 30, 40])
    v = swiglu_forward(_spec_rows(), "fp32", None, torch.ones(2), 2.5, 2.5, count)
    assert _words(v[0, :4]) == [0x4069F052, 0xBFBEB984, 0xC1670913, 0x80000000]
    assert not v[:, 4:].any()
    assert count.tolist() == [12, 22, 32, 104]


@pytest.mark.parametrize(
    ("round_sf", "codes", "scale"),
    [(False, [0x6E, 0xE4, 0xFE, 0x80], 0x3D04052F), (True, [0x67, 0xDC, 0xF6, 0x80], 0x3D800000)],
)
def test_specification_codes(round_sf, codes, scale):
    q, sf = swiglu_forward_and_per_token_cast(
        _spec_rows(), "e4m3", 32, None, torch.ones(2), 2.5, round_sf=round_sf, clamp_value=2.5
    )
    assert _codes(q[0, :4]) == codes
    assert _words(sf) == [scale] * 2


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_numpy_element_by_element(clamp, weighted):
    x, w = _data(6, 20), torch.randn(6, generator=torch.Generator().manual_seed(1))
    out = swiglu_forward(x, "fp32", None, w if weighted else None, 2.5 if weighted else None, clamp)
    for i, row in enumerate(x.numpy()):
        weight = f32(w.numpy()[i] * f32(2.5)) if weighted else None
        expected = [_witness(l, r, weight, clamp)[0] for l, r in zip(row[:20], row[20:])]
        assert out[i].numpy().tobytes() == np.array(expected, f32).tobytes()


def test_bf16_result_is_the_rounded_one():
    x = _data(5, 33).bfloat16()
    wide, narrow = swiglu_forward(x, "fp32"), swiglu_forward(x, "bf16")
    expected = wide.numpy().astype(ml_dtypes.bfloat16)
    assert narrow.view(torch.int16).numpy().tobytes() == expected.tobytes()


def test_clamp_on_every_form():
    """Gate 50 and up 50 with clamp 10: 99.99546, not 2500."""
    x = torch.full((32, 64), 50.0)
    expected = 100 / (1 + math.exp(-10))
    assert swiglu_forward(x, "fp32", clamp_value=10.0).unique().item() == pytest.approx(expected, rel=1e-7)
    for q, sf in (
        swiglu_forward_and_per_token_cast(x, "e4m3", 32, clamp_value=10.0),
        swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, clamp_value=10.0),
    ):
        assert q.float().unique().tolist() == [448.0]
        assert (448 * sf.max()).item() == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize("clamp", [0.0, -1.0])
def test_a_clamp_that_is_not_positive_is_refused_everywhere(clamp):
    x, grad = torch.ones(2, 64), torch.ones(2, 32)
    quantized = per_token_cast(x, "e4m3", 32)
    calls = (
        lambda: swiglu_forward(x, "fp32", clamp_value=clamp),
        lambda: swiglu_forward_and_per_token_cast(x, "e4m3", 32, clamp_value=clamp),
        lambda: swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, clamp_value=clamp),
        lambda: swiglu_backward(x, grad, "fp32", clamp_value=clamp),
        lambda: swiglu_backward_and_per_token_cast(quantized, grad, "e4m3", 32, clamp_value=clamp),
    )
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="greater than 0, or None for no clamp"):
            call()


def test_extreme_gates():
    """Past 88.73 the exponential overflows and the quotient is -0; Inf times 0 is NaN."""
    inf = math.inf
    gates = torch.tensor([[-88.7, -88.73, -200.0, -inf, inf, 200.0, math.nan]])
    out = swiglu_forward(torch.cat([gates, torch.ones(1, 7)], 1), "fp32")[0]
    assert -1e-36 < out[0].item() < 0
    assert _words(out[1:3]) == [0x80000000, 0x80000000]
    assert out[3].isnan()
    assert out[4:6].tolist() == [inf, 200.0]
    assert out[6].isnan()


def test_nan_passes_the_clamp_and_is_not_counted():
    x = torch.tensor([[math.nan, 1.0, math.inf, 1.0, math.nan, -math.inf]])
    count = torch.zeros(4, dtype=torch.int64)
    out = swiglu_forward(x, "fp32", clamp_value=2.0, clamped_count=count)
    assert out.isnan().tolist() == [[True, True, False]]
    assert out[0, 2].item() == pytest.approx(-4 / (1 + math.exp(-2)))
    assert count.tolist() == [1, 0, 1, 3]


def test_rows_of_experts_of_the_specification():
    """Counts 3, 0, 5, 2 at alignment 4: rows 0-2, 4-8 and 12-13 of 16 are valid."""
    psum = torch.tensor([3, 4, 9, 14], dtype=torch.int32)
    valid = [c == "1" for c in "111.11111...11.."]
    x = _data(16, 8)
    x[~torch.tensor(valid)] = math.nan
    count = torch.zeros(4, dtype=torch.int64)
    config.set_token_alignment(4)
    out = swiglu_forward(x, "fp32", psum, clamp_value=1e30, clamped_count=count)
    assert torch.equal(out[valid], swiglu_forward(x[valid], "fp32"))
    assert count.tolist() == [0, 0, 0, 10 * 8]
    grads = swiglu_backward(
        x, x[:, :8], "fp32", psum, torch.where(torch.tensor(valid), 1.0, math.nan), do_recompute=True
    )
    for grad in grads:
        assert _words(grad[~torch.tensor(valid)].reshape(-1)) == [0] * grad[~torch.tensor(valid)].numel()
        assert grad[valid].isfinite().all()


def test_an_empty_expert_whose_end_is_not_aligned():
    psum = torch.tensor([3, 3, 9, 9], dtype=torch.int32)
    count = torch.zeros(4, dtype=torch.int64)
    swiglu_forward(_data(12, 1), "fp32", psum, clamp_value=1.0, clamped_count=count, token_alignment=4)
    assert count[3].item() == 3 + 5


def test_weights_by_index():
    x, weights = _data(5, 4), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    pos = torch.tensor([3, -1, 0, 4, 2], dtype=torch.int32)
    out = swiglu_forward(x, "fp32", topk_weights=weights, pos_to_token_topk=pos)
    plain = swiglu_forward(x, "fp32")
    for row, factor in enumerate([8.0, 0.0, 1.0, 0.0, 4.0]):
        assert torch.equal(out[row], plain[row] * factor)


def test_index_past_the_weights_raises_when_validating(monkeypatch):
    monkeypatch.setattr(checks, "VALIDATE", True)
    pos = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"pos_to_token_topk must lie in \[-1, 4\), got values from 0 to 4"):
        swiglu_forward(torch.ones(2, 4), "fp32", topk_weights=torch.ones(2, 2), pos_to_token_topk=pos)


def test_routed_scaling_applies_where_it_is_given():
    """Gate weights that sum to 2.5 already hold the factor; giving it here too makes 6.25."""
    x, weights = torch.ones(8, 2), torch.full((8,), 2.5 / 8)
    once = swiglu_forward(x, "fp32", topk_weights=weights).sum().item()
    twice = swiglu_forward(x, "fp32", topk_weights=weights, routed_scaling_factor=2.5).sum().item()
    one = 1 / (1 + math.exp(-1))
    assert once == pytest.approx(2.5 * one)
    assert twice == pytest.approx(6.25 * one)


@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, {"round_sf": True, "use_packed_ue8m0": True}])
@pytest.mark.parametrize("npc", [32, 128, 5])
def test_cast_equals_the_composition(flags, npc):
    x, w = _data(7, 160), torch.rand(7)
    q, sf = swiglu_forward_and_per_token_cast(x, "e4m3", npc, None, w, 2.5, clamp_value=2.0, **flags)
    expected = per_token_cast(swiglu_forward(x, "fp32", None, w, 2.5, 2.0), "e4m3", npc, **flags)
    assert _codes(q) == _codes(expected[0])
    assert torch.equal(sf, expected[1])


def test_scale_bytes_of_the_specification():
    """Amax 448, 896, 449, 1e-6 and 224 in blocks of 32: bytes 7F 80 80 69 7E, in words of 4 or 2."""
    up = torch.zeros(1, 160)
    up[0, ::32] = torch.tensor([448.0, 896.0, 449.0, 1e-6, 224.0]) / 200
    x = torch.cat([torch.full((1, 160), 200.0), up], 1)
    flags = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    q, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 32, **flags)
    assert _words(sf[0]) == [0x6980807F, 0x0000007E]
    assert sf.stride() == (1, 4)
    assert q[0, ::32].float().tolist() == [448.0, 448.0, 224.0, 4.0, 448.0]
    with registry.use_backend(registry.ReferenceBackend(Layout(ue8m0_per_word=2, sf_align_bytes=0))):
        _, half = swiglu_forward_and_per_token_cast(x, "e4m3", 32, **flags)
    assert half.dtype == torch.int16
    assert [v & 0xFFFF for v in half[0].tolist()] == [0x807F, 0x6980, 0x007E]


def test_a_floor_of_zero():
    q, sf = swiglu_forward_and_per_token_cast(torch.zeros(1, 8), "e4m3", 4, sf_clamp_min=0.0)
    assert (_codes(q), sf.item()) == ([0] * 4, 0.0)
    _, sf = swiglu_forward_and_per_token_cast(torch.zeros(1, 8), "e4m3", 4)
    assert _words(sf) == [0x346FACAD]


@pytest.mark.parametrize("rows", [64, 70])
def test_per_channel_form_equals_the_composition(rows):
    x = _data(rows, 24).bfloat16()
    q, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, clamp_value=2.0)
    expected = per_channel_cast(swiglu_forward(x, "bf16", clamp_value=2.0), "e4m3", 32)
    assert _codes(q) == _codes(expected[0].t())
    assert torch.equal(sf, expected[1])
    straight, same = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, False, True, 2.0)
    assert _codes(straight) == _codes(expected[0])
    assert torch.equal(same, sf)


def test_a_row_does_not_depend_on_the_others():
    x = _data(40, 65)
    for rows in (1, 2, 5, 33):
        q, sf = swiglu_forward_and_per_token_cast(x[:rows], "e4m3", 32)
        whole = swiglu_forward_and_per_token_cast(x, "e4m3", 32)
        assert _codes(q) == _codes(whole[0][:rows])
        assert torch.equal(sf, whole[1][:rows])


# ---------------------------------------------------------------------- backward


def _backward_witness(l, r, g, w, clamp):
    act, t, lc, rc = _witness(l, r, None, clamp)
    s = f32(f32(1) / t)
    q = f32((g if w is None else f32(g * w)) * s)
    d_gate = f32(f32(q * rc) * _fma(lc, f32(f32(1) - s), f32(1)))
    d_up = f32(q * lc)
    if clamp is not None:
        d_gate = f32(0) if l > f32(clamp) else d_gate
        d_up = f32(0) if abs(r) > f32(clamp) else d_up
    return d_gate, d_up, act if w is None else f32(act * w)


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_backward_equals_numpy_element_by_element(clamp, weighted):
    x, g, w = _data(5, 16), _data(5, 8, seed=1), torch.rand(5, generator=torch.Generator().manual_seed(2))
    weight, factor = (w, 2.5) if weighted else (None, None)
    x_grad, *rest = swiglu_backward(x, g, "fp32", None, weight, factor, clamp, True)
    for i in range(5):
        scale = f32(w.numpy()[i] * f32(2.5)) if weighted else None
        row = [_backward_witness(*lrg, scale, clamp) for lrg in zip(x[i, :16].numpy(), x[i, 16:].numpy(), g[i].numpy())]
        gates, ups, acts = (np.array(column, f32).tobytes() for column in zip(*row))
        assert x_grad[i].numpy().tobytes() == gates + ups
        assert rest[-1][i].numpy().tobytes() == acts
    if weighted:
        dots = (g.double() * swiglu_forward(x, "fp32", clamp_value=clamp).double()).sum(1) * 2.5
        torch.testing.assert_close(rest[0].double(), dots, rtol=1e-6, atol=1e-6)


def test_at_exactly_the_clamp_the_gradient_passes():
    x = torch.tensor([[2.0, 2.0, 1.0, 1.0, 2.0, -2.0]])
    above = torch.nextafter(x, x.sign() * math.inf)
    passed = swiglu_backward(x, torch.ones(1, 3), "fp32", clamp_value=2.0)[0]
    assert (passed != 0).all()
    stopped = swiglu_backward(above, torch.ones(1, 3), "fp32", clamp_value=2.0)[0]
    assert stopped[0].eq(0).tolist() == [True, True, False, False, True, True]


def test_result_is_always_a_tuple():
    x, g, w = torch.ones(2, 4), torch.ones(2, 2), torch.ones(2)
    assert [t.shape for t in swiglu_backward(x, g, "fp32")] == [(2, 4)]
    assert [t.shape for t in swiglu_backward(x, g, "fp32", topk_weights=w)] == [(2, 4), (2,)]
    assert [t.shape for t in swiglu_backward(x, g, "fp32", do_recompute=True)] == [(2, 4), (2, 2)]
    shapes = [t.shape for t in swiglu_backward(x, g, "fp32", topk_weights=w, do_recompute=True)]
    assert shapes == [(2, 4), (2,), (2, 2)]
    three = swiglu_backward(x.view(1, 2, 4), g.view(1, 2, 2), "bf16", do_recompute=True)
    assert [(t.shape, t.dtype) for t in three] == [((2, 4), torch.bfloat16), ((2, 2), torch.bfloat16)]


def test_gradient_of_gathered_weights():
    x, g = _data(4, 8), _data(4, 4, seed=1)
    pos = torch.tensor([5, -1, 0, 2], dtype=torch.int32)
    weights = torch.rand(3, 2)
    _, grad = swiglu_backward(x, g, "fp32", topk_weights=weights, pos_to_token_topk=pos)
    dots = (g * swiglu_forward(x, "fp32")).sum(1)
    assert grad.flatten()[[1, 3, 4]].tolist() == [0.0] * 3
    torch.testing.assert_close(grad.flatten()[[5, 0, 2]], dots[[0, 2, 3]])
    none = swiglu_backward(x[:0], g[:0], "fp32", topk_weights=weights, pos_to_token_topk=pos[:0])[1]
    assert none.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("round_sf", [False, True])
def test_backward_cast_equals_the_composition(round_sf):
    """Quantized from the fp32 gradient, gate and up blocks apart; bf16 gradient beside it."""
    x = per_token_cast(_data(6, 64).bfloat16(), "e4m3", 32)
    g, w = _data(6, 32, seed=1), torch.rand(6)
    values = x[0].float() * x[1].repeat_interleave(32, 1)
    wide, weight_grad, act = swiglu_backward(values, g, "fp32", None, w, 2.5, 1.0, True)
    x_grad, (q, sf), *rest = swiglu_backward_and_per_token_cast(
        x, g, "e4m3", 32, None, w, 2.5, False, round_sf, clamp_value=1.0, do_recompute=True
    )
    expected = per_token_cast(wide, "e4m3", 32, round_sf=round_sf)
    assert torch.equal(x_grad, wide.bfloat16())
    assert _codes(q) == _codes(expected[0])
    assert torch.equal(sf, expected[1])
    assert torch.equal(rest[0], weight_grad)
    assert torch.equal(rest[1], act.bfloat16())


def test_padding_rows_have_scale_zero():
    x = (torch.full((4, 64), math.nan).to(torch.float8_e4m3fn), torch.full((4, 2), math.nan))
    x[0][0], x[1][0] = torch.ones(64).to(torch.float8_e4m3fn), 1.0
    psum = torch.tensor([1], dtype=torch.int32)
    flags = {"round_sf": True, "use_packed_ue8m0": True}
    x_grad, (q, sf) = swiglu_backward_and_per_token_cast(x, torch.ones(4, 32), "e4m3", 32, psum, **flags)
    assert not x_grad[1:].any()
    assert _codes(q[1:]) == [0] * 192
    assert sf[1:].flatten().tolist() == [0] * 3
    assert sf[0].item() != 0


def test_expanded_gradient():
    """What a sum over rows produces has row stride 0 and is read as it is; one number for all is refused."""
    x, row = _data(4, 8), torch.randn(1, 8)
    assert torch.equal(swiglu_backward(x, row.expand(4, 8), "fp32")[0], swiglu_backward(x, row.repeat(4, 1), "fp32")[0])
    with pytest.raises(InvalidArgumentError, match="act_x_grad must have unit stride along its last dimension"):
        swiglu_backward(x, torch.ones(1, 1).expand(4, 8), "fp32")


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [(swiglu_forward, ("fp32",)), (swiglu_forward_and_per_token_cast, ("e4m3", 64))],
)
def test_the_count_may_not_lie_in_what_is_read(operator, arguments):
    x = torch.zeros(4, 256, dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="clamped_count must not overlap x"):
        operator(x, *arguments, clamp_value=1.0, clamped_count=x.view(-1)[:8].view(torch.int64))
    assert not x.any()
