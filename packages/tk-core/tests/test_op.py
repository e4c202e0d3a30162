"""The operator core: one definition, two call paths, and everything PyTorch asks of an operator."""

from __future__ import annotations

import pytest
import torch

import tk_core
from tk_core import op
from tk_core.errors import DefinitionError, InvalidArgumentError, InvalidDtypeError
from tk_core.formats import TensorSpec
from tk_core.quant import per_token_cast

CAST = op.OPERATORS["quant.per_token_cast"]


def test_short_cut_is_on_and_can_be_turned_off(monkeypatch):
    x = torch.randn(3, 128)
    seen = []
    monkeypatch.setattr(CAST, "overload", lambda *a: seen.append(a) or torch.ops.tk_quant.per_token_cast(*a))
    per_token_cast(x, "e4m3", 128)
    assert not seen
    with op.short_cut(False):
        per_token_cast(x, "e4m3", 128)
    assert len(seen) == 1


def test_modes_subclasses_and_transforms_take_the_op_path(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        per_token_cast(torch.randn(3, 128), "e4m3", 128)
    assert "tk_quant.per_token_cast.default" in seen


def test_fake_tensors_get_shapes_and_strides():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(5, 640, device="cuda", dtype=torch.bfloat16)
        q, sf = per_token_cast(x, "e4m3", 128, None, True, True, True)
    assert (q.shape, q.dtype, q.device.type) == ((5, 640), torch.float8_e4m3fn, "cuda")
    assert (sf.shape, sf.stride(), sf.dtype) == ((5, 2), (1, 8), torch.int32)


def test_meta_tensors_need_no_backend():
    q, sf = per_token_cast(torch.empty(4, 256, device="meta"), "e4m3", 128)
    assert q.device.type == sf.device.type == "meta"


def test_results_never_require_grad_on_either_path():
    x = torch.randn(3, 128, requires_grad=True)
    for enabled in (True, False):
        with op.short_cut(enabled):
            q, sf = per_token_cast(x, "e4m3", 128)
        assert not q.requires_grad
        assert not sf.requires_grad


def test_out_buffers_are_used_and_checked():
    x = torch.randn(3, 128)
    q, sf = per_token_cast(x, "e4m3", 128)
    buffer = torch.empty_like(q)
    result = per_token_cast(x, "e4m3", 128, out=(buffer, None))
    assert result.data is buffer
    assert torch.equal(buffer.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(result.sf, sf)
    with pytest.raises(InvalidDtypeError, match=r"out\[0\] must be torch.float8_e4m3fn, got torch.float32"):
        per_token_cast(x, "e4m3", 128, out=(torch.empty(3, 128), None))
    with pytest.raises(InvalidArgumentError, match=r"out\[0\] must have shape \(3, 128\), got \(2, 128\)"):
        per_token_cast(x, "e4m3", 128, out=(buffer[:2], None))
    wide = torch.empty(3, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(InvalidArgumentError, match=r"out\[0\] must be contiguous"):
        per_token_cast(x, "e4m3", 128, out=(wide[:, :128], None))


def test_one_graph_serves_every_token_count():
    from torch._dynamo.testing import CompileCounter

    count = CompileCounter()
    compiled = torch.compile(
        lambda x: per_token_cast(x, "e4m3", 128, None, True), backend=count, fullgraph=True, dynamic=True
    )
    for rows in (2, 3, 17, 130):
        x = torch.randn(rows, 256)
        sf = compiled(x)[1]
        want = per_token_cast(x, "e4m3", 128, None, True)
        assert torch.equal(sf, want.sf)
        assert sf.stride() == want.sf.stride()
    assert count.frame_count == 1


def test_export_keeps_the_operator():
    class Module(torch.nn.Module):
        def forward(self, x):
            return per_token_cast(x, "e4m3", 128)[0]

    program = torch.export.export(Module(), (torch.randn(4, 256),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert any("tk_quant.per_token_cast" in str(n.target) for n in program.graph.nodes)
    x = torch.randn(9, 256)
    assert torch.equal(program.module()(x).view(torch.uint8), per_token_cast(x, "e4m3", 128)[0].view(torch.uint8))


def test_errors_reach_the_user_through_compile():
    compiled = torch.compile(lambda x: per_token_cast(x, "e4m3", 0), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="num_per_channels must be at least 1, got 0"):
        compiled(torch.randn(2, 128))


def test_vmap_does_not_run_the_short_cut_on_wrappers():
    x = torch.randn(2, 3, 128)
    sf = torch.vmap(lambda x: per_token_cast(x, "e4m3", 128)[1])(x)
    assert torch.equal(sf, torch.stack([per_token_cast(part, "e4m3", 128)[1] for part in x]))


def test_a_definition_must_agree_with_its_schema():
    with pytest.raises(DefinitionError, match="has parameters"):
        op.Operator("quant.wrong", "(Tensor x) -> Tensor", check=lambda y: None, outputs=lambda x: ())


def _add_one(x):
    x.add_(1)


def test_in_place_arguments_bump_their_version():
    def check(x):
        return None

    from tk_core import registry

    operator = op.Operator("quant.test_in_place", "(Tensor(a!) x) -> ()", check=check)
    try:
        kernel = registry.ReferenceKernel(_add_one, 1)
        backend = registry.ReferenceBackend()
        backend.kernel = lambda name: kernel
        with tk_core.use_backend(backend):
            for enabled in (True, False):
                x = torch.zeros(3)
                before = x._version
                with op.short_cut(enabled):
                    operator(x)
                assert x.tolist() == [1, 1, 1]
                assert x._version > before
    finally:
        del op.OPERATORS["quant.test_in_place"]


def test_gradient_partner_refuses_to_lose_gradients():
    operator = op.Operator(
        "quant.test_gradient",
        "(Tensor x) -> Tensor",
        check=lambda x: None,
        outputs=lambda x: (TensorSpec(tuple(x.shape), x.dtype),),
        gradient="tk_core.layers.thing",
    )
    try:
        with pytest.raises(InvalidArgumentError, match=r"x requires grad.*use tk_core\.layers\.thing"):
            operator(torch.zeros(2, requires_grad=True))
    finally:
        del op.OPERATORS["quant.test_gradient"]


@pytest.mark.parametrize("bad", [None, 3, "x", [1.0]])
def test_a_missing_tensor_is_an_error_not_a_crash(bad):
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match="x must be a"):
        per_token_cast(bad, "e4m3", 128)


def test_a_repeated_signature_skips_checks_but_not_differences(planning, monkeypatch):
    calls = []
    check = CAST.check
    monkeypatch.setattr(CAST, "check", lambda *a: calls.append(a) or check(*a))
    x = torch.randn(3, 256)
    first = per_token_cast(x, "e4m3", 128)
    per_token_cast(x, "e4m3", 128)  # the second call makes the plan
    again = per_token_cast(x, "e4m3", 128)
    assert len(calls) == 2
    assert torch.equal(first.sf, again.sf)
    wide = torch.randn(3, 512)[:, :256]
    assert torch.equal(per_token_cast(wide, "e4m3", 128).sf, per_token_cast(wide.clone(), "e4m3", 128).sf)
    with pytest.raises(InvalidArgumentError, match="unit stride"):
        per_token_cast(torch.randn(256, 3).t(), "e4m3", 128)
    assert per_token_cast(x, "e4m3", 64).sf.shape == (3, 4)
    assert per_token_cast(torch.randn(0, 256), "e4m3", 128).sf.shape == (0, 2)


def test_a_plan_belongs_to_the_selection_that_made_it(planning):
    from tk_core.backend import Layout
    from tk_core.registry import ReferenceBackend

    x = torch.randn(3, 256)
    arguments = ("e4m3", 32, None, True, True, True)
    for _ in range(3):
        assert per_token_cast(x, *arguments).sf.dtype == torch.int32
        with tk_core.use_backend(ReferenceBackend(Layout(2, 0))):
            assert per_token_cast(x, *arguments).sf.dtype == torch.int16
    assert per_token_cast(x, *arguments).sf.dtype == torch.int32


def test_what_a_backend_binds_runs_from_the_third_call_on_and_is_counted(planning):
    from tk_core import registry

    runs = []

    class Binding(registry.ReferenceBackend):
        def bind(self, kernel, outs, args):
            kernel(outs, *args)
            return lambda outs, args: (runs.append(args), kernel(outs, *args))[1]

    x = torch.randn(3, 256)
    with tk_core.use_backend(Binding()), registry.count_calls() as counted:
        for _ in range(5):
            assert torch.equal(per_token_cast(x, "e4m3", 128).sf, CAST.run((*_arguments(x),))[1])
        assert len(runs) == 3
        assert sum(counted.values()) == 10
        with op.allocator(lambda spec, like: spec.empty(like).fill_(0)):  # buffers of unknown alignment
            per_token_cast(x, "e4m3", 128)
        assert len(runs) == 3
        tk_core.config.set_num_sms(3)
        tk_core.config.reset_runtime_config()
        per_token_cast(x, "e4m3", 128)
        assert len(runs) == 3


def test_discovering_backends_again_forgets_what_the_earlier_ones_bound(planning, monkeypatch):
    from tk_core import registry

    runs = []

    def bind(self, kernel, outs, args):
        kernel(outs, *args)
        return lambda outs, args: (runs.append(self), kernel(outs, *args))[1]

    monkeypatch.setattr(registry.ReferenceBackend, "bind", bind, raising=False)
    x = torch.randn(3, 256)
    for _ in range(3):
        expected = per_token_cast(x, "e4m3", 128)
    assert runs == [registry.found()["reference"]]
    registry.load()
    for _ in range(3):
        assert torch.equal(per_token_cast(x, "e4m3", 128).sf, expected.sf)
    assert len(runs) == 2
    assert runs[1] is registry.found()["reference"]
    assert runs[1] is not runs[0]


def _arguments(x):
    return (x, None, "e4m3", 128, 0, 0, False, False, False, False, False, 1e-4, 4, 16)


def test_a_planned_call_with_arguments_in_place_checks_overlaps_and_bumps_versions(planning):
    query, cache = torch.randn(2, 3, 4), torch.randn(8, 4)
    for _ in range(3):
        key = torch.randn(2, 3, 4)
        before = key._version
        tk_core.transform.apply_rotary(query, cache, key)
        assert key._version > before
    both = torch.randn(2, 4, 4)
    with pytest.raises(InvalidArgumentError, match="overlap"):
        tk_core.transform.apply_rotary(both[:, :3], cache, both[:, 1:])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(shape, torch.float32, *rest)
        for shape, *rest in [
            ((3, 4),), ((1, 1),), ((1, 4),), ((4, 1),), ((0, 4),), ((),), ((1,),), ((2, 1, 3),),
            ((3, 4), (1, 3), 12), ((3, 4), (1, 4), 16), ((1, 1), (1, 4), 4), ((3, 4), (5, 1)), ((0, 4), (1, 0), 0),
        ]
    ],
)  # fmt: skip
def test_results_of_a_plan_look_like_the_first_ones(spec):
    like = torch.zeros(2)
    first, planned = spec.empty(like), spec.maker(like)()
    assert planned.shape == first.shape
    assert planned.stride() == first.stride()
    assert planned.dtype == first.dtype
    assert planned.untyped_storage().nbytes() == first.untyped_storage().nbytes()
    assert not planned.requires_grad


def test_an_argument_that_cannot_be_hashed_is_named(monkeypatch):
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match="fmt"):
        per_token_cast(torch.randn(2, 128), ["e4m3"], 128)
    with pytest.raises((InvalidArgumentError, InvalidDtypeError), match="num_per_channels"):
        per_token_cast(torch.randn(2, 128), "e4m3", [128])


@pytest.mark.parametrize(
    ("name", "bad", "must"),
    [
        ("round_sf", 1, "be a bool, got int"),
        ("round_sf", "no", "be a bool, got str"),
        ("num_per_channels", 128.0, "be an int, got float"),
        ("num_per_channels", True, "be an int, got bool"),
        ("num_per_channels", 2**70, "fit in 64 bits"),
        ("use_e4m3_sf", None, "be a bool, got NoneType"),
    ],
)
def test_an_argument_of_another_type_is_named_also_when_an_equal_one_is_planned(planning, name, bad, must):
    x = torch.randn(2, 128)
    legal = {"num_per_channels": 1 if bad is True else 128, "round_sf": bad == 1, "use_e4m3_sf": False}
    for _ in range(3):
        per_token_cast(x, "e4m3", **legal)
        with pytest.raises((InvalidArgumentError, InvalidDtypeError), match=f"{name} must {must}"):
            per_token_cast(x, "e4m3", **{**legal, name: bad})


def test_zeros_of_both_signs_are_different_plans(planning):
    x = torch.ones(1, 2)
    for _ in range(3):
        for factor in (0.0, -0.0):
            out = tk_core.quant.norm_forward(x, None, 0.0, out_scale=factor)[0]
            assert out.signbit().all() == (str(factor) == "-0.0")


def test_a_lazily_negated_view_matches_no_plan_of_what_it_views(planning):
    x = torch.randn(2, 128)
    for _ in range(3):
        per_token_cast(x, "e4m3", 128)
        with pytest.raises(InvalidArgumentError, match=r"x must hold its values .* got a lazily negated view"):
            per_token_cast(torch._neg_view(x), "e4m3", 128)


def test_tensors_without_plain_memory_are_refused_by_name():
    from tk_core.moe import normalize_weight

    dense = torch.rand(2, 4)
    for bad in (dense.to_sparse(), dense.to_sparse_csr(), torch.nested.nested_tensor([dense]), torch._neg_view(dense)):
        with pytest.raises(InvalidArgumentError, match="topk_weights must"):
            normalize_weight(bad)
    with pytest.raises(InvalidDtypeError, match=r"topk_weights must be a torch\.Tensor, got str"):
        normalize_weight("weights")


def test_out_is_checked_before_anything_is_written():
    from tk_core.moe import normalize_weight

    weights = torch.rand(2, 4)
    before = weights.clone()
    for bad, message in [
        ((None,), "out must be a tuple of 2 elements"),
        (3, "out must be a tuple of 2 elements"),
        ((None, "x"), r"out\[1\] must be a torch.Tensor, got str"),
        ((None, weights), r"out\[1\] must not overlap topk_weights"),
        ((None, torch.empty(2, 4, requires_grad=True)), r"out\[1\] must not require grad"),
    ]:
        with pytest.raises((InvalidArgumentError, InvalidDtypeError), match=message):
            normalize_weight(weights, out=bad)
    assert torch.equal(weights, before)
    x, sf = torch.randn(2, 256), torch.empty(1, 2).expand(2, 2)
    with pytest.raises(InvalidArgumentError, match=r"out\[1\] must have no overlapping rows"):
        per_token_cast(x, "e4m3", 128, out=(None, sf))


def test_no_way_to_call_loses_a_gradient():
    from tk_core.quant import norm_forward, per_token_cast_and_cast_back

    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(InvalidArgumentError, match="x requires grad"):
        norm_forward(x, None, 0.0, out=torch.empty(2, 4))
    with pytest.raises(InvalidArgumentError, match="x requires grad"), op.short_cut(False):
        norm_forward(x, None, 0.0)
    with pytest.raises(Exception, match="x requires grad"):
        torch.compile(lambda x: norm_forward(x, None, 0.0)[0], backend="eager")(x)
    with pytest.raises(InvalidArgumentError, match="x requires grad"):
        per_token_cast_and_cast_back(x, "e4m3", 4)
    with torch.no_grad():
        per_token_cast_and_cast_back(x, "e4m3", 4)


def test_optional_arguments_that_are_written_may_be_none_under_the_default_compiler():
    from tk_core.quant import norm_forward, swiglu_forward

    x = torch.randn(3, 8)
    for function in (lambda x: norm_forward(x, None, 1e-6)[0], lambda x: swiglu_forward(x, "fp32")):
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x), function(x))


def test_inference_tensors_can_be_written_anywhere():
    with torch.inference_mode():
        query = torch.tensor([[[1.0, 0.0]]])
        tk_core.transform.apply_rotary(query, torch.tensor([[0.0, 1.0]]))
    tk_core.transform.apply_rotary(query, torch.tensor([[0.0, 1.0]]))
    assert query.tolist() == [[[-1.0, 0.0]]]


def test_plans_made_while_a_setting_changes_are_not_kept(planning):
    from tk_core import registry

    class Changing(registry.ReferenceBackend):
        def bind(self, kernel, outs, args):
            kernel(outs, *args)
            op.forget_plans()
            return lambda outs, args: kernel(outs, *args)

    x = torch.randn(2, 128)
    with tk_core.use_backend(Changing()):
        for _ in range(2):
            per_token_cast(x, "e4m3", 128)
    assert not CAST._plans


@pytest.mark.parametrize("bad", [3, None, object()])
def test_use_backend_takes_names_and_backends_only(bad):
    with pytest.raises(InvalidDtypeError, match="backends must be names or Backend objects"), tk_core.use_backend(bad):
        pass
    with pytest.raises(InvalidArgumentError, match="fallback must be"), tk_core.use_backend(fallback="x"):
        pass


def test_lists_of_tensors_are_planned_by_the_facts_of_each(planning):
    from tk_core import registry
    from tk_core.quant import batched_transpose_weight_sf

    runs = []

    class Binding(registry.ReferenceBackend):
        def bind(self, kernel, outs, args):
            kernel(outs, *args)
            return lambda outs, args: (runs.append(args), kernel(outs, *args))[1]

    def scales(*shape):
        return torch.exp2(torch.randint(-8, 8, shape).float())

    with tk_core.use_backend(Binding()):
        for i in range(4):
            one, other = scales(1, 2), scales(3, 2, 1)
            got = batched_transpose_weight_sf([one, other], 128, [False, True])
            with op.short_cut(False):
                expected = batched_transpose_weight_sf([one, other], 128, [False, True])
            for pair, want in zip(got, expected):
                assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(pair, want))
            assert len(runs) == max(0, i - 1)
        batched_transpose_weight_sf([other, one], 128, [False, True])
        assert len(runs) == 2
        with pytest.raises(InvalidArgumentError, match=r"sf\[1\]"):
            batched_transpose_weight_sf([one, torch._neg_view(other)], 128, [False, True])
