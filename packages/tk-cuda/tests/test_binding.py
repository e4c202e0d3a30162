"""What is kept of a kernel's call repeats it for other tensors, and nothing is kept where that is not sure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tk_cuda import binding, jit


class Kernel:
    """A kernel whose ``__call__`` is a function of a recording launcher."""

    revision = 1

    def __init__(self, body: Any) -> None:
        self.body = body
        self.calls = 0

    def refusal(self, *args: Any) -> None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        self.calls += 1
        self.body(outs, *args)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A builder's launcher that adds its second and third tensor into its first."""
    monkeypatch.setattr(jit, "BUILDERS", dict(jit.BUILDERS))
    builder = jit.Builder("test.add", _add)
    builder._launchers[torch.device("cpu"), ()] = _add

    def run(*args: Any) -> None:
        launcher = builder.get((), torch.device("cpu"))
        assert launcher is not None
        launcher(*args)

    return run


def _add(out: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        out.copy_(x * scale + y)


def _repeats(kernel: Kernel, make: Any) -> bool:
    """Whether the bound function gives what the kernel gives, on tensors of its own."""
    outs, args = make(1.0)
    function = binding.bind(kernel, outs, args)
    if function is None:
        return False
    calls = kernel.calls
    outs, args = make(2.0)
    function(outs, args)
    assert kernel.calls == calls
    expected, same_args = make(2.0)
    kernel(expected, *same_args)
    for a, b in zip((*outs, *args), (*expected, *same_args)):
        assert not isinstance(a, Tensor) or torch.equal(a, b)
    return True


def _two(value: float) -> Any:
    return (torch.zeros(3, 4),), (torch.full((3, 4), value), torch.ones(3, 4) * value)


def test_plain_tensors_and_constants(launch: Any) -> None:
    assert _repeats(Kernel(lambda outs, x, y: launch(outs[0], x, y, 3.0)), _two)


def test_views_of_arguments(launch: Any) -> None:
    def body(outs: Any, x: Tensor, y: Tensor) -> None:
        launch(outs[0].t(), x.view(torch.int32).view(torch.float32).t(), y.as_strided((4, 3), (1, 4)), 1.0)

    assert _repeats(Kernel(body), _two)


def test_tensors_in_a_list(launch: Any) -> None:
    def make(value: float) -> Any:
        outs, (x, y) = _two(value)
        return outs, ([x, y], 3.0)

    assert _repeats(Kernel(lambda outs, given, scale: launch(outs[0], given[0].view(3, 4), given[1], scale)), make)


def test_scratch_and_in_place_operators(launch: Any) -> None:
    def body(outs: Any, x: Tensor, y: Tensor) -> None:
        scratch = x.new_empty((3, 4))
        y.zero_()
        launch(scratch, x, y, 2.0)
        launch(outs[0], scratch, x, 0.5)

    assert _repeats(Kernel(body), _two)


def test_one_tensor_in_two_places_is_not_kept(launch: Any) -> None:
    kernel = Kernel(lambda outs, x, y: launch(outs[0], x, y, 1.0))
    x = torch.ones(3, 4)
    assert binding.bind(kernel, (torch.zeros(3, 4),), (x, x)) is None


def test_views_of_one_storage_are_told_apart_by_identity_alone(launch: Any) -> None:
    both = torch.ones(2, 3, 4)
    plain = Kernel(lambda outs, x, y: launch(outs[0], x, y, 1.0))
    assert binding.bind(plain, (torch.zeros(3, 4),), (both[0], both[1])) is not None
    viewing = Kernel(lambda outs, x, y: launch(outs[0], x.view(3, 4), y, 1.0))
    assert binding.bind(viewing, (torch.zeros(3, 4),), (both[0], both[1])) is None


def test_other_operators_are_not_kept(launch: Any) -> None:
    assert not _repeats(Kernel(lambda outs, x, y: launch(outs[0], x + 0, y, 1.0)), _two)


def test_parts_of_an_argument_are_not_kept(launch: Any) -> None:
    assert not _repeats(Kernel(lambda outs, x, y: launch(outs[0][1:], x[1:], y[:-1], 1.0)), _two)
