"""Errors that tk raises, each a subclass of the built-in that PyTorch users already catch."""

from __future__ import annotations


class TkError(Exception):
    """Base of every error that tk raises on purpose."""


class InvalidArgumentError(TkError, ValueError):
    """An argument is outside the operator's domain, on every backend."""


class InvalidDtypeError(TkError, TypeError):
    """An argument has a dtype or type outside the operator's domain, on every backend."""


class UnsupportedError(TkError, NotImplementedError):
    """The call is legal, but no selected backend can run it; the message says why for each."""


class NoBackendError(TkError, RuntimeError):
    """No backend serves the device of the arguments, or the named backend is not installed."""


class AmbiguousBackendError(TkError, RuntimeError):
    """Several installed backends claim the same device type."""


class DefinitionError(TkError, RuntimeError):
    """An operator, a backend or a case file contradicts its own declaration."""
