"""``python -m tk_ascend.ci``: the conformance of every Ascend kernel in the emulator; on an NPU also on the device.

``--quick`` (the default) runs up to ``QUICK_SAMPLES`` evenly spaced quick samples of each operator in program order,
with race detection, and the first sample of each in adversarial orders; emulating a sample takes seconds. ``--full``
runs every sample of the full level. Refusals are compared with the committed report, so they cannot grow unseen;
``--accept`` rewrites it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tk_core.cases import cases_of
from tk_core.conformance import engine
from tk_core.conformance.report import new_refusals
from tk_core.op import OPERATORS

from .backend import BACKEND, EMULATOR
from .jit import emulation

ADVERSARIAL_SEEDS = (1, 2)
QUICK_SAMPLES = 16


def conformance(backend: str, level: str, jobs: int, report: pathlib.Path) -> int:
    """Run the conformance plugin for the operators that have a kernel; returns pytest's exit code."""
    ops = [arg for name in OPERATORS if EMULATOR.kernel(name) is not None for arg in ("--tk-op", name)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tk_core.conformance.plugin",
        "--pyargs",
        "tk_core.conformance",
    ]
    options = ["--tk-backend", backend, "--tk-level", level, "--tk-report", str(report), "-n", str(jobs)]
    if level == "quick":
        options += ["--tk-limit", str(QUICK_SAMPLES)]
    return subprocess.run([*command, *options, *ops], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def adversarial() -> list[str]:
    """The first samples of each operator with pipes, blocks and threads in random orders; returns what went wrong."""
    problems = []
    for name in OPERATORS:
        cases = cases_of(name)
        if EMULATOR.kernel(name) is None or cases is None:
            continue
        for sample in engine.samples_of(cases, "quick")[:1]:
            for seed in ADVERSARIAL_SEEDS:
                with emulation(mode="adversarial", seed=seed):
                    outcome = engine.Check(name, sample, EMULATOR).run()
                print(f"adversarial order {seed}: {name}: {sample.why}: {outcome.status}")
                problems += [f"{name}: {sample.why}: order {seed}: {p}" for p in outcome.problems]
    return problems


def main() -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", dest="level", action="store_const", const="quick", default="quick")
    level.add_argument("--full", dest="level", action="store_const", const="full")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--accept", action="store_true", help="write the committed report")
    options = parser.parse_args()
    committed = pathlib.Path(__file__).parent / "conformance-ascend-emulator.json"
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        code = conformance("ascend-emulator", options.level, options.jobs, report)
        problems += [f"the conformance suite ended with exit code {code}"] if code else []
        if options.accept:
            committed.write_text(report.read_text())
        elif report.exists():
            known = json.loads(committed.read_text()) if committed.exists() else {}
            grown = new_refusals(json.loads(report.read_text()), known)
            problems += [f"refused, and not so in {committed.name}: {r}" for r in grown]
        if BACKEND.applies() and BACKEND.unavailable() is None:
            code = conformance("ascend", options.level, 1, pathlib.Path(folder) / "device.json")
            problems += [f"the conformance suite on the NPU ended with exit code {code}"] if code else []
    problems += adversarial()
    print("\n".join(problems) or "every Ascend kernel equals its reference in the emulator")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
