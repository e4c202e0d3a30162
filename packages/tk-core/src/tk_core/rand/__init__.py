"""Random numbers that are the same on every device: a counter-based generator whose state lives on the device."""

from __future__ import annotations

from .generator import Generator, set_seed
from .rand import rand
from .randn import randn, randn_like

__all__ = ["Generator", "rand", "randn", "randn_like", "set_seed"]
