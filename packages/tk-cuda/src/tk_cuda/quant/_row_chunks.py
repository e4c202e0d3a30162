"""Quantization of rows in groups of any size: a thread block takes a chunk of a row that holds whole groups.

The groups meet in shared memory: amax by atomic maxima, then one thread for each stored scale, then the data; so
``x`` is read twice, the second time from a cache.
"""

from __future__ import annotations

import math
from typing import Any

from tk_core.formats import ceil_div

from ..jit import Builder
from ..tile import groups
from ._row_groups import VECTOR, Key, Scale, Vector, signature

_THREADS = 256
_CHUNK = 2048
"""Columns that a thread block takes at least, where the row has them."""


def chunk_columns(columns: int, group: int, packed: bool) -> int:
    """Columns of a chunk: whole vectors, whole groups and whole words of packed scales, or the whole row."""
    unit = math.lcm(group * (4 if packed else 1), VECTOR)
    return min(ceil_div(_CHUNK, unit) * unit, ceil_div(columns, VECTOR) * VECTOR)


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = Key(*key)
    chunk = k.rows
    chunks = ceil_div(k.columns, chunk)
    in_chunk = ceil_div(chunk, k.group)  # groups
    vectors = chunk // VECTOR
    words = groups.words(k.dtype)
    scale, vector = Scale(k), Vector(k)
    one_group = k.group % VECTOR == 0 or k.group >= k.columns  # in each vector
    per_word = 4 if k.packed else 1

    @T.macro
    def measure(x: Any, x_sf: Any, amax: Any, row: Any, column: Any, rows: Any, s0: Any, s1: Any) -> None:
        """Raise the amax of the groups of a vector."""
        raw = T.alloc_local((words,), "uint32")
        factors = T.alloc_local((vector.factors,), "float32")
        found = T.alloc_local((1,), "uint32")
        v = T.alloc_local((VECTOR,), "float32")
        vector.fetch(x, x_sf, raw, factors, 0, row, column, rows, s0, s1)
        if one_group:
            vector.amax(found, raw, factors, 0)
            T.call_extern("handle", "atomicMax", T.access_ptr(amax[column % chunk // k.group], "rw"), found[0])
        else:
            vector.values(v, raw, 0)
            for j in T.unroll(VECTOR):
                if k.x_kind >= 0:
                    v[j] = T.ieee_mul(v[j], factors[j % vector.factors])
                found[0] = T.call_extern("uint32", "tk_amax", T.uint32(0), v[j])
                if column + j < k.columns:
                    at = (column % chunk + j) // k.group
                    T.call_extern("handle", "atomicMax", T.access_ptr(amax[at], "rw"), found[0])

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
        x: Any, x_sf: Any, out: Any, sf: Any, amax: Any, row: Any, column: Any, rows: Any, s0: Any, s1: Any
    ) -> None:
        """Encode a vector with the factors of its groups."""
        raw = T.alloc_local((words,), "uint32")
        factors = T.alloc_local((vector.factors,), "float32")
        codes = T.alloc_local((1 if one_group else VECTOR,), "uint32")
        vector.fetch(x, x_sf, raw, factors, 0, row, column, rows, s0, s1)
        for j in T.unroll(1 if one_group else VECTOR):
            if k.part == "data":
                vector.given(codes, sf, row, column + j, rows, s0, s1, j)
            else:
                at = T.min((column % chunk + j) // k.group, in_chunk - 1)
                codes[j] = scale.code(amax[at])
        vector.write(out, raw, factors, 0, row, column, rows, codes)

    @T.macro
    def write_all(
        x: Any, x_sf: Any, out: Any, sf: Any, amax: Any, row: Any, column0: Any, rows: Any, s0: Any, s1: Any
    ) -> None:
        if row < rows:
            for i in T.serial(ceil_div(vectors, _THREADS)):
                at = i * _THREADS + T.get_thread_binding()
                if at < vectors and column0 + at * VECTOR < k.columns:
                    write(x, x_sf, out, sf, amax, row, column0 + at * VECTOR, rows, s0, s1)

    @T.macro
    def body(x: Any, x_sf: Any, out: Any, sf: Any, clamp: Any, rows: Any, last: Any, s0: Any, s1: Any) -> None:
        with T.Kernel(last * chunks, threads=_THREADS) as index:
            T.import_source(groups.SOURCE)
            thread = T.get_thread_binding()
            row = T.alloc_var("int32", init=T.truncdiv(index, chunks))
            column0 = T.alloc_var("int32", init=T.truncmod(index, chunks) * chunk)
            amax = T.alloc_shared((in_chunk,), "uint32", scope="shared")

            if k.part != "data":
                for i in T.serial(ceil_div(in_chunk, _THREADS)):
                    if i * _THREADS + thread < in_chunk:
                        amax[i * _THREADS + thread] = T.reinterpret("uint32", clamp)
                T.sync_threads()
                if row < rows:
                    for i in T.serial(ceil_div(vectors, _THREADS)):
                        at = i * _THREADS + thread
                        if at < vectors and column0 + at * VECTOR < k.columns:
                            measure(x, x_sf, amax, row, column0 + at * VECTOR, rows, s0, s1)
                T.sync_threads()
            if k.part in ("all", "sf"):
                for i in T.serial(ceil_div(in_chunk, per_word * _THREADS)):
                    at = i * _THREADS + thread
                    if at * per_word < in_chunk and column0 + at * per_word * k.group < k.columns:
                        store_scale(sf, amax, row, T.truncdiv(column0, k.group), at, rows)
            if k.part != "sf":
                write_all(x, x_sf, out, sf, amax, row, column0, rows, s0, s1)

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
