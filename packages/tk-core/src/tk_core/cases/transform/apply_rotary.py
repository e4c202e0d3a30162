"""Cases of apply_rotary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, bytes_of, call

_BF16, _FP32 = torch.bfloat16, torch.float32


def _call(m: Maker, query: Tensor, length: int = 64, **options: Any) -> Call:
    return call(query, m.randn(length, query.shape[-1]), **options)


def _tokens(
    tokens: int, heads: int, channels: int, dtype: torch.dtype = _BF16, gap: int = 0, **options: Any
) -> Callable[[Maker], Call]:
    """``(N, heads, D)``: the last channels of heads with a gap before them, at random positions, with a key."""

    def make(m: Maker) -> Call:
        query = m.randn(tokens, heads + 1, channels + gap, dtype=dtype)[:, :heads, gap:]
        key = m.randn(tokens, 2, channels + gap, dtype=dtype)[..., gap:]
        positions = m.randint(0, 64, (tokens,), torch.int32)
        return _call(m, query, key=key, positions=positions, **options)

    return make


def _batch(
    batch: int, tokens: int, heads: int, channels: int, dtype: torch.dtype = _BF16, **options: Any
) -> Callable[[Maker], Call]:
    """``(B, S, heads, D)`` at positions that follow one another."""

    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in options.items()}
        return _call(m, m.randn(batch, tokens, heads, channels, dtype=dtype), **made)

    return make


def _out_of_range(m: Maker) -> Call:
    positions = m.tensor([15, 16, -1, 2**32 + 3, 0], torch.int64)
    return _call(m, m.randn(5, 2, 64), 16, positions=positions)


def _out_of_range_by_offset(m: Maker) -> Call:
    positions = m.tensor([[0, 5, 14], [15, 2**31 - 1, -(2**31)]], torch.int32)
    return _call(m, m.randn(2, 3, 2, 64), 16, positions=positions, seqlen_offset=2)


def _misaligned(m: Maker) -> Call:
    return _call(m, m.randn(5, 3, 66, dtype=_BF16)[..., 1:65], positions=m.randint(0, 64, (5,)))


def _qkv(m: Maker) -> Call:
    """Query and key as heads of one projection, with the values behind them."""
    qkv = m.randn(7, 8 + 2 + 2, 64, dtype=_BF16)
    return _call(m, qkv[:, :8], key=qkv[:, 8:10])


def _halves(m: Maker) -> Call:
    """Query and key in one another's gaps."""
    both = m.randn(2, 5, 3, 128, dtype=_BF16)
    return _call(m, both[..., :64], key=both[..., 64:])


def _expanded_positions(m: Maker) -> Tensor:
    return m.randint(0, 64, (1, 9)).expand(3, 9)


def _special(m: Maker) -> Call:
    query = m.randn(4, 1, 8)
    query[0, 0, 1], query[1, 0, 2], query[2, 0, 5] = float("nan"), float("inf"), -float("inf")
    query[3] = 0.0
    return _call(m, query)


def _overlapping(m: Maker) -> Call:
    both = m.randn(5, 3, 64)
    return _call(m, both[:, :2], key=both[:, 1:])


def _error(
    why: str,
    match: str,
    query: Callable[[Maker], Tensor],
    error: type[Exception] = InvalidArgumentError,
    **options: Any,
) -> ErrorSample:
    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in options.items()}
        cache = made.pop("cos_sin_cache", None)
        return call(query(m), m.randn(16, 64) if cache is None else cache, **made)

    return ErrorSample(why, make, error, match)


def _query(m: Maker) -> Tensor:
    return m.randn(5, 2, 64)


def _bytes(arguments: Call, results: list[Tensor]) -> int:
    query, cache = arguments.args
    positions = arguments.kwargs.get("positions")
    return 2 * bytes_of([query, arguments.kwargs.get("key")]) + bytes_of([cache, positions])


def _prefill(heads: int, positions: bool, interleaved: bool, tokens: int = 8192) -> Point:
    """DeepSeek-V3: 64 rotary channels at the end of 192."""

    def make(m: Maker) -> Call:
        query = m.randn(1, tokens, heads, 192, dtype=_BF16)[..., 128:]
        options = {"positions": m.randint(0, tokens, (1, tokens), torch.int32)} if positions else {}
        return _call(m, query, tokens, interleaved=interleaved, **options)

    name = f"v3-{'prefill-8k' if tokens > 64 else f'decode-{tokens}'}-{heads}-heads"
    return Point(name + ("-positions" if positions else "") + ("-interleaved" if interleaved else ""), make)


CASES = {
    "transform.apply_rotary": Cases(
        samples=[
            Sample("halves, key, positions", _tokens(33, 5, 64, gap=128)),
            Sample("neighbours, positions that follow", _batch(1, 40, 3, 64, interleaved=True, seqlen_offset=17)),
            Sample("halves, 128 channels, float32", _tokens(33, 3, 128, _FP32, gap=128)),
            Sample("neighbours, key", _tokens(33, 32, 64, interleaved=True)),
            Sample("rotated back", _tokens(9, 4, 64, conjugate=True)),
            Sample("neighbours, rotated back", _tokens(9, 4, 128, interleaved=True, conjugate=True)),
            Sample(
                "a batch with int32 positions",
                _batch(3, 9, 4, 128, positions=lambda m: m.randint(0, 64, (3, 9), torch.int32)),
            ),
            Sample(
                "a batch with the same positions", _batch(3, 9, 4, 64, positions=_expanded_positions, interleaved=True)
            ),
            Sample("a batch without positions", _batch(3, 9, 4, 64, seqlen_offset=55)),
            *(Sample(f"{d} channels", _tokens(5, 3, d, gap=6)) for d in (2, 6, 30, 32, 96, 192, 256)),
            *(Sample(f"{d} channels, neighbours", _tokens(5, 3, d, gap=6, interleaved=True)) for d in (2, 6, 30, 256)),
            Sample("2 channels, float32", _tokens(5, 3, 2, _FP32)),
            Sample("one token, one head", _batch(1, 1, 1, 64)),
            Sample("no tokens", lambda m: _call(m, m.randn(0, 3, 64))),
            Sample("no heads in the query", _tokens(4, 0, 64)),
            Sample("no heads at all", lambda m: _call(m, m.randn(4, 0, 64))),
            Sample("128 heads", _batch(1, 5, 128, 64)),
            Sample("base pointer not aligned to 16 bytes", _misaligned),
            Sample("query and key in one projection", _qkv),
            Sample("query and key in one another's gaps", _halves),
            Sample("a cache with padded rows", lambda m: call(m.randn(5, 2, 64), m.randn(16, 80)[:, :64])),
            Sample("positions past the cache and before it: zeros", _out_of_range),
            Sample("positions past the cache by the offset", _out_of_range_by_offset),
            Sample("NaN, Inf and zeros", _special),
            Sample("every magnitude", lambda m: _call(m, m.magnitudes(40, 2, 64, low=-60, high=60))),
            Sample("more batches than a grid dimension holds", _batch(65536, 1, 1, 16), "full"),
            Sample("8192 tokens", _tokens(8192, 16, 64, gap=128), "full"),
            Sample(
                "more than 2^31 elements",
                lambda m: _call(m, m.large(8 * 8200, 32768 + 64).view(1, 65600, 171, 192)[..., 128:], 65600),
                "large",
            ),
        ],
        errors=[
            _error("rank 2", "query must have shape (N, heads, D) or (B, S, heads, D)", lambda m: m.randn(5, 64)),
            _error("float16", "query must be bfloat16", lambda m: _query(m).half(), InvalidDtypeError),
            _error(
                "an odd number of channels",
                "even number of channels",
                lambda m: m.randn(5, 2, 63),
                cos_sin_cache=lambda m: m.randn(16, 63),
            ),
            _error("columns strided", "unit stride", lambda m: m.randn(5, 64, 2).mT),
            _error(
                "overlapping heads",
                "no overlapping rows",
                lambda m: m.randn(5, 128).as_strided((5, 2, 64), (128, 8, 1)),
            ),
            _error(
                "a cache of other channels",
                "cos_sin_cache must have shape (16, 64)",
                _query,
                cos_sin_cache=lambda m: m.randn(16, 32),
            ),
            _error(
                "a bfloat16 cache",
                "cos_sin_cache must be float32",
                _query,
                InvalidDtypeError,
                cos_sin_cache=lambda m: m.randn(16, 64, dtype=_BF16),
            ),
            _error(
                "a key of another rank", "key must have the shape of query", _query, key=lambda m: m.randn(1, 5, 2, 64)
            ),
            _error(
                "a key of other tokens", "key must have the shape of query", _query, key=lambda m: m.randn(4, 2, 64)
            ),
            _error(
                "a key of another dtype",
                "key must be float32",
                _query,
                InvalidDtypeError,
                key=lambda m: m.randn(5, 2, 64, dtype=_BF16),
            ),
            ErrorSample("query and key overlap", _overlapping, InvalidArgumentError, "key must not overlap query"),
            _error(
                "positions of another shape",
                "positions must have shape (5,)",
                _query,
                positions=lambda m: m.tensor([0] * 4, torch.int64),
            ),
            _error(
                "positions in int16",
                "positions must be int32 or int64",
                _query,
                InvalidDtypeError,
                positions=lambda m: m.tensor([0] * 5, torch.int16),
            ),
            _error("a negative offset", "seqlen_offset must be at least 0", _query, seqlen_offset=-1),
            _error("tokens past the cache", "at most L - S = 16 - 5, got 12", _query, seqlen_offset=12),
            _error(
                "an offset that is no int",
                "seqlen_offset must be an int, got float",
                _query,
                InvalidDtypeError,
                seqlen_offset=1.0,
            ),
        ],
        bench=[
            _prefill(128, False, False),
            _prefill(128, True, True),
            _prefill(32, True, False),
            _prefill(1, False, True),
            _prefill(128, True, False, tokens=64),
        ],
        bytes_moved=_bytes,
        inplace=(0, "key"),
    )
}
