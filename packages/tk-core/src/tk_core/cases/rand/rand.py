"""Cases of rand."""

from __future__ import annotations

from .. import Cases
from .randn import BENCH, ERRORS, SAMPLES, written_bytes

CASES = {
    "rand.rand": Cases(samples=SAMPLES, errors=ERRORS, bench=BENCH, bytes_moved=written_bytes, inplace=("generator",))
}
