"""Checkpoint conversion: recipes, sharded folders, interrupted runs, and files that are not what they should be."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk_core.checkpoint import files
from tk_core.checkpoint.convert import Dequantize, Quantize
from tk_core.errors import InvalidArgumentError

RECIPES = {"fp8-block128": 0.04, "mxfp8": 0.04, "mxfp4": 0.16, "nvfp4": 0.13}


def silent(name: str, size: int) -> None:
    """No progress bar."""


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with two shards, an index, a config and a tokenizer."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=generator) * 0.02).to(dtype)

    folder = tmp_path / "model"
    folder.mkdir()
    first = {"model.embed_tokens.weight": weight(64, 96), "model.layers.0.mlp.up.weight": weight(300, 96)}
    second = {
        "model.layers.0.mlp.down.weight": weight(96, 160, dtype=torch.float32),
        "model.layers.0.norm.weight": weight(96),
        "model.layers.0.mlp.gate.weight": weight(8, 96),
        "model.layers.0.zero.weight": torch.zeros(32, 32, dtype=torch.float16),
        "lm_head.weight": weight(64, 96),
    }
    save_file(first, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(second, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 96}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def everything(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_round_trip(model, tmp_path, recipe):
    before = everything(model)
    reports = Quantize(model, tmp_path / "q", recipe).run(silent)
    quantized = everything(tmp_path / "q")
    assert {r.name for r in reports} == {
        "model.layers.0.mlp.up.weight",
        "model.layers.0.mlp.down.weight",
        "model.layers.0.zero.weight",
    }
    for r in reports:
        assert r.relative_error < RECIPES[recipe]
        assert r.relative_error > 0 or r.name.endswith("zero.weight")
    for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(quantized[kept], before[kept])
    index = json.loads((tmp_path / "q" / files.INDEX).read_text())
    assert set(index["weight_map"]) == set(quantized)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["quant_method"]
    assert (tmp_path / "q" / "tokenizer.json").exists()

    Dequantize(tmp_path / "q", tmp_path / "back", torch.float32).run(silent)
    after = everything(tmp_path / "back")
    assert set(after) == set(before)
    up = "model.layers.0.mlp.up.weight"
    error = (after[up] - before[up].float()).norm() / before[up].float().norm()
    expected = next(r.relative_error for r in reports if r.name == up)
    assert float(error) == pytest.approx(expected, rel=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_layouts_are_those_of_public_checkpoints(model, tmp_path):
    up = "model.layers.0.mlp.up.weight"
    layouts = {
        "fp8-block128": {"": ("float8_e4m3fn", (300, 96)), "_scale_inv": ("float32", (3, 1))},
        "mxfp8": {"": ("float8_e4m3fn", (300, 96)), "_scale": ("uint8", (300, 3))},
        "mxfp4": {"": ("uint8", (300, 48)), "_scale": ("uint8", (300, 3))},
        "nvfp4": {"": ("uint8", (300, 48)), "_scale": ("float8_e4m3fn", (300, 6)), "_scale_2": ("float32", ())},
    }
    for recipe, tensors in layouts.items():
        Quantize(model, tmp_path / recipe, recipe).run(silent)
        got = everything(tmp_path / recipe)
        for suffix, (dtype, shape) in tensors.items():
            assert (got[up + suffix].dtype, tuple(got[up + suffix].shape)) == (getattr(torch, dtype), shape)


def test_nvfp4_scale_2_is_amax_over_6_times_448(model, tmp_path):
    up = "model.layers.0.mlp.up.weight"
    want = everything(model)[up].float().abs().max() / (6 * 448)
    Quantize(model, tmp_path / "q", "nvfp4").run(silent)
    assert everything(tmp_path / "q")[up + "_scale_2"] == want


def test_a_file_of_ours_is_read_by_safetensors(tmp_path):
    tensors = [torch.arange(6, dtype=torch.int64).view(2, 3), torch.ones(0, 4), torch.tensor(2.5, dtype=torch.bfloat16)]
    specs = [files.Spec(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    files.write(tmp_path / "x.safetensors", specs, tensors, {"format": "pt"})
    for i, t in enumerate(tensors):
        assert torch.equal(load_file(tmp_path / "x.safetensors")[str(i)], t)


def test_an_interrupted_run_leaves_nothing_half_written_and_resumes(model, tmp_path):
    class Killed(Exception):
        pass

    def die(name: str, size: int) -> None:
        if "down" in name:
            raise Killed

    target = tmp_path / "q"
    with pytest.raises(Killed):
        Quantize(model, target, "mxfp8").run(die)
    assert not target.exists()
    partial = tmp_path / "q.partial"
    finished = partial / "model-00001-of-00002.safetensors"
    written = finished.stat().st_mtime_ns
    with pytest.raises(InvalidArgumentError, match="left from another conversion"):
        Quantize(model, target, "mxfp4").run(silent)
    reports = Quantize(model, target, "mxfp8").run(silent)
    assert (target / finished.name).stat().st_mtime_ns == written
    assert not partial.exists()
    assert len(reports) == 3
    Quantize(model, tmp_path / "whole", "mxfp8").run(silent)
    for name, t in everything(tmp_path / "whole").items():
        assert torch.equal(everything(target)[name].view(torch.uint8), t.view(torch.uint8))


def snapshot(place: pathlib.Path) -> object:
    if place.is_file():
        return place.read_bytes()
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


def dies_at(monkeypatch, step: int, run: Callable[[], object]) -> bool:
    """Run something that is killed right before a step that changes a file or folder; False where it has fewer."""

    class Killed(BaseException):
        pass

    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            if count == step:
                raise Killed
            count += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "write_text", "rename", "unlink", "open"):
            patch.setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))
        for name in ("copy2", "rmtree"):
            patch.setattr(shutil, name, counted(getattr(shutil, name)))
        try:
            run()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("way", ["quantize", "dequantize", "one file"])
def test_a_run_killed_at_any_step_resumes_to_the_same_result(model, tmp_path, monkeypatch, way):
    source = model
    if way == "dequantize":
        source = tmp_path / "quantized"
        Quantize(model, source, "nvfp4").run(silent)
    if way == "one file":
        source = tmp_path / "one.safetensors"
        save_file({"a.weight": torch.randn(40, 64), "b.weight": torch.randn(8, 32)}, source)

    def run(target):
        job = Dequantize(source, target, torch.bfloat16) if way == "dequantize" else Quantize(source, target, "mxfp4")
        return job.run(silent)

    reports, target = run(tmp_path / "whole"), tmp_path / "target"
    step = 0
    while dies_at(monkeypatch, step, lambda: run(target)):
        if not target.exists():  # else only what has become useless is left beside it, or in it
            assert run(target) == reports
            assert snapshot(target) == snapshot(tmp_path / "whole")
        for place in tmp_path.glob("target*"):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        step += 1
    assert step > 6


def test_a_full_disk_is_named_and_the_run_resumes(model, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    conversion = Quantize(model, tmp_path / "q", "mxfp8")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*q\.partial'"):
            conversion.run(silent)
    assert not (tmp_path / "q").exists()
    assert len(Quantize(model, tmp_path / "q", "mxfp8").run(silent)) == 3


def test_a_source_that_changed_is_not_resumed(model, tmp_path, monkeypatch):
    assert dies_at(monkeypatch, 6, lambda: Quantize(model, tmp_path / "q", "mxfp8").run(silent))
    shard = model / "model-00002-of-00002.safetensors"
    save_file({k: v + 1 for k, v in load_file(shard).items()}, shard)
    with pytest.raises(InvalidArgumentError, match=r"q\.partial is left from another conversion"):
        Quantize(model, tmp_path / "q", "mxfp8").run(silent)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"settings": null}', "\xff"])
def test_a_partial_folder_of_something_else(model, tmp_path, text):
    (tmp_path / "q.partial").mkdir()
    (tmp_path / "q.partial" / "tk-conversion.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgumentError, match=r"q\.partial is left from another conversion"):
        Quantize(model, tmp_path / "q", "mxfp8").run(silent)


@pytest.mark.parametrize(
    ("text", "match"), [("{", "is not JSON"), ("[1]", "must hold a JSON object, got list"), ("\xff", "is not JSON")]
)
def test_a_config_that_is_none_is_found_before_the_work(model, tmp_path, text, match):
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgumentError, match=f"config.json {match}"):
        Quantize(model, tmp_path / "q", "mxfp8")


def test_devices_and_places_that_are_none(model, tmp_path):
    for device in ("nosuch", "", "meta", "cuda:4095"):
        with pytest.raises(InvalidArgumentError, match=f"device must be .*, got '{device}'"):
            Quantize(model, tmp_path / "q", "mxfp8", device=device)
    with pytest.raises(InvalidArgumentError, match=r"lies in .*, whose files are copied"):
        Quantize(model, model / "q", "mxfp8")
    for target in (pathlib.Path(""), pathlib.Path("/")):
        with pytest.raises(InvalidArgumentError, match="exists; choose another place"):
            Quantize(model, target, "mxfp8")


def test_one_file(tmp_path):
    save_file({"a.weight": torch.randn(8, 64)}, tmp_path / "a.safetensors")
    Quantize(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp4").run(silent)
    assert set(load_file(tmp_path / "b.safetensors")) == {"a.weight", "a.weight_scale"}
    assert not (tmp_path / "b.safetensors.partial").exists()


def test_faults_are_named(model, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "short.safetensors").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes()[:-10])
    for source, match in (
        ("bad.safetensors", "is not a readable safetensors file"),
        ("short.safetensors", "is not a readable safetensors file"),
        ("nowhere", "does not exist"),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            Quantize(tmp_path / source, tmp_path / "out", "mxfp8")
    with pytest.raises(InvalidArgumentError, match="recipe must be fp8-block128, mxfp8, mxfp4, nvfp4, got 'int8'"):
        Quantize(model, tmp_path / "out", "int8")
    with pytest.raises(InvalidArgumentError, match="exists; choose another place"):
        Quantize(model, model, "mxfp8")
    with pytest.raises(InvalidArgumentError, match="holds no quantized weight"):
        Dequantize(model, tmp_path / "out", torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="no 2-D float tensor"):
        Quantize(model, tmp_path / "out", "mxfp8", include=["nothing"])
    Quantize(model, tmp_path / "q", "mxfp8").run(silent)
    with pytest.raises(InvalidArgumentError, match="already quantized"):
        Quantize(tmp_path / "q", tmp_path / "qq", "mxfp8", include=["*.weight"]).run(silent)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        Quantize(model, tmp_path / "out", "mxfp8")
    assert not (tmp_path / "out").exists()


def test_command_line(model, tmp_path):
    def tk(*args):
        return subprocess.run([sys.executable, "-m", "tk_core", *map(str, args)], capture_output=True, text=True)

    done = tk("quantize", model, tmp_path / "q", "--recipe", "nvfp4", "--report", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "3 weights" in done.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())) == 3
    done = tk("dequantize", tmp_path / "q", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert everything(tmp_path / "back")["model.layers.0.mlp.up.weight"].dtype == torch.bfloat16
    done = tk("quantize", model, tmp_path / "z", "--recipe", "int4")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        (["lm_head.weight"], "weight_map must be an object, got list"),
        (3, "weight_map must be an object, got int"),
        ({"lm_head.weight": 3}, "puts tensor lm_head.weight in 3; a file of the folder is needed"),
        ({"lm_head.weight": ["a"]}, "a file of the folder is needed"),
        ({"lm_head.weight": "../other.safetensors"}, "puts tensor lm_head.weight in '../other.safetensors'"),
        ({"lm_head.weight": "inner/other.safetensors"}, "puts tensor lm_head.weight in 'inner/other.safetensors'"),
        ({"lm_head.weight": ".."}, "a file of the folder is needed"),
        ({"lm_head.weight": ""}, "a file of the folder is needed"),
        ({"absent.weight": "model-00002-of-00002.safetensors"}, "puts tensor absent.weight in .*does not hold it"),
        ({"lm_head.weight": "model-00001-of-00002.safetensors"}, "puts tensor lm_head.weight in .*does not hold it"),
    ],
)
def test_an_index_that_contradicts_its_folder(model, tmp_path, weight_map, match):
    shard = model / "model-00002-of-00002.safetensors"
    (model / "inner").mkdir()
    for place in (tmp_path / "other.safetensors", model / "inner" / "other.safetensors"):
        place.write_bytes(shard.read_bytes())
    (model / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidArgumentError, match=match):
        Quantize(model, tmp_path / "q", "mxfp8")
    assert not (tmp_path / "q.partial").exists()
