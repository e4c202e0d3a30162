"""Reference of rand: leading bits of the words of Philox4x32-10."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .philox import draw
from .randn import DTYPES

_BITS = {"bf16": 8, "fp32": 24}


def rand(state: Tensor, size: Sequence[int], fmt: str) -> Tensor:
    """Uniform numbers in [0, 1); the state is advanced."""
    count = math.prod(size)
    words = draw(state, count, stream=1).flatten()[:count]
    bits = _BITS[fmt]
    return ((words >> (32 - bits)).float() * 2.0**-bits).view(tuple(size)).to(DTYPES[fmt])


REFERENCES = {"rand.rand": rand}
