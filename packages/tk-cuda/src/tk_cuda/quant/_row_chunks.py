"""Quantization of rows in groups of any size: a thread block takes a chunk of a row that holds whole groups.

The groups meet in shared memory: amax by atomic maxima, then one thread for each stored scale, then the data. A thread
holds its vectors meanwhile where registers allow it, else it reads ``x`` again, from a cache.
"""

from __future__ import annotations

import math
from typing import Any

from tk_core.formats import ceil_div

from ..jit import Builder
from ..tile import groups
from ._row_groups import VECTOR, Key, Scale, Vector, signature

_CHUNK = 2048
"""Columns that a thread block takes at least, where the row has them."""
_VECTORS = 4
"""Vectors of a thread from which on a chunk gets more than 256 threads."""
_HELD_WORDS = 32
"""Words of ``x`` that a thread holds at most."""


def chunk_columns(columns: int, group: int, packed: bool) -> int:
    """Columns of a chunk: whole vectors, whole groups and whole words of packed scales, or the whole row."""
    unit = math.lcm(group * (4 if packed else 1), VECTOR)
    return min(ceil_div(_CHUNK, unit) * unit, ceil_div(columns, VECTOR) * VECTOR)


def _geometry(vectors: int) -> tuple[int, int]:
    """Threads of a chunk, and vectors in each."""
    turns = ceil_div(vectors, min(max(256, ceil_div(vectors, _VECTORS)), 1024))
    return ceil_div(vectors, turns * 32) * 32, turns


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = Key(*key)
    chunk = k.rows
    chunks = ceil_div(k.columns, chunk)
    in_chunk = ceil_div(chunk, k.group)  # groups
    vectors = chunk // VECTOR
    words = groups.words(k.dtype)
    if k.fmt == "e5m6" and chunks > 1 and chunk % 32:  # chunks do not start at 16 bytes
        k = k._replace(store_width=min(k.store_width, 4))
    scale, vector = Scale(k), Vector(k)
    one_group = k.group % VECTOR == 0 or k.group >= k.columns  # in each vector
    per_word = 4 if k.packed else 1
    threads, turns = _geometry(vectors)
    held = turns * words <= _HELD_WORDS
    each_turn = T.unroll if held else T.serial

    @T.macro
    def fetch(
        x: Any, x_sf: Any, raw: Any, factors: Any, i: Any, row: Any, column0: Any, rows: Any, s0: Any, s1: Any
    ) -> None:
        """Load vector ``i`` of the thread; zeros past the chunk."""
        at = i * threads + T.get_thread_binding()
        exists = T.if_then_else(at < vectors, row, rows)
        vector.fetch(x, x_sf, raw, factors, i if held else 0, exists, column0 + at * VECTOR, rows, s0, s1)

    @T.macro
    def measure(raw: Any, factors: Any, i: Any, amax: Any, most: Any, column0: Any) -> None:
        """Raise the amax of the groups of a vector; of the only group, that of the thread."""
        found = T.alloc_local((1,), "uint32")
        v = T.alloc_local((VECTOR,), "float32")
        slot = i if held else 0
        at = i * threads + T.get_thread_binding()
        if one_group:
            vector.amax(found, raw, factors, slot)
            if in_chunk == 1:
                most[0] = T.max(most[0], found[0])
            elif at < vectors and column0 + at * VECTOR < k.columns:
                T.call_extern("handle", "atomicMax", T.access_ptr(amax[at * VECTOR // k.group], "rw"), found[0])
        else:
            vector.values(v, raw, slot)
            for j in T.unroll(VECTOR):
                if k.x_kind >= 0:
                    v[j] = T.ieee_mul(v[j], factors[slot * vector.factors + j % vector.factors])
                found[0] = T.call_extern("uint32", "tk_amax", T.uint32(0), v[j])
                if at < vectors and column0 + at * VECTOR + j < k.columns:
                    group = (at * VECTOR + j) // k.group
                    T.call_extern("handle", "atomicMax", T.access_ptr(amax[group], "rw"), found[0])

    @T.macro
    def measure_all(
        x: Any, x_sf: Any, raw: Any, factors: Any, amax: Any, row: Any, column0: Any, rows: Any, s0: Any, s1: Any
    ) -> None:
        most = T.alloc_local((1,), "uint32")
        most[0] = T.uint32(0)
        for i in each_turn(turns):
            if not held:
                fetch(x, x_sf, raw, factors, i, row, column0, rows, s0, s1)
            measure(raw, factors, i, amax, most, column0)
        if one_group and in_chunk == 1:
            most[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(0xFFFFFFFF), most[0])
            if T.get_thread_binding() % 32 == 0:
                T.call_extern("handle", "atomicMax", T.access_ptr(amax[0], "rw"), most[0])

    @T.macro
    def store_scale(sf: Any, amax: Any, row: Any, first: Any, at: Any, rows: Any) -> None:
        """Write stored scale ``at`` of a chunk whose first group is ``first``; what lies behind the rows is zero."""
        stored = T.alloc_local((1,), "uint32")
        stored[0] = T.uint32(0)
        if row < rows:
            for b in T.unroll(per_word):
                if at * per_word + b < in_chunk and (first + at * per_word + b) * k.group < k.columns:
                    code = T.alloc_local((1,), "uint32")
                    code[0] = scale.stored(scale.code(amax[at * per_word + b]))
                    stored[0] = T.bitwise_or(stored[0], T.shift_left(code[0], T.uint32(8 * b)))
        column = first // per_word + at
        T.call_extern(
            "handle", scale.put, T.access_ptr(sf[column, row] if k.padded else sf[row, column], "w"), stored[0]
        )

    @T.macro
    def write(
        out: Any,
        sf: Any,
        raw: Any,
        factors: Any,
        i: Any,
        amax: Any,
        row: Any,
        column0: Any,
        rows: Any,
        s0: Any,
        s1: Any,
    ) -> None:
        """Encode a vector with the factors of its groups."""
        codes = T.alloc_local((1 if one_group else VECTOR,), "uint32")
        given = T.alloc_local((1,), "float32")
        at = i * threads + T.get_thread_binding()
        column = column0 + at * VECTOR
        end = T.min(column0 + chunk, k.columns)
        for j in T.unroll(1 if one_group else VECTOR):
            if k.part == "data":
                vector.given(given, sf, row, column + j, rows, s0, s1, 0)
                codes[j] = T.reinterpret("uint32", given[0])
            else:
                codes[j] = scale.code(amax[T.min((at * VECTOR + j) // k.group, in_chunk - 1)])
        vector.write(out, raw, factors, i if held else 0, row, column, rows, end, codes)

    @T.macro
    def body(x: Any, x_sf: Any, out: Any, sf: Any, clamp: Any, rows: Any, last: Any, s0: Any, s1: Any) -> None:
        with T.Kernel(last * chunks, threads=threads) as index:
            T.import_source(groups.SOURCE)
            thread = T.get_thread_binding()
            row = T.alloc_var("int32", init=T.truncdiv(index, chunks))
            column0 = T.alloc_var("int32", init=T.truncmod(index, chunks) * chunk)
            amax = T.alloc_shared((in_chunk,), "uint32", scope="shared")
            raw = T.alloc_local(((turns if held else 1) * words,), "uint32")
            factors = T.alloc_local(((turns if held else 1) * vector.factors,), "float32")

            if held:
                for i in T.unroll(turns):
                    fetch(x, x_sf, raw, factors, i, row, column0, rows, s0, s1)
            if k.part != "data":
                for i in T.serial(ceil_div(in_chunk, threads)):
                    if i * threads + thread < in_chunk:
                        amax[i * threads + thread] = T.reinterpret("uint32", clamp)
                T.sync_threads()
                measure_all(x, x_sf, raw, factors, amax, row, column0, rows, s0, s1)
                T.sync_threads()
            if k.part in ("all", "sf"):
                for i in T.serial(ceil_div(in_chunk, per_word * threads)):
                    at = i * threads + thread
                    if at * per_word < in_chunk and column0 + at * per_word * k.group < k.columns:
                        store_scale(sf, amax, row, T.truncdiv(column0, k.group), at, rows)
            if k.part != "sf":
                for i in each_turn(turns):
                    if not held:
                        fetch(x, x_sf, raw, factors, i, row, column0, rows, s0, s1)
                    write(out, sf, raw, factors, i, amax, row, column0, rows, s0, s1)

    return signature(k, body)


# Accesses are predicated and barriers placed where they are needed: atomic maxima do not conflict.
CHUNKS = Builder(
    "quant.row_chunks",
    _build,
    pass_configs={"tl.disable_safe_memory_legalize": True, "tl.disable_thread_storage_sync": True},
)


def _key(part: str, dtype: str, fmt: str, group: int, mode: str, **other: Any) -> Key:
    rows = chunk_columns(7168, group, bool(other.get("packed")))
    plain = Key(part, dtype, 7168, fmt, group, mode, False, False, False, groups.SF_NONE, 0, 0, 16, 16, rows)
    return plain._replace(**other)


CI_KEYS = [
    (CHUNKS, _key("all", "bfloat16", "e4m3", 7168, "plain")),
    (CHUNKS, _key("all", "bfloat16", "e2m1", 6, "round", packed=True, padded=True, stochastic=True)),
    (CHUNKS, _key("all", "int8", "e2m1", 24, "e4m3", x_kind=groups.SF_PACKED_ROWS, x_rows=32, x_columns=1)),
    (CHUNKS, _key("sf", "float32", "e4m3", 1, "round", padded=True)),
    (CHUNKS, _key("data", "float32", "e2m1", 5, "plain")),
    (CHUNKS, _key("back", "bfloat16", "e4m3", 3, "e4m3")),
    (CHUNKS, _key("all", "bfloat16", "e5m6", 7168, "plain", padded=True)),
]
