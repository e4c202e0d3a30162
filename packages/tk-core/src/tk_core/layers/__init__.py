"""Differentiable layers: operators joined to their gradients, as functions and as modules."""

from __future__ import annotations

from .rms_norm import RMSNorm, rms_norm
from .rotary import RotaryEmbedding, rotary_embedding
from .swiglu import SwiGLU, swiglu

__all__ = ["RMSNorm", "RotaryEmbedding", "SwiGLU", "rms_norm", "rotary_embedding", "swiglu"]
