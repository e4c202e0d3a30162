"""Loops and indices of SIMT code.

Lowering takes minutes, and ends with barriers that only some threads pass, where the compiler must reason about long
expressions of sizes that are known only at run time. Habits that avoid both: loops over all places of a buffer, with a
condition inside; intermediate values named by :func:`kept`; reads of the unified buffer at :func:`within`, so that
disjoint buffers are seen to be disjoint; writes at an index that is linear in loop and thread.
"""

from typing import Any

THREADS = 256
"""Threads of a SIMT region."""
SPAN = 8192
"""Columns that a core works on at once; a multiple of the columns of every packed group of codes."""


def kept(T: Any, value: Any) -> Any:
    """A value in a variable of its own: computed once, and opaque to the compiler's analysis."""
    return T.alloc_var(value.dtype, init=value)[0]


def within(T: Any, index: Any, size: int) -> Any:
    """An index that is in ``[0, size)`` anyway, in a form that shows it."""
    return T.min(T.max(kept(T, index), 0), size - 1)
