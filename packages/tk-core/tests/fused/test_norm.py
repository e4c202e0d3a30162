"""Golden results of RMSNorm: the specification's numbers, a witness in fp64, layouts, buffers and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError
from tk_core.quant import norm_backward, norm_forward, norm_forward_and_per_token_cast, per_token_cast

BF16 = torch.bfloat16
PACKED = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}


def _randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _codes(q: torch.Tensor) -> torch.Tensor:
    return q.contiguous().view(torch.uint8)


def _spec_inputs():
    x = torch.tensor([[1.0, 2.0, -3.0, 4.0]], dtype=BF16)
    residual = torch.tensor([[0.5, 0.0, 0.0, 0.0]], dtype=BF16)
    return x, torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=BF16), residual


# ---------------------------------------------------------------------- forward


def test_specification_values():
    x, weight, residual = _spec_inputs()
    out, rstd, h = norm_forward(x, weight, 1e-6, residual, 0.5, with_rstd=True)
    assert h.tolist() == [[1.5, 2.0, -3.0, 4.0]]
    assert rstd.view(torch.int32).item() == 0x3EB72DBE
    assert out.tolist() == [[0.267578125, 0.1787109375, -1.0703125, 0.71484375]]


def test_against_fp64():
    x, weight, residual = (
        _randn(9, 200, dtype=torch.float32),
        _randn(200, dtype=torch.float32, seed=1),
        _randn(9, 200, dtype=torch.float32, seed=2),
    )
    out, rstd, h = norm_forward(x, weight, 1e-5, residual, 0.3, with_rstd=True)
    exact = h.double()
    exact_rstd = (exact.square().mean(1) + 1e-5).rsqrt()
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=2.0**-24, atol=0)
    expected = exact * exact_rstd[:, None] * weight.double() * 0.3
    torch.testing.assert_close(out.double(), expected, rtol=6 * 2.0**-24, atol=0)


def test_eps_is_added_to_the_mean():
    out, rstd, _ = norm_forward(torch.tensor([[2.0, 0.0, 0.0, 0.0]]), None, 3.0, with_rstd=True)
    assert (rstd.item(), out[0, 0].item()) == (0.5, 1.0)


def test_the_sum_is_rounded_before_it_is_normalized():
    x, residual = torch.tensor([[256.0, 1.0]], dtype=BF16), torch.tensor([[1.0, 0.0]], dtype=BF16)
    _, _, h = norm_forward(x, None, 0.0, residual)
    assert h.tolist() == [[256.0, 1.0]]


def test_results_are_the_objects_given():
    x, weight, residual = _spec_inputs()
    out, buffer = torch.empty_like(x), torch.empty_like(x)
    results = norm_forward(x, weight, 1e-6, residual, out=out, residual_out=buffer)
    assert results[0] is out
    assert results[1] is None
    assert results[2] is buffer
    assert norm_forward(x, weight, 1e-6)[2] is x
    buffer.fill_(7.0)
    assert norm_forward(x, weight, 1e-6, residual_out=buffer)[2] is x
    assert buffer.unique().tolist() == [7.0]
    codes, bf16 = torch.empty(1, 4).to(torch.float8_e4m3fn), torch.empty_like(x)
    scales = torch.empty(1, 1)
    (q, sf), wide, rstd, h = norm_forward_and_per_token_cast(
        x,
        weight,
        1e-6,
        "e4m3",
        32,
        residual,
        with_out_bf16=True,
        out=(codes, scales),
        out_bf16=bf16,
        residual_out=buffer,
    )
    assert q is codes
    assert sf is scales
    assert wide is bf16
    assert rstd is None
    assert h is buffer


def test_the_residual_may_be_the_input():
    x = _randn(3, 40)
    out, _, h = norm_forward(x, None, 1e-6, x)
    same = norm_forward(x, None, 1e-6, x.clone())
    assert torch.equal(h, x + x)
    assert torch.equal(out, same[0])


@pytest.mark.parametrize("name", ["out", "residual_out"])
def test_buffers_that_overlap_are_refused(name):
    x, residual = _randn(3, 64), _randn(3, 64, seed=1)
    with pytest.raises(InvalidArgumentError, match=f"{name} must not overlap x"):
        norm_forward(x, None, 1e-6, residual, **{name: x})
    with pytest.raises(InvalidArgumentError, match=f"{name} must not overlap residual"):
        norm_forward(x, None, 1e-6, residual, **{name: residual})
    both = torch.empty(6, 64, dtype=BF16)
    with pytest.raises(InvalidArgumentError, match="residual_out must not overlap out"):
        norm_forward(x, None, 1e-6, residual, out=both[:3], residual_out=both[2:5])


@pytest.mark.parametrize(("batch", "gap"), [(None, 0), (2, 16)])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, PACKED, {"use_tma_aligned_col_major_sf": True}])
@pytest.mark.parametrize("npc", [32, 128])
def test_cast_equals_the_composition(batch, gap, flags, npc):
    shape = (5, 192 + gap) if batch is None else (batch, 6, 192 + gap)
    x = _randn(*shape)[..., :5, :192]
    weight = _randn(192, seed=1)
    normal = norm_forward(x, weight, 1e-6)[0]
    (q, sf), bf16, _, _ = norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", npc, with_out_bf16=True, **flags)
    assert torch.equal(bf16, normal)
    for i in range(batch or 1):
        item = (lambda t: t) if batch is None else (lambda t, i=i: t[i])
        codes, scales = per_token_cast(item(normal).contiguous(), "e4m3", npc, **flags)
        assert torch.equal(_codes(item(q)), _codes(codes))
        assert torch.equal(item(sf), scales)
        assert item(sf).stride() == scales.stride()


def test_float32_rows_are_quantized_unrounded():
    x = _randn(4, 96, dtype=torch.float32)
    normal = norm_forward(x, None, 1e-6)[0]
    (q, sf), bf16, _, _ = norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, with_out_bf16=True)
    expected = per_token_cast(normal, "e4m3", 32)
    assert torch.equal(_codes(q), _codes(expected[0]))
    assert torch.equal(sf, expected[1])
    assert torch.equal(bf16, normal.bfloat16())


def test_padding_of_batched_column_major_scales_is_zero():
    (_, sf), _, _, _ = norm_forward_and_per_token_cast(_randn(2, 5, 160), None, 1e-6, "e4m3", 32, **PACKED)
    assert (tuple(sf.shape), sf.stride()) == ((2, 5, 2), (16, 1, 8))
    whole = sf.as_strided((2, 2, 8), (16, 8, 1))
    assert not whole[..., 5:].any()
    assert not (whole[:, 1] >> 8).any()
    assert (whole[..., :5] != 0).all()


def _row_by_the_definition(t: int, block_m: int) -> int:
    i, padded = t % block_m, math.ceil(block_m / 128) * 128
    return t // block_m * padded + i // 128 * 128 + (i % 32) * 4 + (i % 128) // 32


def test_rows_of_the_fused_moe_kernel():
    """The specification's table for blocks of 192 tokens."""
    from tk_core.reference.quant.norm_forward import mega_moe_rows

    rows = mega_moe_rows(400, 192)
    tokens = [0, 1, 2, 31, 32, 63, 64, 96, 127, 128, 129, 159, 160, 191, 192, 383]
    assert rows[tokens].tolist() == [0, 4, 8, 124, 1, 125, 2, 3, 127, 128, 132, 252, 129, 253, 256, 509]
    assert rows.unique().numel() == 400
    untouched = sorted(set(range(256)) - set(rows[:192].tolist()))
    assert untouched[:5] == [130, 131, 134, 135, 138]
    assert len(untouched) == 64


@pytest.mark.parametrize("block_m", [192, 5])
def test_scales_for_the_fused_moe_kernel(block_m):
    x = _randn(200, 256)
    rows = -(-200 // block_m) * (-(-block_m // 128) * 128) + 2
    buffer = torch.full((2, rows), -1, dtype=torch.int32)
    view = buffer.t()[:200]
    (_, sf), _, _, _ = norm_forward_and_per_token_cast(
        x, None, 1e-6, "e4m3", 32, round_sf=True, mega_moe_sf=view, mega_moe_block_m=block_m
    )
    exponents = (sf.view(torch.int32) >> 23).view(200, 2, 4)
    expected = torch.full_like(buffer, -1)
    for t in range(200):
        for word in range(2):
            value = sum(int(exponents[t, word, j]) << (8 * j) for j in range(4))
            expected[word, _row_by_the_definition(t, block_m)] = value - (1 << 32) if value >= 1 << 31 else value
    assert torch.equal(buffer, expected)


def test_poison_stays_in_its_block():
    x = _randn(2, 64)
    x[0, 3] = math.nan
    (_, sf), _, _, _ = norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32)
    assert sf.isnan().tolist() == [[True, True], [False, False]]
    x[0, 3] = math.inf
    (_, sf), _, rstd, _ = norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, with_rstd=True)
    assert sf.isnan().tolist() == [[True, False], [False, False]]
    assert rstd[0].item() == 0


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_no_rows(shape):
    x = _randn(*shape)
    out, rstd, h = norm_forward(x, None, 1e-6, x.clone(), with_rstd=True)
    assert (out.shape, rstd.shape, h.shape) == (x.shape, x.shape[:-1], x.shape)
    (q, sf), _, _, _ = norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32)
    assert (tuple(q.shape), tuple(sf.shape)) == (shape, (*shape[:-1], 2))


@pytest.mark.parametrize(("rows", "columns"), [(1, 7168), (3, 65536)])
def test_a_row_does_not_depend_on_the_others(rows, columns):
    x = _randn(rows, columns, dtype=torch.float32)
    many = torch.cat([x, _randn(4, columns, dtype=torch.float32, seed=1)])
    assert torch.equal(norm_forward(many, None, 1e-6)[0][:rows], norm_forward(x, None, 1e-6)[0])


# ---------------------------------------------------------------------- backward


def test_gradient_of_a_unit_vector():
    """dz = x = [1, 0, 0, 0] and eps 1e-4: 0.000799, where reading the gradient after overwriting it gives -3.9976."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    rstd = norm_forward(x, None, 1e-4, with_rstd=True)[1]
    x_grad, none = norm_backward(x, x, None, rstd)
    assert x_grad[0].tolist() == pytest.approx([0.000799, 0, 0, 0], abs=2e-6)
    assert none is None


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("out_scale", [1.0, 0.3])
def test_against_autograd_in_fp64(weighted, out_scale):
    x, grad, residual_grad = (_randn(11, 40, dtype=torch.float32, seed=s) for s in (0, 1, 2))
    weight = _randn(40, dtype=torch.float32, seed=3)
    rstd = norm_forward(x, None, 1e-6, with_rstd=True)[1]
    x_grad, weight_grad = norm_backward(grad, x, weight if weighted else None, rstd, residual_grad, out_scale)
    h, w = x.double().requires_grad_(), weight.double().requires_grad_()
    y = h * (h.square().mean(1, keepdim=True) + 1e-6).rsqrt() * (w if weighted else 1) * out_scale
    loss = (y * grad.double()).sum() + (h * residual_grad.double()).sum() + 0 * w.sum()
    expected = torch.autograd.grad(loss, (h, w))
    torch.testing.assert_close(x_grad.double(), expected[0], rtol=1e-5, atol=1e-6)
    if weighted:
        torch.testing.assert_close(weight_grad.double(), expected[1], rtol=1e-6, atol=1e-6)
    else:
        assert weight_grad is None


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_weight_gradient_is_accumulated_in_the_given_buffer(dtype):
    x, grad, weight, rstd = _randn(9, 24), _randn(9, 24, seed=1), _randn(24, seed=2), torch.rand(9)
    fresh = norm_backward(grad, x, weight, rstd)[1]
    assert fresh.dtype == BF16
    total = _randn(24, dtype=dtype, seed=3)
    before = total.clone()
    result = norm_backward(grad, x, weight, rstd, weight_grad=total)[1]
    assert result is total
    exact = ((x.float() * rstd[:, None]).double() * grad.double()).sum(0).float()
    assert torch.equal(total, (before.float() + exact).to(dtype))


def test_no_rows_leave_a_zero_weight_gradient():
    x, weight = _randn(0, 24), _randn(24)
    x_grad, weight_grad = norm_backward(x, x, weight, torch.rand(0))
    assert (tuple(x_grad.shape), weight_grad.tolist()) == ((0, 24), [0.0] * 24)
    total = torch.full((24,), 3.0)
    norm_backward(x, x, weight, torch.rand(0), weight_grad=total)
    assert total.unique().tolist() == [3.0]


def test_one_row_of_zeros_has_a_zero_weight_gradient():
    for _ in range(10):
        weight_grad = norm_backward(_randn(1, 4), _randn(1, 4) * 0, _randn(4), torch.full((1,), 1e3))[1]
        assert weight_grad.tolist() == [0.0] * 4


def test_expanded_gradient():
    x, row, rstd = _randn(5, 24), _randn(1, 24, seed=1), torch.rand(5)
    expanded = norm_backward(row.expand(5, 24), x, None, rstd)[0]
    assert torch.equal(expanded, norm_backward(row.repeat(5, 1), x, None, rstd)[0])
    with pytest.raises(InvalidArgumentError, match="out_grad must have unit stride"):
        norm_backward(torch.ones(1, 1, dtype=BF16).expand(5, 24), x, None, rstd)


def test_a_weight_gradient_in_its_own_input_is_refused():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(InvalidArgumentError, match="weight_grad must not overlap weight"):
        norm_backward(x, x.clone(), weight, torch.rand(3), weight_grad=weight)


def test_rstd_of_another_dtype_is_refused():
    x = torch.randn(3, 8)
    with pytest.raises(InvalidDtypeError, match="rstd must be float32, got float64"):
        norm_backward(x, x, None, torch.rand(3).double())
