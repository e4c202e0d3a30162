"""CUDA kernel of ``rand.rand``: that of ``rand.randn``, without Box-Muller."""

from __future__ import annotations

from .randn import Draw

KERNELS = {"rand.rand": Draw(normal=False)}
