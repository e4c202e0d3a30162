"""The state of the random numbers: seed and offset, on the device that draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import InvalidArgumentError, InvalidDtypeError

_WRAP = 1 << 64

_seed: int | None = None
_defaults: dict[torch.device, Generator] = {}
_usable: set[torch.device] = set()
"""Devices on which tensors were made."""
_current: dict[str, Callable[[], int]] = {}
"""For types of devices, what tells which one stands for the type."""


class Generator:
    """A stream of random numbers: a seed, and an offset that counts blocks of four 32-bit words already used.

    Drawing advances the offset on the device, so a call that is replayed from a CUDA graph or compiled draws new
    numbers each time. Two generators with equal seed and offset draw the same numbers on any device.

    Args:
        device: where the state lives, and where numbers are drawn.
        seed: any int, taken modulo 2**64; None takes ``torch.initial_seed()``.

    Attributes:
        state: ``(2,)`` int64 ``(seed, offset)``; both are unsigned 64-bit numbers in two's complement.

    >>> g = Generator(seed=42)
    >>> g.initial_seed(), g.offset()
    (42, 0)
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int | None = None) -> None:
        with torch.inference_mode(False):  # a state made under inference mode could not be advanced outside of it
            self.state = torch.zeros(2, dtype=torch.int64, device=usable_device("rand.Generator", device))
        self.manual_seed(torch.initial_seed() if seed is None else seed)

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.state.device

    def manual_seed(self, seed: int, offset: int = 0) -> Generator:
        """Start again from a seed, and from an offset in blocks of four words. Returns the generator itself."""
        for name, value in (("seed", seed), ("offset", offset)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidDtypeError(f"rand.Generator: {name} must be an int, got {type(value).__name__}")
        self.state.copy_(torch.tensor([_signed(seed), _signed(offset)]))
        return self

    def initial_seed(self) -> int:
        """The seed, in [0, 2**64). Reads the state back, which synchronizes."""
        return int(self.state[0]) % _WRAP

    def offset(self) -> int:
        """Blocks of four words used so far. Reads the state back, which synchronizes."""
        return int(self.state[1]) % _WRAP

    def get_state(self) -> Tensor:
        """A copy of the state."""
        return self.state.clone()

    def set_state(self, state: Tensor) -> None:
        """Continue from a state that ``get_state`` returned, on any device.

        Raises:
            InvalidArgumentError, InvalidDtypeError: not two int64 numbers.
        """
        checks.is_tensor("rand.Generator", "state", state)
        checks.dtype("rand.Generator", "state", state, (torch.int64,))
        checks.shape("rand.Generator", "state", state, (2,), "(seed, offset)")
        self.state.copy_(state)


def _signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    value %= _WRAP
    return value - _WRAP if value >= _WRAP >> 1 else value


def set_seed(seed: int) -> None:
    """Start the default generator of every device again from a seed; their offsets become 0.

    Until it is called they start from ``torch.initial_seed()``. PyTorch's own generators are not touched.

    Args:
        seed: any int, taken modulo 2**64.

    Raises:
        InvalidDtypeError: not an int.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidDtypeError(f"rand.set_seed: seed must be an int, got {type(seed).__name__}")
    _seed = seed
    for generator in _defaults.values():
        generator.manual_seed(seed)


def default_state(op: str, device: str | torch.device | None) -> Tensor:
    """State of the default generator of a device; None is the default device."""
    where = usable_device(op, device)
    generator = _defaults.get(where)
    if generator is None:
        generator = Generator(where, _seed)
        if type(generator.state) is Tensor:  # not that of a FakeTensorMode, which ends
            generator = _defaults.setdefault(where, generator)
    return generator.state


# As torch.compiler.assume_constant_result, without importing Dynamo: a compiled graph holds on to the state tensor
# itself, which set_seed changes in place.
default_state._dynamo_marked_constant = True  # type: ignore[attr-defined]


def usable_device(op: str, device: Any) -> torch.device:
    """Where tensors can be made; None is the default device.

    Raises:
        InvalidDtypeError: not the name or object of a device.
        InvalidArgumentError: no such device here.
    """
    if (device is not None and not isinstance(device, (str, int, torch.device))) or isinstance(device, bool):
        raise InvalidDtypeError(f"{op}: device must be a device or its name, got {type(device).__name__}")
    try:
        where = (
            device if isinstance(device, torch.device) else torch.device(device) if isinstance(device, str) else None
        )
        if where is not None and where.index is None and where.type in _current:
            where = torch.device(where.type, _current[where.type]())
        if where in _usable:
            return where
        made = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter is how PyTorch says that it was built without CUDA
        reason = f"{device!r}: {str(error).splitlines()[0]}"
        raise InvalidArgumentError(f"{op}: device must be one that PyTorch can use here, got {reason}") from error
    if type(made) is Tensor:  # not that of a FakeTensorMode, which knows every device
        _usable.add(made.device)
        if made.device.index is not None:
            _current[made.device.type] = torch.get_device_module(made.device.type).current_device
    return made.device


usable_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


def state_for(op: str, device: str | torch.device | None, generator: Generator | Tensor | None) -> Tensor:
    """The state to draw from: the given generator's, else the default one of the device."""
    if generator is None:
        return default_state(op, device)
    state = generator.state if isinstance(generator, Generator) else generator
    if not isinstance(state, Tensor):
        raise InvalidDtypeError(
            f"{op}: generator must be a tk_core.rand.Generator or its state, got {type(generator).__name__}"
        )
    if device is not None:
        wanted, has = usable_device(op, device), state.device
        if wanted.type != has.type or wanted.index not in (None, has.index):
            checks.invalid(op, "device", f"be the device of generator ({has})", device)
    return state
