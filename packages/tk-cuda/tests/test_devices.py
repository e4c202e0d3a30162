"""Devices, streams and first calls: what takes a GPU, or two, and a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
from tk_core import config
from tk_core.cases import Cases, Maker, Sample, cases_of
from tk_core.conformance import engine
from tk_core.conformance.compare import mismatches
from tk_core.op import OPERATORS
from tk_core.registry import ReferenceBackend
from tk_cuda.backend import BACKEND

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs, found {GPUS}")
OPS = sorted(OPERATORS)


def _cases(op: str) -> Cases:
    found = cases_of(op)
    assert found is not None
    return found


def _results(op: str, arguments: Any) -> list[Tensor]:
    returned = engine.public_function(op)(*arguments.args, **arguments.kwargs)
    return engine._results(_cases(op), arguments, returned)


def _expected(op: str, sample: Sample, device: torch.device) -> list[Tensor]:
    with tk_core.use_backend(ReferenceBackend(BACKEND.layout)):
        return _results(op, sample.make(Maker(device, BACKEND.layout)))


def _fresh(code: str, **environment: str) -> str:
    """The output of a snippet in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------------- two GPUs


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_call_runs_where_its_tensors_are(op: str) -> None:
    """Results were allocated, and kernels launched, on the current device and its stream instead of the input's."""
    other = torch.device("cuda", 1)
    sample = _cases(op).samples[0]
    expected = _expected(op, sample, other)
    stream = torch.cuda.Stream(other)
    for run in ("first", "second", "planned"):
        arguments = sample.make(Maker(other, BACKEND.layout))
        memory = engine._memory([*arguments.args, *arguments.kwargs.values()])
        saved = [t.clone() for t in memory]
        torch.cuda.synchronize(other)
        with torch.cuda.stream(stream), tk_core.use_backend(BACKEND):
            for t in memory:
                t.zero_()
            torch.cuda._sleep(20_000_000)
            for t, s in zip(memory, saved):
                t.copy_(s)
            with torch.cuda.device(0):
                results = _results(op, arguments)
                assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(other)
        assert {t.device for t in results} <= {other}
        assert not mismatches(expected, results, _cases(op).tolerance, run)


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_gpu_gives_the_same_bits(op: str) -> None:
    """Ties were broken by the order in which threads came: ranks of one model disagreed on their experts."""
    sample = _cases(op).samples[0]
    found = []
    with tk_core.use_backend(BACKEND):
        for i in range(GPUS):
            results = _results(op, sample.make(Maker(torch.device("cuda", i), BACKEND.layout)))
            found.append([t.cpu() for t in results])
    for results in found[1:]:
        assert not mismatches(found[0], results, engine._EXACT)


@two_gpus
@pytest.mark.gpu
def test_a_process_stays_on_the_gpu_that_it_was_given() -> None:
    """With CUDA_VISIBLE_DEVICES=1 everything happens on the second GPU, which is number 0 there."""
    code = """
        import torch
        import tk_core
        q, sf = tk_core.quant.per_token_cast(torch.ones(4, 256, device="cuda", dtype=torch.bfloat16), "e4m3", 128)
        torch.cuda.synchronize()
        print(torch.cuda.device_count(), q.device, sf.unique().item() * 448, torch.cuda.get_device_properties(0).uuid)
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    count, device, amax, uuid = _fresh(code, CUDA_VISIBLE_DEVICES=visible[1]).split()
    assert (count, device, float(amax)) == ("1", "cuda:0", 1.0)
    assert uuid == str(torch.cuda.get_device_properties(1).uuid)


# ---------------------------------------------------------------------- one GPU


@pytest.fixture
def sms() -> Iterator[None]:
    before = config.get_num_sms()
    yield
    config.set_num_sms(before)


@one_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_the_number_of_multiprocessors(op: str, sms: None) -> None:
    """Grids were sized for a number that is divisible by four; partial sums were split by it."""
    device = torch.device("cuda", 0)
    samples = engine.samples_of(_cases(op), "quick")
    for sample in samples if op == "quant.norm_backward" else samples[:1]:
        found = {}
        with tk_core.use_backend(BACKEND):
            for n in (0, 1, 78, 114, 131, 132):
                config.set_num_sms(n)
                found[n] = _results(op, sample.make(Maker(device, BACKEND.layout)))
        for n, results in found.items():
            assert not mismatches(found[0], results, engine._EXACT, f"{sample.why}, num_sms = {n}")


@one_gpu
@pytest.mark.gpu
def test_equal_scores_give_the_same_experts_a_hundred_times() -> None:
    scores = torch.zeros(3, 257, device="cuda")
    scores[:, 1::2] = -0.0
    for _ in range(100):
        assert tk_core.moe.topk_gate(scores, 8).tolist() == [list(range(8))] * 3


@one_gpu
@pytest.mark.gpu
def test_scales_that_no_byte_can_hold_are_nan_and_never_truncated() -> None:
    """Values on a device are not looked at; the mantissa of 3.0 was dropped, which made it 2.0."""
    for bad in (3.0, -2.0, float("nan"), 2.0**-127):
        sf = torch.full((4, 4), 1.0, device="cuda")
        sf[1, 2] = bad
        ((sf0, sf1),) = tk_core.quant.batched_transpose_weight_sf([sf], 32, [False])
        assert [word.to_bytes(4, "little", signed=True) for word in sf0[32].tolist()] == [bytes([127, 127, 255, 127])]
        assert [word.to_bytes(4, "little", signed=True) for word in sf1[64].tolist()] == [bytes([127, 255, 127, 127])]
        x = torch.zeros(4, 32, dtype=torch.int8, device="cuda"), sf[:, 1:3].contiguous()  # two e2m1 in a byte
        made = tk_core.quant.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 64))
        assert made.sf.isnan().flatten().tolist() == [False, True, False, False]


@one_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", ["moe.topk_gate", "quant.per_token_cast", "quant.norm_forward", "transform.transpose"])
def test_the_first_call_of_a_process_may_be_captured(op: str, tmp_path: Path) -> None:
    """Loading a kernel during a capture broke it, or a later replay: with an empty cache, then with a full one."""
    code = f"""
        import torch
        from tk_core.cases import Maker, cases_of
        from tk_core.conformance import engine
        from tk_core.conformance.compare import mismatches
        from tk_core.registry import ReferenceBackend
        import tk_core
        from tk_cuda.backend import BACKEND

        op = {op!r}
        cases = cases_of(op)
        fresh = lambda: cases.samples[0].make(Maker("cuda", BACKEND.layout))
        function = engine.public_function(op)
        call = fresh()
        with tk_core.use_backend(ReferenceBackend(BACKEND.layout)):
            expected = engine._results(cases, call, function(*call.args, **call.kwargs))
        call = fresh()
        memory = engine._memory([*call.args, *call.kwargs.values()])
        saved = [t.clone() for t in memory]
        for t in memory:
            t.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), tk_core.use_backend(BACKEND):
            returned = function(*call.args, **call.kwargs)
        for t, s in zip(memory, saved):
            t.copy_(s)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        print(mismatches(expected, engine._results(cases, call, returned), cases.tolerance) or "equal")
    """
    for _ in range(2):
        assert _fresh(code, TK_CACHE_DIR=str(tmp_path / "cache")) == "equal"
