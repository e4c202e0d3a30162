"""Layers: gradients in fp64 against finite differences, composition, compilation, dtypes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import gradcheck

import tk_core
from tk_core import layers, registry
from tk_core.layers import RMSNorm, RotaryEmbedding, SwiGLU, rms_norm, rotary_embedding, swiglu

F64 = torch.float64


def _randn(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return values.to(dtype).requires_grad_()


def _leaf(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone().requires_grad_()


def test_swiglu_gradient():
    assert gradcheck(swiglu, (_randn(3, 10),))


def test_swiglu_gradient_with_weights_clamp_and_factor():
    x = _randn(2, 3, 10, seed=1)
    assert (x.detach().abs() - 0.7).abs().min() > 1e-4, "a finite difference must not cross the clamp"

    def f(x, w):
        return swiglu(x, w, clamp_value=0.7, routed_scaling_factor=2.5)

    assert gradcheck(f, (x, _randn(6, seed=2)))


def test_swiglu_gradient_of_gathered_weights():
    pos = torch.tensor([4, 1, -1, 0, 3], dtype=torch.int32)

    def f(x, w):
        return swiglu(x, w, pos_to_token_topk=pos)

    assert gradcheck(f, (_randn(5, 8), _randn(3, 2, seed=1)))


def test_swiglu_gradient_of_rows_of_experts():
    psum = torch.tensor([2, 3, 6], dtype=torch.int32)
    valid = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool)

    def f(x, w):
        out = swiglu(x, w, psum_num_tokens_per_expert=psum, token_alignment=4)
        return torch.where(valid[:, None], out, 0)

    x, w = _randn(8, 6), _randn(8, seed=1)
    assert gradcheck(f, (x, w))
    grads = torch.autograd.grad(f(x, w).sum(), (x, w))
    assert all((g[~valid] == 0).all() for g in grads)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_rms_norm_gradient(weight, residual):
    inputs = [
        _randn(3, 2, 7),
        _randn(7, seed=1) if weight else None,
        1e-3,
        _randn(3, 2, 7, seed=2) if residual else None,
    ]
    assert gradcheck(rms_norm, tuple(inputs))


def test_rms_norm_gradient_of_the_sum_alone():
    x, residual = _randn(3, 7), _randn(3, 7, seed=1)
    _, h = rms_norm(x, _randn(7, seed=2), residual=residual)
    grads = torch.autograd.grad((h * 3).sum(), (x, residual))
    assert all((g == 3).all() for g in grads)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("conjugate", [True, False])
def test_rotary_gradient(interleaved, conjugate):
    cache, positions = torch.randn(9, 6), torch.tensor([3, 0, 8, 8])

    def f(q, k):
        return rotary_embedding(q, cache, k, positions, interleaved, conjugate)

    assert gradcheck(f, (_randn(4, 2, 10), _randn(4, 1, 8, seed=1)))


def test_rotary_gradient_of_one_of_two():
    q, k = _randn(2, 5, 1, 4), _randn(2, 5, 1, 4, seed=1)
    cache = torch.randn(8, 4)
    (grad,) = torch.autograd.grad(rotary_embedding(q, cache, k)[1].sum(), k)
    (alone,) = torch.autograd.grad(rotary_embedding(k, cache).sum(), k)
    assert torch.equal(grad, alone)


def test_rotary_copies_the_other_channels():
    q = _randn(3, 2, 12, dtype=torch.bfloat16).detach()
    out = rotary_embedding(q, torch.randn(3, 4))
    assert torch.equal(out[..., :8], q[..., :8])
    assert not torch.equal(out[..., 8:], q[..., 8:])


def test_rotary_module_turns_back():
    rope = RotaryEmbedding(8, 32, base=100.0)
    q = _randn(2, 5, 3, 8, dtype=torch.float32).detach()
    turned = rope(q, seqlen_offset=7)
    back = rotary_embedding(turned, rope.cos_sin_cache, conjugate=True, seqlen_offset=7)
    torch.testing.assert_close(back, q)
    angle = 9 * 100.0 ** (-2 / 8)
    expected = (
        q[0, 2, 0, 1].double() * torch.tensor(angle, dtype=F64).cos()
        - q[0, 2, 0, 5].double() * torch.tensor(angle, dtype=F64).sin()
    )
    torch.testing.assert_close(turned[0, 2, 0, 1].double(), expected, rtol=1e-5, atol=1e-6)


def test_rotary_module_keeps_its_angles_in_fp32():
    rope = RotaryEmbedding(8, 32)
    table = rope.cos_sin_cache.clone()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), rope).bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(rope.cos_sin_cache, table)
    assert rope(torch.ones(3, 1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert rope.double().cos_sin_cache.dtype == torch.float32
    assert rope.to("meta").half().cos_sin_cache.dtype == torch.float32


def test_rotary_module_scores_depend_on_the_distance_alone():
    rope = RotaryEmbedding(16, 64)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    scores = [(rope(q, seqlen_offset=s + 5) * rope(k, seqlen_offset=s)).sum().item() for s in (0, 10, 40)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_to_the_eager_composition(dtype):
    """A block of norm, projection and SwiGLU, forward and backward, against PyTorch's own operators."""
    x, residual = (_randn(17, 64, dtype=dtype, seed=s) for s in (0, 1))
    norm, act = RMSNorm(64, dtype=dtype), SwiGLU()
    w = (_randn(64, 96, seed=2).detach() / 8).to(dtype).requires_grad_()
    y, h = norm(x, residual)
    out = act(y @ w) + h[:, :48]
    grads = torch.autograd.grad(out.float().square().sum(), (x, residual, norm.weight, w))

    xs, rs, ws = _leaf(x), _leaf(residual), _leaf(w)
    weight = torch.ones(64, dtype=dtype, requires_grad=True)
    hs = xs + rs
    ys = torch.nn.functional.rms_norm(hs, (64,), weight, 1e-6)
    gate, up = (ys @ ws).float().chunk(2, 1)
    outs = (torch.nn.functional.silu(gate) * up).to(dtype) + hs[:, :48]
    expected = torch.autograd.grad(outs.float().square().sum(), (xs, rs, weight, ws))
    tolerance = {"rtol": 5e-2, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    for a, b in zip((out, *grads), (outs, *expected)):
        torch.testing.assert_close(a, b, **tolerance)


def test_float32_weight_of_a_bfloat16_norm_gets_a_float32_gradient():
    x = _randn(300, 16, dtype=torch.bfloat16)
    norm = RMSNorm(16)
    norm(x).float().sum().backward()
    h = x.detach().double()
    expected = (h * (h.square().mean(1, keepdim=True) + 1e-6).rsqrt()).sum(0)
    assert norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(norm.weight.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_that_are_expanded_or_transposed():
    x = _randn(5, 8, dtype=torch.float32)
    for f in (swiglu, rms_norm):
        (grad,) = torch.autograd.grad(f(x).sum(), x)
        (same,) = torch.autograd.grad(f(x), x, torch.ones_like(f(x)))
        assert torch.equal(grad, same)
        columns = torch.randn(f(x).shape[1], 5).t()
        (grad,) = torch.autograd.grad(f(x), x, columns)
        (same,) = torch.autograd.grad(f(x), x, columns.contiguous())
        assert torch.equal(grad, same)


def test_gradients_are_not_overwritten():
    x, g = _randn(5, 8, dtype=torch.float32), torch.randn(5, 8)
    before = g.clone()
    y, h = rms_norm(x, None, residual=torch.randn(5, 8))
    torch.autograd.grad((y, h), x, (g, g))
    q = x.unsqueeze(1)
    torch.autograd.grad(rotary_embedding(q, torch.randn(5, 8)), x, g.unsqueeze(1))
    assert torch.equal(g, before)


def test_second_derivatives_are_refused():
    x = _randn(3, 8)
    (grad,) = torch.autograd.grad(swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_operators_do_not_swallow_gradients():
    x = _randn(3, 8, dtype=torch.float32)
    with pytest.raises(tk_core.InvalidArgumentError, match=r"use tk_core\.layers\.swiglu"):
        tk_core.quant.swiglu_forward(x, "fp32")
    with pytest.raises(tk_core.InvalidArgumentError, match=r"use tk_core\.layers\.rms_norm"):
        tk_core.quant.norm_forward(x, None, 1e-6)
    with torch.no_grad():
        assert torch.equal(tk_core.quant.swiglu_forward(x, "fp32"), swiglu(x))
        assert torch.equal(tk_core.quant.norm_forward(x, None, 1e-6)[0], rms_norm(x))


def test_compiled_block_equals_eager():
    norm, rope, act = RMSNorm(32), RotaryEmbedding(8, 64), SwiGLU(clamp_value=2.0)

    def block(x, residual):
        y, h = norm(x, residual)
        q = rope(y.view(1, -1, 2, 16))
        return act(q.reshape(-1, 32)), h

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 11):
        results = []
        for f in (block, compiled):
            x = _randn(tokens, 32, dtype=torch.float32, seed=tokens)
            y, h = f(x, _randn(tokens, 32, dtype=torch.float32, seed=1))
            grads = torch.autograd.grad((y.square().sum() + h.sum()), (x, norm.weight))
            results.append((y, h, *grads))
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_exported_names():
    assert {"swiglu", "rms_norm", "rotary_embedding", "SwiGLU", "RMSNorm", "RotaryEmbedding"} <= set(layers.__all__)


class _Other(registry.ReferenceBackend):
    name = "other"


@pytest.mark.parametrize(
    ("layer", "op"),
    [
        (lambda x: rms_norm(x), "quant.norm_backward"),
        (lambda x: swiglu(x), "quant.swiglu_backward"),
        (lambda x: rotary_embedding(x[:, None], torch.randn(4, 8))[..., 0], "transform.apply_rotary"),
        (lambda x: layers.normalize_weight(x)[1].square(), "moe.normalize_weight_backward"),
    ],
)
def test_backward_runs_on_the_backend_of_forward_in_whatever_thread(layer, op):
    x = torch.rand(4, 8, requires_grad=True)
    with tk_core.use_backend(_Other()):
        loss = layer(x).sum()
    with registry.count_calls() as calls:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert set(calls) == {(op, "other")}
    assert x.grad is not None


def test_normalize_weight_gradient():
    weights = torch.rand(5, 3, dtype=torch.float64).float().requires_grad_()
    denominator, normalized = layers.normalize_weight(weights)
    (2 * denominator.sum() + normalized[:, 0].sum()).backward()
    exact = weights.detach().double().requires_grad_()
    total = exact.sum(dim=1, keepdim=True)
    (2 * total.sum() + (exact / total)[:, 0].sum()).backward()
    assert torch.allclose(weights.grad, exact.grad.float(), rtol=1e-5, atol=1e-6)
    weights.grad = None
    layers.normalize_weight(weights)[0].sum().backward()
    assert torch.equal(weights.grad, torch.ones(5, 3))
