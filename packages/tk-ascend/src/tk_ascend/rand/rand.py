"""rand, by the kernel of ``randn``: leading bits of the words instead of Box-Muller."""

from __future__ import annotations

from typing import Any

from .randn import Draw

KERNELS: dict[str, Any] = {"rand.rand": Draw(normal=False)}
