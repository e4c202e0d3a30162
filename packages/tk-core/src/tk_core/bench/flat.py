"""The operator calls behind a public function: name and flat arguments, without running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import registry
from ..backend import CONTRACT, Kernel, Layout
from ..cases import Call


class _Recording:
    """A backend whose kernels only note that they were called."""

    name = "recording"
    contract = CONTRACT
    version = "0"

    def __init__(self, device_type: str, layout: Layout) -> None:
        self.device_type = device_type
        self.layout = layout
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def applies(self) -> bool:
        return True

    def unavailable(self) -> str | None:
        return None

    def kernel(self, op: str) -> Kernel:
        from ..op import OPERATORS

        backend = self

        class Note:
            revision = OPERATORS[op].revision

            def refusal(self, *args: Any) -> str | None:
                return None

            def __call__(self, outs: Any, *args: Any) -> None:
                backend.calls.append((op, args))

        return Note()


def flat_calls(
    function: Callable[..., Any], arguments: Call, device_type: str, layout: Layout
) -> list[tuple[str, tuple[Any, ...]]]:
    """Which operators a call of a public function would run, with their flat arguments."""
    recording = _Recording(device_type, layout)
    with registry.use_backend(recording):
        function(*arguments.args, **arguments.kwargs)
    return recording.calls
