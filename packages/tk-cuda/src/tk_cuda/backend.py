"""The backend object that the entry point ``tk.backends: cuda`` names. Importing it touches no driver."""

from __future__ import annotations

import importlib.metadata

import torch

from tk_core.backend import CONTRACT, Kernel, Layout, locate

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


BACKEND = CudaBackend()
