"""The example in examples/train_moe.py: a few steps of it, and the parts that judge a run."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import sys
from types import ModuleType

import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "train_moe.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_moe"] = module
    spec.loader.exec_module(module)
    return module


def test_too_few_steps_fail_the_verdict(demo, tmp_path, capsys, monkeypatch):
    text = demo.read_text()[:50_000]
    monkeypatch.setattr(demo, "read_text", lambda: text)
    assert demo.main(["--device", "cpu", "--steps", "3", "--sample", "5", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED held-out loss" in printed
    assert "passed every parameter received a nonzero gradient" in printed
    computed = {line.split()[1] for line in printed.splitlines() if " reference " in line}
    assert computed >= {
        "moe.topk_gate",
        "moe.normalize_weight",
        "moe.normalize_weight_backward",
        "quant.per_token_cast",
        "quant.cast_back",
        "quant.norm_forward",
        "quant.norm_backward",
        "quant.swiglu_forward",
        "quant.swiglu_backward",
        "transform.apply_rotary",
    }
    record = json.loads((tmp_path / "loss.json").read_text())
    assert len(record["losses"]) == 3
    assert record["losses"][-1] < record["losses"][0]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_seed_gives_one_curve(demo):
    config = demo.Config(steps=2, batch=2, context=32)
    text = demo.read_text()
    curves = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        curves.append(demo.train(demo.LanguageModel(config), text, seed, demo.Console()).losses)
    assert curves[0] == curves[1] != curves[2]


def test_a_parameter_without_gradient_is_named(demo):
    run = demo.Run([3.0], 1.0, ["blocks.0.router"])
    judged = {sentence: passed for passed, sentence in demo.verdicts(run, 2.0, 2.3)}
    assert judged == {
        "held-out loss 2.000 nats per byte; a bigram model has 2.300": True,
        "no gradient reached blocks.0.router": False,
    }


def test_the_bigram_model_by_hand(demo):
    """Of the pairs of "abab", "ab" was seen twice and "ba" once; smoothing adds 0.05 for each of 256 bytes."""
    train, held_out = (torch.tensor(list(text)) for text in (b"abab", b"aba"))
    expected = -(math.log(2.05 / 14.8) + math.log(1.05 / 13.8)) / 2
    assert demo.bigram_loss(train, held_out) == pytest.approx(expected)


def test_the_text_beats_uniform_bytes_and_is_split_without_overlap(demo):
    text = demo.read_text()
    train, held_out = demo.split(text)
    assert len(train) + len(held_out) == len(text) > 400_000
    assert demo.bigram_loss(train, held_out) < 2.6


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([3.0] * 100, None),
        ([3.0] * 99, "99 in the other curve"),
        ([3.03, *[3.0] * 99], "the first 20 losses differ"),
        ([*[3.0] * 50, *[3.06] * 50], "the means of the last 50 losses differ"),
    ],
)
def test_curves_are_compared(demo, other, words):
    difference = demo.disagreement([3.0] * 100, other)
    assert difference is None if words is None else words in difference


def test_experts_are_balanced_by_their_bias(demo):
    experts = demo.MixtureOfExperts(demo.Config())
    experts.load.copy_(torch.tensor([9.0, 1, 5, 5, 5, 5, 5, 5]))
    experts.balance()
    assert torch.sign(experts.bias).tolist() == [-1, 1, 0, 0, 0, 0, 0, 0]
