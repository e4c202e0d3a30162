"""The loopback backend: what a vendor ships, with the references as its kernels."""

from __future__ import annotations

from typing import Any

from tk_core.backend import CONTRACT, Kernel, Layout
from tk_core.op import OPERATORS
from tk_core.registry import ReferenceBackend


class LoopbackKernel:
    """One operator, computed by the reference."""

    def __init__(self, op: str) -> None:
        reference = ReferenceBackend().kernel(op)
        if reference is None:
            raise LookupError(f"tk_core has no reference of {op}")
        self._reference = reference
        self.revision = OPERATORS[op].revision

    def refusal(self, *args: Any) -> str | None:
        return None

    def __call__(self, outs: Any, *args: Any) -> None:
        self._reference(outs, *args)


class Loopback:
    """Serves ``cpu`` on request, with Ascend's layout, to show that layouts are the backend's."""

    name = "loopback"
    device_type = "cpu"
    contract = CONTRACT
    layout = Layout(ue8m0_per_word=2, sf_align_bytes=0)
    version = "2.0.0.dev0"

    def applies(self) -> bool:
        return True

    def unavailable(self) -> str | None:
        return None

    def kernel(self, op: str) -> Kernel | None:
        return LoopbackKernel(op)


BACKEND = Loopback()
