"""CUDA kernel of ``transform.batched_transpose``: that of ``transform.transpose``, over a batch."""

from __future__ import annotations

from .transpose import Transpose

KERNELS = {"transform.batched_transpose": Transpose(batched=True)}
