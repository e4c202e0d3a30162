"""A candidate in a process of its own, for libraries that cannot share ours: other versions of the same module.

The parent sends one JSON request a line and gets one JSON answer a line. Requests are timed in turns with the other
candidates: a worker only works while it is asked. Results of the check travel through a file.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backend import Layout
from ..cases import Maker, cases_of, tensors_in
from .adapters import adapter
from .timing import clock_of


class WorkerError(RuntimeError):
    """The worker answered with an error, or died."""


class Worker:
    """The parent's side.

    Args:
        name: of the adapter.
        site: folder with the library, put first on the worker's module path.
        device: where to time.
    """

    def __init__(self, name: str, site: pathlib.Path, device: torch.device) -> None:
        self.NAME = name
        self.site = site
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tk_core.bench.worker", name, device.type],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            WorkerError: what went wrong there.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or self._process.poll() is not None:
            raise WorkerError(f"the worker of {self.NAME} has ended")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith(_MARK):
                answer = json.loads(line[len(_MARK) :])
                if "error" in answer:
                    raise WorkerError(answer["error"])
                return answer["value"]
        raise WorkerError(f"the worker of {self.NAME} died with exit code {self._process.wait()}")

    def version(self) -> str:
        """Version of the library."""
        return self.ask(do="version")

    def prepare(self, op: str, point: str, sets: int, layout: Layout) -> bool:
        """Make the inputs of a point; whether the library has the operator."""
        return self.ask(do="prepare", op=op, point=point, sets=sets, layout=[layout[0], layout[1]])

    def results(self) -> list[Tensor]:
        """What the first call returns."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "results.pt"
            self.ask(do="results", file=str(file))
            return torch.load(file)

    def time(self, kind: str) -> list[float]:
        """Samples of ``device``, ``cold`` or ``host`` time."""
        return self.ask(do="time", kind=kind)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


_MARK = "tk-worker: "


class _Server:
    """The worker's side."""

    def __init__(self, name: str, device: str) -> None:
        self.adapter = adapter(name)
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
        self.calls: list[Callable[[], Any]] = []
        self.written: list[Tensor] = []

    def version(self) -> str:
        return self.adapter.version()

    def prepare(self, op: str, point: str, sets: int, layout: list[int]) -> bool:
        cases = cases_of(op)
        if cases is None:
            return False
        chosen = next(p for p in cases.bench if p.name == point)
        kind = Layout(ue8m0_per_word=layout[0], sf_align_bytes=layout[1])
        self.calls = []
        for seed in range(sets):
            arguments = chosen.make(Maker(self.device, kind, seed))
            if seed == 0:
                self.written = cases.written(arguments)
            call = self.adapter.bind(op, arguments, kind, self.device)
            if call is None:
                return False
            self.calls.append(call)
        return True

    def results(self, file: str) -> None:
        returned = tensors_in(self.calls[0]())
        torch.save(returned + self.written, file)

    def time(self, kind: str) -> list[float]:
        return getattr(self.clock, kind)(self.calls)


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    server: _Server | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            server = server or _Server(sys.argv[1], sys.argv[2])
            answer = {"value": getattr(server, request.pop("do"))(**request)}
        except Exception as error:  # every fault of the library is an answer
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
