"""Cases of randn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, bytes_of, call

_BF16, _FP32 = torch.bfloat16, torch.float32


def drawn(*size: int, seed: int = 42, offset: int = 0, **options: Any) -> Callable[[Maker], Call]:
    """A draw from a state of its own."""

    def make(m: Maker) -> Call:
        return call(*size, generator=m.tensor([seed, offset], torch.int64), **{"dtype": _FP32, **options})

    return make


SAMPLES = [
    Sample("the first numbers of seed 42", drawn(8)),
    Sample("sizes as a tuple, bf16", lambda m: call((3, 5), generator=m.tensor([42, 0], torch.int64), dtype=_BF16)),
    Sample("one number", drawn(1)),
    Sample("no dimensions", drawn()),
    Sample("no numbers: the state stays", drawn(4, 0)),
    *(Sample(f"{n} numbers, the last block short", drawn(n)) for n in (5, 6, 7, 1023, 1025, 16385)),
    *(Sample(f"{n} numbers in bf16", drawn(n, dtype=_BF16)) for n in (5, 8, 1025)),
    Sample("a high seed and offset", drawn(64, seed=2**40 + 12345, offset=2**33 + 1)),
    Sample("seed and offset with the top bit", drawn(64, seed=-1, offset=-(2**63))),
    Sample("the low word of the offset wraps", drawn(64, offset=2**32 - 3)),
    Sample("the offset wraps", drawn(64, offset=-3)),
    Sample("three dimensions", drawn(7, 11, 13)),
    Sample("many blocks", drawn(1024, 1031), "full"),
    Sample("many blocks, bf16", drawn(1024, 1024, dtype=_BF16), "full"),
    Sample("more than 2^31 numbers", drawn(2**31 + 5, dtype=_BF16), "large"),
]
ERRORS = [
    ErrorSample("a negative size", drawn(2, -1), InvalidArgumentError, "size must have no negative element"),
    ErrorSample(
        "a list of sizes", lambda m: call([2, 3]), InvalidDtypeError, "size must be ints or one tuple of ints, got list"
    ),
    ErrorSample("float16", drawn(2, dtype=torch.float16), InvalidDtypeError, "bfloat16 or float32, got float16"),
    ErrorSample(
        "a state of three numbers",
        lambda m: call(2, generator=m.tensor([1, 2, 3], torch.int64)),
        InvalidArgumentError,
        "state must have shape (2,)",
    ),
    ErrorSample(
        "a state in int32",
        lambda m: call(2, generator=m.tensor([1, 2], torch.int32)),
        InvalidDtypeError,
        "state must be int64",
    ),
    ErrorSample("no generator", lambda m: call(2, generator=42), InvalidDtypeError, "Generator or its state, got int"),
    ErrorSample(
        "another device",
        lambda m: call(2, generator=m.tensor([1, 2], torch.int64), device="meta"),
        InvalidArgumentError,
        "device must be the device of generator",
    ),
]
BENCH = [
    Point("1M-fp32", drawn(1024, 1024)),
    Point("16M-fp32", drawn(4096, 4096)),
    Point("16M-bf16", drawn(4096, 4096, dtype=_BF16)),
    Point("1G-bf16", drawn(4096, 262144, dtype=_BF16)),
]


def written_bytes(arguments: Call, results: list[Tensor]) -> int:
    """A draw reads nothing that counts."""
    return bytes_of(results[:1])


CASES = {
    "rand.randn": Cases(samples=SAMPLES, errors=ERRORS, bench=BENCH, bytes_moved=written_bytes, inplace=("generator",))
}
