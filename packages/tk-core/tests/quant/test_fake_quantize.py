"""layers.fake_quantize: the values of the round trip, the gradient of the identity."""

from __future__ import annotations

import pytest
import torch

from tk_core import InvalidArgumentError, InvalidDtypeError, quant
from tk_core.layers import fake_quantize


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", [{}, {"round_sf": True}, {"use_e4m3_sf": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 80), (0, 64)])
def test_values_and_gradient(fmt: str, flags: dict[str, bool], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    before = x.detach().clone()
    y = fake_quantize(x, fmt, 32, **flags)
    rows = before.view(-1, shape[-1])
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    expected = quant.per_token_cast_back(quant.per_token_cast(rows, fmt, 32, **flags), name, 32).view(shape)
    assert torch.equal(y, expected)
    assert torch.equal(x, before)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_strided_input_and_gradient() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).t().requires_grad_()
    y = fake_quantize(x, "e4m3", 3)
    assert y.is_contiguous()
    assert torch.equal(y, fake_quantize(x.detach().contiguous(), "e4m3", 3))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 6))


def test_one_graph_for_any_number_of_rows() -> None:
    compiled = torch.compile(fake_quantize, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7, 64):
        x = torch.randn(rows, 64, requires_grad=True)
        y = compiled(x, "e2m1", 32, True)
        assert torch.equal(y, fake_quantize(x, "e2m1", 32, True))
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(rows, 64))


def test_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one dimension"):
        fake_quantize(torch.tensor(1.0), "e4m3", 32)
    with pytest.raises(InvalidDtypeError, match="x must be bfloat16 or float32"):
        fake_quantize(torch.zeros(4, 8, dtype=torch.float64), "e4m3", 32)
    with pytest.raises(InvalidArgumentError, match="use_e4m3_sf must not be combined with round_sf"):
        fake_quantize(torch.zeros(4, 8), "e4m3", 32, True, True)
