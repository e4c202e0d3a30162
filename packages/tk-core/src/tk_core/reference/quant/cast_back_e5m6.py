"""Reference of quant.cast_back_e5m6."""

from __future__ import annotations

from .cast_back import cast_back

REFERENCES = {"quant.cast_back_e5m6": cast_back}
