"""Inputs that broke such operators elsewhere, with the right values, for every operator of the kind."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
from tk_core import InvalidArgumentError, layers, moe, quant, transform
from tk_core.cases import tensors_in

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SMALLEST = 2.2321428616578487e-07
"""The scale of a block of zeros: fp32 1e-4 / 448."""


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _same(first: Any, second: Any) -> bool:
    """Whether two results hold the same bits."""
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


CASTS: dict[str, Callable[[Tensor, bool], Any]] = {
    "per_token_cast": lambda x, r: quant.per_token_cast(x, "e4m3", 32, round_sf=r),
    "per_block_cast": lambda x, r: quant.per_block_cast(x, "e4m3", (32, 32), round_sf=r),
    "per_channel_cast": lambda x, r: quant.per_channel_cast(x, "e4m3", 32, r),
    "per_channel_cast_fused": lambda x, r: quant.per_channel_cast_fused(x, "e4m3", 32, r),
    "per_channel_cast_and_transpose": lambda x, r: quant.per_channel_cast_and_transpose(x, "e4m3", 32, r),
}
FUSED: dict[str, Callable[[Tensor, bool], Any]] = {
    "swiglu, tokens": lambda x, r: quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, round_sf=r),
    "swiglu, channels": lambda x, r: quant.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32, r),
    "norm": lambda x, r: quant.norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, round_sf=r)[0],
}


# ---------------------------------------------------------------------- scales


@pytest.mark.parametrize("name", [*CASTS, *FUSED])
@pytest.mark.parametrize(("round_sf", "sf"), [(False, SMALLEST), (True, 2.0**-22)])
def test_a_block_of_zeros_has_a_scale_and_no_nan(name: str, round_sf: bool, sf: float) -> None:
    """A scale of 0 made 0 / 0: codes were NaN, and dequantization spread them."""
    made = (CASTS | FUSED)[name](torch.zeros(32, 64), round_sf)
    assert made.sf.unique().tolist() == [sf]
    assert made.data.view(torch.uint8).unique().tolist() == [0]


@pytest.mark.parametrize("name", list(CASTS))
def test_a_block_of_negative_zeros_keeps_their_sign(name: str) -> None:
    made = CASTS[name](torch.full((32, 64), -0.0), False)
    assert made.data.view(torch.uint8).unique().tolist() == [0x80]


@pytest.mark.parametrize("name", list(CASTS))
@pytest.mark.parametrize(
    ("amax", "byte"), [(0.43750003, 118), (448.0, 0x7F), (449.0, 0x80), (896.0, 0x80), (224.0, 0x7E)]
)
def test_one_ulp_above_a_power_of_two_rounds_the_scale_up(name: str, amax: float, byte: int) -> None:
    """ceil(log2(x)) in fp32 gave 2**-10 for an amax of 0.43750003, whose codes then saturated."""
    x = torch.zeros(32, 32)
    x.fill_diagonal_(-amax)
    assert CASTS[name](x, True).sf.unique().tolist() == [2.0 ** (byte - 127)]
    if name == "per_token_cast":
        y = x.clone()
        quant.per_token_cast_and_cast_back(y, "e4m3", 32, True)
        assert y.diagonal().unique().item() == pytest.approx(-amax, rel=3e-3)


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("first", [1e4, math.nan, math.inf])
def test_a_gathered_tail_does_not_see_the_first_token(round_sf: bool, first: float) -> None:
    """Rows past the end were read from token 0 and joined the amax: here of data that is quantized already, too."""
    x = torch.ones(9, 64)
    x[0] = first
    index = torch.ones(144, dtype=torch.int32)
    index[:16] = 0
    expected = 2.0**-8 if round_sf else (torch.tensor(1.0) / 448).item()
    plain = quant.per_channel_cast_fused(x, "e4m3", 128, round_sf, pos_to_token=index)
    assert plain.sf[1].unique().tolist() == [expected]
    pair = torch.ones(9, 64).to(E4M3), x[:, ::32].contiguous()
    again = quant.per_channel_cast_fused(pair, "e4m3", 128, round_sf, 32, index)
    assert torch.equal(again.sf[1], plain.sf[1])
    assert torch.equal(again.sf[0].isnan(), plain.sf[0].isnan())


def test_scales_of_4001_rows_of_576_columns_end_where_they_should() -> None:
    """Tails of the scale grid were written past its end: 4.5 groups in a row, rows that no tile divides."""
    x = _randn(4001, 576, dtype=BF16)
    for n, sf in ((128, torch.full((4001, 8), 7.0)), (64, torch.full((4001, 12), 7.0))):
        groups = -(-576 // n)
        quant.per_token_cast(x, "e4m3", n, out=(None, sf[:, 1 : 1 + groups]))
        assert sf[:, 0].unique().tolist() == [7.0]
        assert sf[:, 1 + groups :].unique().tolist() == [7.0]
        amax = torch.nn.functional.pad(x.float().abs(), (0, groups * n - 576)).view(4001, groups, n).amax(2)
        assert torch.equal(sf[:, 1 : 1 + groups], amax / 448)
    wide = torch.full((32, 8), 7.0)
    quant.per_block_cast(x, "e4m3", (128, 128), out=(None, wide[:, 1:6]))
    assert wide[:, [0, 6, 7]].unique().tolist() == [7.0]
    assert wide[31, 5].item() == (x[3968:, 512:].abs().max().float() / 448).item()


@pytest.mark.parametrize("column_major", [False, True])
def test_quantized_values_are_the_same_from_every_stride_of_their_scales(column_major: bool) -> None:
    """Scale strides were assumed: M = 5, K = 640 has two words a row, and column-major strides (1, 8)."""
    flags = {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": column_major}
    q, sf = quant.per_token_cast(_randn(5, 640), "e4m3", 128, **flags)
    assert (sf.shape, sf.stride()) == ((5, 2), (1, 8) if column_major else (2, 1))
    wide = torch.full((5, 7), -1, dtype=torch.int32)
    wide[:, 3:5] = sf
    for reader in (
        lambda p: quant.per_token_cast_back(p, "bf16", 128),
        lambda p: quant.cast_back(p, "fp32", (1, 128)),
        lambda p: quant.per_token_cast(p, "e4m3", 32, (1, 128)),
        lambda p: quant.per_channel_cast(p, "e4m3", 32, False, 128),
        lambda p: quant.per_channel_cast_fused(p, "e4m3", 32, False, 128),
    ):
        expected = reader((q, sf.contiguous()))
        assert _same(reader((q, sf)), expected)
        assert _same(reader((q, wide[:, 3:5])), expected)


# ---------------------------------------------------------------------- strides, rows, gradients

MATRIX: dict[str, Callable[[Tensor], Any]] = {
    **{name: lambda x, cast=cast: cast(x, False) for name, cast in (CASTS | FUSED).items()},
    "per_token_cast_to_e5m6": lambda x: quant.per_token_cast_to_e5m6(x, 32),
    "per_token_cast_with_sf_only": lambda x: quant.per_token_cast_with_sf_only(x, "e4m3", 32),
    "per_token_cast_with_precomputed_sf": lambda x: quant.per_token_cast_with_precomputed_sf(
        x, "e4m3", 64, torch.ones(x.shape[0], 1)
    ),
    "per_token_cast_and_cast_back": lambda x: quant.per_token_cast_and_cast_back(x, "e4m3", 32),
    "per_block_cast_with_sf_only": lambda x: quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32)),
    "per_block_cast_with_precomputed_sf": lambda x: quant.per_block_cast_with_precomputed_sf(
        x, "e4m3", (64, 64), torch.ones(1, 1)
    ),
    "swiglu_forward": lambda x: quant.swiglu_forward(x, "fp32"),
    "swiglu_backward": lambda x: quant.swiglu_backward(x, torch.ones(x.shape[0], x.shape[1] // 2), "fp32"),
    "norm_forward": lambda x: quant.norm_forward(x, None, 1e-6),
    "norm_backward": lambda x: quant.norm_backward(x, x, None, torch.ones(x.shape[0])),
    "topk_gate": lambda x: moe.topk_gate(x, 4),
    "transpose": transform.transpose,
    "batched_transpose": lambda x: transform.batched_transpose(x[None]),
    "apply_rotary": lambda x: transform.apply_rotary(x[:, None], torch.ones(64, x.shape[1])),
}


@pytest.mark.parametrize("name", list(MATRIX))
@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2]])
def test_matrices_without_contiguous_rows_are_refused(name: str, view: Callable[[Tensor], Tensor]) -> None:
    """A transposed matrix, or every other column of one, was read as if its rows were contiguous."""
    with pytest.raises(InvalidArgumentError, match="unit stride"):
        MATRIX[name](view(torch.ones(64, 128))[:64])


ROWS: dict[str, Callable[[Tensor], Any]] = {
    "per_token_cast": lambda x: quant.per_token_cast(x, "e2m1", 32, round_sf=True),
    "per_token_cast_to_e5m6": lambda x: quant.per_token_cast_to_e5m6(x, 96),
    "per_token_cast_with_sf_only": lambda x: quant.per_token_cast_with_sf_only(x, "e4m3", 32),
    "swiglu_forward": lambda x: quant.swiglu_forward(x, "fp32"),
    "swiglu, tokens": lambda x: tuple(quant.swiglu_forward_and_per_token_cast(x, "e4m3", 16)),
    "swiglu_backward": lambda x: quant.swiglu_backward(x, x[:, :48], "fp32"),
    "norm_forward": lambda x: quant.norm_forward(x, None, 1e-6, with_rstd=True)[:2],
    "norm, cast": lambda x: tuple(quant.norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32)[0]),
    "norm_backward": lambda x: quant.norm_backward(x, x, None, torch.ones(x.shape[0]))[0],
    "topk_gate": lambda x: moe.topk_gate(x, 8),
    "normalize_weight": lambda x: moe.normalize_weight(x.abs()),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_does_not_depend_on_how_many_there_are(name: str) -> None:
    """Another kernel or split for another number of rows gave other bits of the same row."""
    row = _randn(1, 96, seed=5)
    alone = tensors_in(ROWS[name](row))
    for rows in (1, 2, 3, 4, 5, 127, 128, 129, 4097):
        x = _randn(rows, 96, seed=6)
        x[rows // 2] = row
        together = tensors_in(ROWS[name](x))
        assert _same([t[rows // 2] for t in together], [t[0] for t in alone])


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: layers.rms_norm(x, torch.full((64,), 2.0)),
        lambda x: layers.rms_norm(x, torch.full((64,), 2.0), residual=x),
        lambda x: layers.swiglu(x, clamp_value=1.0),
        lambda x: layers.rotary_embedding(x[:, None], _randn(5, 64, seed=1)),
        lambda x: layers.normalize_weight(x.abs()),
    ],
)
def test_results_are_the_same_bits_with_and_without_gradients(layer: Callable[[Tensor], Any]) -> None:
    """The path without gradients was another implementation: it left out the weight."""
    x = _randn(5, 64).requires_grad_()
    with torch.no_grad():
        without = layer(x)
    assert _same([t.detach() for t in tensors_in(layer(x))], without)


def test_a_norm_weight_of_two_doubles_the_result_on_both_paths() -> None:
    x, two = _randn(5, 64).requires_grad_(), torch.full((64,), 2.0)
    expected = 2 * layers.rms_norm(x.detach())
    assert torch.equal(layers.rms_norm(x, two), expected)
    with torch.no_grad():
        assert torch.equal(layers.rms_norm(x, two), expected)


BACKWARD: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: quant.norm_backward(g, _randn(6, 64, seed=1), _randn(64, seed=2), torch.ones(6), g),
    "swiglu": lambda g: quant.swiglu_backward(
        _randn(6, 128, seed=1),
        g,
        "fp32",
        None,
        torch.rand(6, generator=torch.Generator().manual_seed(0)),
        2.5,
        1.0,
        True,
    ),
    "swiglu, cast": lambda g: quant.swiglu_backward_and_per_token_cast(
        quant.per_token_cast(_randn(6, 128, seed=1), "e4m3", 32), g, "e4m3", 32
    ),
    "normalize_weight": lambda g: moe.normalize_weight_backward(
        g, torch.ones(6), torch.full((6, 64), 0.1), g[:, 0].clone()
    ),
}


@pytest.mark.parametrize("name", list(BACKWARD))
def test_a_gradient_can_be_used_twice(name: str) -> None:
    """The kernel wrote its result over the caller's gradient, so that a second call got another one."""
    grad = _randn(6, 64)
    before = grad.clone()
    first = [t.clone() for t in tensors_in(BACKWARD[name](grad))]
    assert torch.equal(grad, before)
    assert _same(BACKWARD[name](grad), first)


def test_every_buffer_given_is_filled_and_returned() -> None:
    """A declared result was not returned, or the buffer was filled and another tensor returned."""
    x, codes = _randn(32, 64), lambda *shape: torch.zeros(*shape).to(E4M3)
    given: list[tuple[Any, Callable[[Any], Any]]] = [
        ((codes(32, 64), torch.zeros(32, 2)), lambda o: quant.per_token_cast(x, "e4m3", 32, out=o)),
        ((codes(32, 64), torch.zeros(1, 2)), lambda o: quant.per_block_cast(x, "e4m3", (32, 32), out=o)),
        (torch.zeros(32, 2), lambda o: quant.per_token_cast_with_sf_only(x, "e4m3", 32, out_sf=o)),
        (torch.zeros(1, 2), lambda o: quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32), out_sf=o)),
        (
            codes(32, 64),
            lambda o: quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, torch.ones(32, 1), out=o),
        ),
        (
            codes(32, 64),
            lambda o: quant.per_block_cast_with_precomputed_sf(x, "e4m3", (32, 64), torch.ones(1, 1), out=o),
        ),
        (torch.zeros(32, 64), lambda o: quant.norm_forward(x, None, 1e-6, out=o)[0]),
        (
            (codes(32, 64), torch.zeros(32, 2)),
            lambda o: quant.norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, out=o)[0],
        ),
        (torch.zeros(32, 4, dtype=torch.int64), lambda o: moe.topk_gate(x, 4, out=o)),
        ((torch.zeros(32), torch.zeros(32, 64)), lambda o: moe.normalize_weight(x.abs() + 1, out=o)),
        (
            torch.zeros(32, 64),
            lambda o: moe.normalize_weight_backward(x, torch.ones(32), torch.ones(32, 64), out=o),
        ),
    ]
    for out, function in given:
        returned = tensors_in(function(out))
        assert all(a is b for a, b in zip(returned, tensors_in(out), strict=True))
        assert all(t.view(torch.uint8).any() for t in returned)
        assert isinstance(function(None), (Tensor, tuple))
    assert quant.per_token_cast_and_cast_back(x.clone(), "e4m3", 32) is None
    assert transform.apply_rotary(x[:, None].clone(), torch.ones(32, 64)) is None


def test_the_clamp_is_there_in_every_form_of_swiglu() -> None:
    """The clamp was missing on one path: gate 50 and up 50 with clamp 10 give 99.99546, not 2500."""
    x = torch.full((32, 64), 50.0)
    expected = 99.99546
    assert quant.swiglu_forward(x, "fp32", clamp_value=10.0).unique().tolist() == pytest.approx([expected], rel=1e-7)
    assert layers.swiglu(x.requires_grad_(), clamp_value=10.0).unique().tolist() == pytest.approx([expected], rel=1e-7)
    x = x.detach()
    for made in (
        quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, clamp_value=10.0),
        quant.swiglu_forward_and_per_channel_cast_and_transpose(x.bfloat16(), "e4m3", 32, clamp_value=10.0),
    ):
        assert (448 * made.sf).unique().tolist() == pytest.approx([expected], rel=2.0**-8)
    again = quant.swiglu_backward(x, torch.ones(32, 32), "fp32", None, torch.ones(32), 1.0, 10.0, True)
    assert any(
        t.shape == (32, 32) and t.unique().tolist() == pytest.approx([expected], rel=1e-6) for t in tensors_in(again)
    )


# ---------------------------------------------------------------------- the packages


@pytest.mark.parametrize(
    "function",
    [
        lambda x: quant.per_block_cast(x, "e4m3", (32, 32)).sf,
        lambda x: quant.per_channel_cast(x, "e4m3", 32).sf,
        lambda x: quant.swiglu_forward(x, "fp32"),
        lambda x: quant.norm_forward(x, None, 1e-6)[0],
        lambda x: moe.topk_gate(x, 8),
        lambda x: moe.normalize_weight(x)[1],
        transform.transpose,
    ],
)
def test_one_graph_serves_every_number_of_tokens(function: Callable[[Tensor], Tensor]) -> None:
    """Without a fake kernel the graph broke; with a constant shape in it, each number of tokens compiled again."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    count = CompileCounter()
    compiled = torch.compile(function, backend=count, fullgraph=True, dynamic=True)
    for rows in (2, 3, 17, 130):
        x = _randn(rows, 64)
        got, expected = compiled(x), function(x)
        assert _same(got, expected)
        assert got.stride() == expected.stride()
    assert count.frame_count == 1


@pytest.mark.parametrize("package", ["tk-core", "tk-cuda", "tk-ascend"])
def test_no_package_pins_another_one_or_changes_pytest(package: str) -> None:
    """An exact pin conflicts with whatever else is installed; a plugin that loads itself patches others' tests."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here")
    assert not [r for r in distribution.requires or () if "==" in r.split(";")[0]]
    assert not [e for e in distribution.entry_points if e.group.startswith("pytest")]


def test_numbers_of_experts_are_one_domain() -> None:
    """Expert counts that a backend did not foresee failed late: 16, 72, 128, 288 and 384 all work."""
    for experts in (16, 72, 128, 288, 384):
        scores = _randn(3, experts)
        assert torch.equal(moe.topk_gate(scores, 6), scores.argsort(dim=1, descending=True, stable=True)[:, :6])
    with pytest.raises(tk_core.InvalidDtypeError, match="out must be"):
        moe.topk_gate(scores, 6, out=torch.zeros(3, 6, dtype=torch.int32))
