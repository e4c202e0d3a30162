"""Differentiable layers: operators joined to their gradients, as functions and as modules."""

from __future__ import annotations

from .fake_quantize import fake_quantize
from .normalize_weight import normalize_weight
from .rms_norm import RMSNorm, rms_norm
from .rotary import RotaryEmbedding, rotary_embedding
from .swiglu import SwiGLU, swiglu

__all__ = [
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "fake_quantize",
    "normalize_weight",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
]
