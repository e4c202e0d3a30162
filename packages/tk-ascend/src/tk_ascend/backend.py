"""The backends that the entry points ``ascend`` and ``ascend-emulator`` name. Importing them touches no driver."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch

from tk_core.backend import CONTRACT, Kernel, Layout, locate

LAYOUT = Layout(ue8m0_per_word=2, sf_align_bytes=0)
"""Ascend packs two UE8M0 bytes in an int16 and pads no columns."""


def _inspect(call: Callable[[], Any]) -> list[dict[str, Any]]:
    from .inspect import report
    from .jit import traced

    rows = []
    with traced() as launches:
        call()
    for lowered, arguments in launches:
        shapes = {param.name: value for param, value in zip(lowered.params, arguments, strict=True)}
        found = report(lowered, shapes)
        for launch in found["launches"]:
            rows.append(
                {"kernel": found["name"], **_flat(launch), **{f"bound {k}": v for k, v in found["bound"].items()}}
            )
    return rows


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one row."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            row |= _flat(value, f"{prefix}{name} ")
        else:
            row[prefix + name] = value
    return row


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

    def inspect(self, op: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
        """What bounds the kernels of a call on CPU tensors: bytes, vector instructions, UB use, buffering."""
        return _inspect(call)


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

    def inspect(self, op: str, call: Callable[[], Any]) -> list[dict[str, Any]]:
        """What bounds the kernels of a call on CPU tensors: bytes, vector instructions, UB use, buffering."""
        return _inspect(call)


BACKEND = AscendBackend()
EMULATOR = EmulatorBackend()
