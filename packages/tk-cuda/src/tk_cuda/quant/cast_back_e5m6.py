"""CUDA kernel of ``quant.cast_back_e5m6``: that of :mod:`.cast_back`, whose vectors are three words here."""

from __future__ import annotations

from .cast_back import CastBack

KERNELS = {"quant.cast_back_e5m6": CastBack()}
