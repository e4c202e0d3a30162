"""The first call of each operator in a process of its own: with its kernels in the cache (warm), and without (cold)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from .. import registry
from ..cases import Maker, cases_of
from ..conformance.engine import device_of, public_function

Chosen = list[tuple[str, str]]
"""Operators, each with the name of one of its benchmark points."""


def measure(backend: str, chosen: Chosen) -> dict[tuple[str, str], dict[str, Any]]:
    """Milliseconds of the first call of each point, in the given order, in one process warm and in another one cold.

    Returns:
        For each point ``{"warm": ms, "cold": ms, "first_of_process": bool}``. The first call of a process also loads
        what all kernels share; inputs, and with them the device, are there before.
    """
    _first_calls(backend, chosen, {})  # fills the cache
    warm = _first_calls(backend, chosen, {})
    with tempfile.TemporaryDirectory() as folder:
        cold = _first_calls(backend, chosen, {"TK_CACHE_DIR": folder, "TK_CACHE_PATH": ""})
    return {
        point: {"warm": round(warm[i], 2), "cold": round(cold[i], 1), "first_of_process": i == 0}
        for i, point in enumerate(chosen)
    }


def _first_calls(backend: str, chosen: Chosen, environment: dict[str, str]) -> list[float]:
    command = [sys.executable, "-m", "tk_core.bench.first_call", backend, json.dumps(chosen)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"first calls on {backend} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _timed(backend_name: str, chosen: Chosen) -> list[float]:
    backend = registry.installed(backend_name)
    device = device_of(backend)
    synchronize = torch.get_device_module(device).synchronize
    times = []
    for op, name in chosen:
        cases = cases_of(op)
        if cases is None:
            raise KeyError(f"operator {op} has no cases")
        point = next(p for p in cases.bench if p.name == name)
        call = point.make(Maker(device, backend.layout))
        function = public_function(op)
        synchronize()
        start = time.perf_counter()
        with registry.use_backend(backend):
            function(*call.args, **call.kwargs)
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    print(json.dumps(_timed(sys.argv[1], [(op, name) for op, name in json.loads(sys.argv[2])])))
