"""What a public function leaves out when a call repeats an earlier one: its own work, and nothing that shows."""

from __future__ import annotations

import inspect
import pickle
import threading

import pytest
import torch

import tk_core
from tk_core import op, quant, registry, repeat
from tk_core.errors import InvalidArgumentError, InvalidDtypeError
from tk_core.quant.amax_clamp import reset_amax_clamp_for_quant, set_amax_clamp_for_quant

pytestmark = pytest.mark.usefixtures("planning")


@pytest.fixture
def in_full(monkeypatch):
    """The arguments of each call of a function that was not cut short."""
    calls = []

    def watch(function):
        table = _table(function)
        body = function.__wrapped__

        def counted(*args, **kwargs):
            calls.append((args, kwargs))
            return body(*args, **kwargs)

        counted.__signature__ = inspect.signature(body)
        counted.__annotations__ = body.__annotations__
        monkeypatch.setitem(function.__globals__, "_in_full", counted)
        table.forget()
        return calls

    return watch


def _table(function):
    return function.__globals__["_table"]


def test_the_fourth_call_goes_straight_to_the_planned_launch(in_full):
    calls = in_full(quant.per_token_cast)
    for rows in (3, 5):
        for _ in range(5):
            x = torch.randn(rows, 256)
            q = quant.per_token_cast(x, "e4m3", 128)
            assert type(q) is quant.QuantTensor
            with op.short_cut(False):
                expected = quant.per_token_cast.__wrapped__(x, "e4m3", 128)
            assert torch.equal(q.sf, expected.sf)
            assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert len(calls) == 6  # of each shape: the first, the one that makes the plan, the one that is watched


@pytest.mark.parametrize(
    "change",
    [
        {"num_per_channels": 64},
        {"round_sf": True},
        {"x": torch.zeros(2, 256)[:, :128]},
        {"x": torch.zeros(3, 128)},
        {"x": torch.zeros(2, 128, dtype=torch.bfloat16)},
        {"x": torch.zeros(257)[1:].reshape(2, 128)},
        {"x": torch.zeros(2, 128, requires_grad=True)},
    ],
    ids=lambda change: ",".join(change),
)
def test_a_call_that_differs_in_a_fact_is_made_in_full(in_full, change):
    calls = in_full(quant.per_token_cast)
    same = {"x": torch.randn(2, 128), "fmt": "e4m3", "num_per_channels": 128}
    for _ in range(5):
        quant.per_token_cast(**same)
    assert len(calls) == 3
    quant.per_token_cast(**{**same, **change})
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("num_per_channels", 128.0),
        ("num_per_channels", True),
        ("round_sf", 0),
        ("fmt", ["e4m3"]),
        ("x", None),
        ("x", 3),
    ],
)
def test_a_wrong_argument_is_named_also_when_an_equal_one_is_known(name, bad):
    same = {"x": torch.randn(2, 128), "fmt": "e4m3", "num_per_channels": 1 if bad is True else 128, "round_sf": False}
    for _ in range(5):
        quant.per_token_cast(**same)
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match=f"{name} must"):
        quant.per_token_cast(**{**same, name: bad})


def test_unknown_and_missing_arguments_are_those_of_the_function():
    with pytest.raises(TypeError, match=r"per_token_cast\(\) got an unexpected keyword argument 'group'"):
        quant.per_token_cast(torch.randn(2, 128), "e4m3", group=128)
    with pytest.raises(TypeError, match=r"per_token_cast\(\) missing 1 required positional argument"):
        quant.per_token_cast(torch.randn(2, 128), "e4m3")


def test_settings_that_a_function_reads_are_seen():
    x = torch.full((2, 128), 1e-3)
    before = [quant.per_token_cast(x, "e4m3", 128).sf for _ in range(5)][-1]
    set_amax_clamp_for_quant("e4m3", False, 448.0)
    try:
        assert [quant.per_token_cast(x, "e4m3", 128).sf.max().item() for _ in range(5)] == [1.0] * 5
    finally:
        reset_amax_clamp_for_quant()
    assert torch.equal(quant.per_token_cast(x, "e4m3", 128).sf, before)


def test_a_gradient_that_would_be_lost_is_refused_where_it_is_recorded():
    x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64)
    with torch.no_grad():
        for _ in range(5):
            quant.norm_forward(x, weight, 1e-6)
    with pytest.raises(InvalidArgumentError, match="requires grad"):
        quant.norm_forward(x, weight, 1e-6)


def test_a_result_in_the_callers_buffers_is_written_there():
    x = torch.randn(2, 256)
    expected = quant.per_token_cast(x, "e4m3", 128)
    for _ in range(6):
        out = quant.QuantTensor(torch.empty_like(expected.data), torch.zeros_like(expected.sf))
        got = quant.per_token_cast(x, "e4m3", 128, out=out)
        assert got.data is out.data
        assert torch.equal(out.sf, expected.sf)


def test_a_quantized_input_is_two_tensors(in_full):
    x = torch.randn(4, 256)
    calls = in_full(quant.per_token_cast_back)
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        q = quant.per_token_cast(x * scale, "e4m3", 128)
        got = quant.per_token_cast_back(q, "fp32", 128)
        assert torch.equal(got, q.data.float() * q.sf.repeat_interleave(128, 1))
    assert len(calls) == 3


def test_tensors_that_are_one_in_a_call_and_two_in_the_next():
    for _ in range(5):
        a, b = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
        cache = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(2, 4).contiguous()
        want_a, want_b = a.clone(), b.clone()
        tk_core.transform.apply_rotary(want_a, cache)
        tk_core.transform.apply_rotary(want_b, cache)
        tk_core.transform.apply_rotary(a, cache, b)
        assert torch.equal(a, want_a)
        assert torch.equal(b, want_b)
        with pytest.raises(InvalidArgumentError, match="overlap"):
            tk_core.transform.apply_rotary(a, cache, a)


def test_tensors_that_a_function_makes_are_made_anew(in_full):
    calls = in_full(quant.norm_forward)
    weight = torch.rand(64)
    results = []
    for _ in range(6):
        x, residual = torch.randn(3, 64), torch.randn(3, 64)
        out, rstd, h = quant.norm_forward(x, weight, 1e-6, residual, with_rstd=True)
        expected = quant.norm_forward.__wrapped__(x, weight, 1e-6, residual, with_rstd=True)
        for got, want in zip((out, rstd, h), expected):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
        results += [out, rstd, h]
    assert len(calls) == 2  # what is expected makes the plan
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)


def test_a_result_that_is_an_argument_is_that_argument():
    weight = torch.rand(64)
    for _ in range(5):
        x = torch.randn(3, 64)
        _, rstd, h = quant.norm_forward(x, weight, 1e-6)
        assert h is x
        assert rstd is None


def test_one_tensor_for_two_arguments_is_never_taken_for_two(in_full):
    calls = in_full(quant.norm_forward)
    for i in range(6):
        x = torch.randn(3, 64)
        h = quant.norm_forward(x, None, 1e-6, x)[2]
        assert torch.equal(h, x + x)
        assert len(calls) == i + 1
    for _ in range(6):
        x, residual = torch.randn(3, 64), torch.randn(3, 64)
        assert torch.equal(quant.norm_forward(x, None, 1e-6, residual)[2], x + residual)
        assert torch.equal(quant.norm_forward(x, None, 1e-6, x)[2], x + x)


def test_buffers_of_the_caller_are_checked_for_overlaps_and_get_a_new_version(in_full):
    calls = in_full(quant.norm_forward)
    for _ in range(6):
        x, residual, buffer = (torch.randn(3, 64) for _ in range(3))
        before = buffer._version
        assert quant.norm_forward(x, None, 1e-6, residual, residual_out=buffer)[2] is buffer
        assert torch.equal(buffer, x + residual)
        assert buffer._version > before
    assert len(calls) == 3
    both = torch.randn(6, 64)
    with pytest.raises(InvalidArgumentError, match="residual_out must not overlap"):
        quant.norm_forward(both[:3], None, 1e-6, torch.randn(3, 64), residual_out=both[1:4])
    accumulated = torch.zeros(64)
    for i in range(1, 6):
        grad = torch.ones(3, 64)
        got = quant.norm_backward(grad, grad, torch.ones(64), torch.ones(3), weight_grad=accumulated)[1]
        assert got is accumulated
        assert torch.equal(accumulated, torch.full((64,), 3.0 * i))


def test_results_in_tuples_of_their_own_kind(in_full):
    calls = in_full(quant.swiglu_backward_and_per_token_cast)
    for _ in range(6):
        x = quant.QuantTensor(torch.randn(2, 256).to(torch.float8_e4m3fn), torch.rand(2, 2))
        arguments = (x, torch.randn(2, 128), "e4m3", 128, None, torch.rand(2))
        got = quant.swiglu_backward_and_per_token_cast(*arguments, do_recompute=True)
        want = quant.swiglu_backward_and_per_token_cast.__wrapped__(*arguments, do_recompute=True)
        assert type(got[1]) is quant.QuantTensor
        for a, b in zip((got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:])):
            assert torch.equal(a.float(), b.float())
    assert len(calls) == 2


@pytest.mark.parametrize("view", [torch._neg_view, lambda x: torch.complex(x, x).conj()], ids=["negated", "conjugated"])
def test_lazy_views_are_not_what_they_view(view):
    x = torch.randn(2, 128)
    plain = x if not view(x).is_complex() else torch.complex(x, x)
    for _ in range(5):
        tk_core.transform.transpose(plain)
    with pytest.raises(InvalidArgumentError, match="x must hold its values"):
        tk_core.transform.transpose(view(x))


def test_runs_are_counted_and_belong_to_the_selection():
    class Binding(registry.ReferenceBackend):
        def bind(self, kernel, outs, args):
            kernel(outs, *args)
            return lambda outs, args: kernel(outs, *args)

    x = torch.randn(3, 256)
    for _ in range(5):
        quant.per_token_cast(x, "e4m3", 128)
    with tk_core.use_backend(Binding()), registry.count_calls() as counted:
        for _ in range(5):
            quant.per_token_cast(x, "e4m3", 128)
        assert sum(counted.values()) == 5


def test_compiled_and_traced_calls_see_the_operator(in_full):
    x = torch.randn(2, 128)
    for _ in range(5):
        expected = quant.per_token_cast(x, "e4m3", 128).sf
    compiled = torch.compile(lambda x: quant.per_token_cast(x, "e4m3", 128).sf, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    graph = torch.export.export(_Cast(), (x,)).graph
    assert any("tk_quant.per_token_cast" in str(node.target) for node in graph.nodes)


class _Cast(torch.nn.Module):
    def forward(self, x):
        return quant.per_token_cast(x, "e4m3", 128).sf


def test_a_call_that_fails_is_learned_by_nobody():
    for _ in range(6):
        with pytest.raises(InvalidArgumentError, match="num_per_channels"):
            quant.per_token_cast(torch.randn(2, 128), "e4m3", 0)
    assert not _table(quant.per_token_cast).calls


def test_a_function_that_is_no_planned_operator_is_called_as_it_is(in_full):
    calls = in_full(quant.per_token_cast)
    buffers = [quant.QuantTensor(torch.empty(2, 128, dtype=torch.float8_e4m3fn), torch.empty(2, 1)) for _ in range(9)]
    for out in buffers:
        quant.per_token_cast(torch.randn(2, 128), "e4m3", 128, out=out)
    assert len(calls) == len(buffers)


def test_threads_share_what_is_known():
    inputs = [torch.randn(2, 128) for _ in range(5)]
    expected = [quant.per_token_cast.__wrapped__(x, "e4m3", 128).sf for x in inputs]
    op.forget_plans()
    wrong = []

    def work(i):
        for _ in range(200):
            if not torch.equal(quant.per_token_cast(inputs[i], "e4m3", 128).sf, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(_table(quant.per_token_cast).calls) <= 2  # addresses modulo 16 may differ


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(repeat, "_MOST_CALLS", 3)
    table = _table(quant.per_token_cast)
    for calls in (1, 3):
        for columns in range(2, 20, 2):
            for _ in range(calls):
                quant.per_token_cast(torch.ones(1, columns), "e4m3", 2)
            assert len(table.calls) <= len(table.tries) <= 3
    assert table.calls


def test_a_thread_does_not_wait_for_another_that_learns():
    x = torch.randn(2, 128)
    with repeat._lock:
        for _ in range(5):
            quant.per_token_cast(x, "e4m3", 128)
    assert not _table(quant.per_token_cast).calls


def test_a_repeatable_function_is_still_itself():
    assert pickle.loads(pickle.dumps(quant.per_token_cast)) is quant.per_token_cast
    assert "num_per_channels" in inspect.signature(quant.per_token_cast).parameters
    assert quant.per_token_cast.__doc__.startswith("Quantize")
