"""The backend object that the entry point ``tk.backends: cuda`` names. Importing it touches no driver."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk_core.backend import CONTRACT, Kernel, Layout, locate
from tk_core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tk_core.backend import Launch

    from .precompile import Progress

OLDEST = (8, 0)
"""The oldest compute capability that the kernels support."""


class CudaBackend:
    """NVIDIA GPUs from sm_80 on.

    Attributes:
        device_type: ``cuda``; ``meta`` for an object that only records which kernels a call needs.
    """

    name = "cuda"
    contract = CONTRACT
    layout = Layout(ue8m0_per_word=4, sf_align_bytes=16, e4m3=torch.float8_e4m3fn)

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type
        self.version = importlib.metadata.version("tk-cuda")

    def applies(self) -> bool:
        return torch.version.cuda is not None

    def unavailable(self) -> str | None:
        if self.device_type == "meta":
            return None
        if not torch.cuda.is_available():
            return "no usable NVIDIA device: torch.cuda.is_available() is False (driver missing or too old, or no GPU)"
        capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        if max(capabilities) < OLDEST:
            found = ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)
            return f"needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, found {found}"
        return None

    def kernel(self, op: str) -> Kernel | None:
        found = locate("tk_cuda", op, "KERNELS")
        return None if found is None else found[1]

    def bind(self, kernel: Kernel, outs: tuple[Tensor, ...], args: tuple[Any, ...]) -> Launch | None:
        """Run a kernel; returns what runs it again for other tensors of the same signature."""
        from . import binding

        return binding.bind(kernel, outs, args)

    def recorder(self) -> CudaBackend:
        """A backend for meta tensors: calls note the kernels that they need (``precompile``)."""
        return CudaBackend("meta")

    def precompile(
        self, calls: Iterable[Callable[[], Any]], archs: Sequence[str], jobs: int | None, progress: Progress
    ) -> list[str]:
        """Build the kernels that some calls on meta tensors need into the cache; returns what went wrong.

        Args:
            calls: run under ``use_backend(self.recorder())``.
            archs: such as ``sm_90a``; none given: of the GPUs here.
            jobs: processes; None: half of the cores.
            progress: called after each kernel with done, total, name, and ``cached``, ``compiled`` or the problem.

        Raises:
            InvalidArgumentError: no architecture, or one that nothing is built for.
        """
        from . import compiler, jit, pool, precompile

        wanted = list(archs) or sorted({jit.arch_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())})
        if not wanted:
            raise InvalidArgumentError("there is no GPU here; name the architectures, such as --arch sm_90a")
        unknown = [a for a in wanted if a not in compiler.ARCHITECTURES]
        if unknown:
            raise InvalidArgumentError(f"architecture {unknown[0]} is not one of {', '.join(compiler.ARCHITECTURES)}")
        found = {job: None for call in calls for job in precompile.needed(call, wanted)}
        return precompile.build(list(found), jobs or pool.default_workers(), progress)

    def prepare(self, calls: Iterable[Callable[[], Any]]) -> list[str]:
        """Build what some calls need on the GPUs of this machine, in parallel, before they are timed."""
        return self.precompile(calls, (), None, lambda *done: None)

    def cache_info(self) -> list[dict[str, Any]]:
        """Folders of compiled kernels: place, entries, bytes, and why one is not read."""
        from . import cache

        return cache.report()

    def inspect(self, op: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
        """Registers, spills, shared memory and access widths of an operator's kernels, from compiled code.

        The kernels are those that the module lists for CI, one for each variant, or, where it launches the kernels of
        another module, those of the last benchmark point; ``call`` is not needed.
        """
        from . import inspect

        return inspect.report(op)


BACKEND = CudaBackend()
