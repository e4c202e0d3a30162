"""The backends that the entry points ``ascend`` and ``ascend-emulator`` name. Importing them touches no driver."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil

import torch

from tk_core.backend import CONTRACT, Kernel, Layout, locate

LAYOUT = Layout(ue8m0_per_word=2, sf_align_bytes=0)
"""Ascend packs two UE8M0 bytes in an int16 and pads no columns."""


class AscendBackend:
    """Huawei Ascend 950 through CANN and torch_npu."""

    name = "ascend"
    device_type = "npu"
    contract = CONTRACT
    layout = LAYOUT

    def __init__(self) -> None:
        self.version = importlib.metadata.version("tk-ascend")

    def applies(self) -> bool:
        return importlib.util.find_spec("torch_npu") is not None

    def unavailable(self) -> str | None:
        npu = getattr(torch, "npu", None)
        if npu is None or not npu.is_available():
            return "no usable Ascend NPU: torch.npu is missing or reports no device (CANN, driver or torch_npu)"
        name = npu.get_device_name(0)
        return None if "950" in name else f"the kernels are written for Ascend 950, this device is {name}"

    def kernel(self, op: str) -> Kernel | None:
        found = locate("tk_ascend", op, "KERNELS")
        return None if found is None else found[1]


class EmulatorBackend:
    """The same kernels on x86: compiled with g++ against the emulator. For tests; served only on request."""

    name = "ascend-emulator"
    device_type = "cpu"
    contract = CONTRACT
    layout = LAYOUT

    def __init__(self) -> None:
        self.version = importlib.metadata.version("tk-ascend")

    def applies(self) -> bool:
        return True

    def unavailable(self) -> str | None:
        return None if shutil.which("g++") else "the emulator compiles kernels with g++, which is not installed"

    def kernel(self, op: str) -> Kernel | None:
        found = locate("tk_ascend", op, "KERNELS")
        return None if found is None else found[1]


BACKEND = AscendBackend()
EMULATOR = EmulatorBackend()
