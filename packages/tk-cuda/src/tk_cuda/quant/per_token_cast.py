"""CUDA kernels of ``quant.per_token_cast`` and its variants: bound by bandwidth.

Groups of a power of two of vectors (8 to 256 columns) go through registers: a lane takes vectors of eight elements
in ``rows`` neighbouring rows, so that many loads are in flight; the lanes of a group meet by shuffles; and the lanes
of a group then write the scales of different rows, which lie side by side in column-major tensors. Other groups
(:mod:`._row_chunks`) meet in shared memory and read ``x`` twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import E5M6, FORMAT_OF_DTYPE, ceil_div, whole_storage

from ..jit import Builder, Launcher
from ..tile import access, groups
from . import _row_chunks
from ._row_groups import VECTOR, Key, Scale, Vector, lanes_of, signature

THREADS = 256
ROWS = 4
"""Rows that a thread takes where there are many."""
FEWER_ROWS = 2
"""The same where there are fewer, or rows take more registers: of quantized ``x``, and where the result replaces it."""
THREADS_PER_SM = 1536
"""Threads that a multiprocessor shall hold of the form whose encoding is long: they hide its latency."""
MANY = 1 << 22
"""Elements above which there are many."""
FEW, FEW_IN_PLACE = 1 << 17, 1 << 20
"""Elements up to which a thread takes one row, to keep every multiprocessor busy; where the result replaces ``x``."""


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = Key(*key)
    lanes = lanes_of(k.group)
    holders = 4 * lanes if k.packed else lanes  # lanes that know a stored scale; more than a warp: several vectors
    items = max(holders // 32, 1)
    holders = min(holders, 32)
    step = holders * VECTOR
    per_row = ceil_div(k.columns, step * items) * holders  # threads of a row
    words = groups.words(k.dtype)
    kept = ceil_div(k.rows, holders)
    crowded = k.part == "all" and k.fmt == "e2m1" and k.dtype == "bfloat16" and not k.stochastic
    scale, vector = Scale(k), Vector(k)

    @T.macro
    def group_amax(amax: Any) -> None:
        for d in T.unroll(lanes.bit_length() - 1):
            amax[0] = T.max(amax[0], T.shfl_xor(amax[0], T.int32(1) << d))

    @T.macro
    def hold(keep: Any, stored: Any, r: Any, row0: Any, lane: Any, rows: Any) -> None:
        """One of the lanes that know the scale of row ``r`` keeps it; rows that do not exist have zero."""
        if lane % holders == r % holders:
            keep[r // holders] = T.if_then_else(row0 + r < rows, stored[0], T.uint32(0))

    @T.macro
    def write_scales(sf: Any, keep: Any, row0: Any, column: Any, lane: Any, last: Any) -> None:
        """Each holder writes the scales of one row in ``holders``."""
        for s in T.unroll(kept):
            row = row0 + s * holders + lane % holders
            first = column - lane % holders * VECTOR  # of the group, which may end before the holder's own columns
            at = first // (4 * k.group if k.packed else k.group)
            if s * holders + lane % holders < k.rows and row < last and first < k.columns:
                T.call_extern("handle", scale.put, T.access_ptr(sf[at, row] if k.padded else sf[row, at], "w"), keep[s])

    @T.macro
    def body(x: Any, x_sf: Any, out: Any, sf: Any, clamp: Any, rows: Any, last: Any, s0: Any, s1: Any) -> None:
        with T.Kernel(T.ceildiv(T.ceildiv(last, k.rows) * per_row, THREADS), threads=THREADS) as index:
            T.import_source(groups.SOURCE)
            if crowded:
                T.annotate_min_blocks_per_sm(THREADS_PER_SM // THREADS)
            flat = T.alloc_var("int32", init=index * THREADS + T.get_thread_binding())
            row0 = T.alloc_var("int32", init=T.truncdiv(flat, per_row) * k.rows)
            lane = T.alloc_var("int32", init=T.truncmod(flat, per_row))
            column0 = T.alloc_var(
                "int32", init=T.truncdiv(lane, holders) * (step * items) + T.truncmod(lane, holders) * VECTOR
            )
            raw = T.alloc_local((k.rows * items * words,), "uint32")
            factors = T.alloc_local((k.rows * items * vector.factors,), "float32")
            given = T.alloc_local((k.rows * items if k.part == "data" else 1,), "float32")
            amax = T.alloc_local((1,), "uint32")
            code = T.alloc_local((1,), "uint32")
            stored = T.alloc_local((1,), "uint32")
            keep = T.alloc_local((kept,), "uint32")

            # All loads first, so that they are in flight together.
            for r in T.unroll(k.rows):
                for i in T.unroll(items):
                    vector.fetch(x, x_sf, raw, factors, r * items + i, row0 + r, column0 + i * step, rows, s0, s1)
                    if k.part == "data":
                        vector.given(given, sf, row0 + r, column0 + i * step, rows, s0, s1, r * items + i)
            for r in T.unroll(k.rows):
                stored[0] = T.uint32(0)
                for i in T.unroll(items):
                    if k.part == "data":
                        code[0] = T.reinterpret("uint32", given[r * items + i])
                    else:
                        vector.amax(amax, raw, factors, r * items + i)
                        group_amax(amax)
                        code[0] = scale.code(T.max(amax[0], T.reinterpret("uint32", clamp)))
                    if k.packed:
                        group = (column0 + i * step) // k.group
                        byte = group % 4 * 8
                        if group * k.group < k.columns:
                            stored[0] = T.bitwise_or(stored[0], T.shift_left(code[0], T.Cast("uint32", byte)))
                    elif k.part in ("all", "sf"):
                        stored[0] = scale.stored(code[0])
                    if k.part != "sf":
                        vector.write(
                            out, raw, factors, r * items + i, row0 + r, column0 + i * step, rows, k.columns, code
                        )
                if k.packed:
                    for d in T.unroll((holders // lanes).bit_length() - 1):
                        stored[0] = T.bitwise_or(stored[0], T.shfl_xor(stored[0], T.int32(lanes) << d))
                if k.part in ("all", "sf"):
                    hold(keep, stored, r, row0, lane, rows)
            if k.part in ("all", "sf"):
                write_scales(sf, keep, row0, column0, lane, last)

    return signature(k, body)


_CAST = Builder("quant.per_token_cast", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _rows(elements: int, in_place: bool, quantized: bool) -> int:
    """Rows that a thread takes of a matrix."""
    if elements <= (FEW_IN_PLACE if in_place else FEW):
        return 1
    return FEWER_ROWS if in_place or quantized or elements <= MANY else ROWS


def launcher(
    part: str,
    x: Tensor,
    x_sf: Tensor | None,
    out: Tensor | None,
    fmt: str,
    group: int,
    mode: str,
    packed: bool = False,
    padded: bool = False,
    stochastic: bool = False,
    x_block: tuple[int, int] = (0, 0),
) -> Launcher:
    """The compiled kernel of a call."""
    columns = x.shape[1] if x_sf is None else FORMAT_OF_DTYPE[x.dtype].logical(x.shape[1])
    group = access.bounded(group, columns)
    in_registers = lanes_of(group) > 0 and fmt != "e5m6" and x.dtype != E5M6.dtype
    if in_registers:
        rows = _rows(x.shape[0] * columns, part == "back", x_sf is not None)
    else:
        rows = _row_chunks.chunk_columns(columns, group, packed)
    result = x if part == "back" else out
    key = Key(
        part,
        x.dtype,
        columns,
        fmt,
        group,
        mode,
        packed,
        padded,
        stochastic,
        groups.sf_kind(x_sf, x_block[1]),
        access.bounded(x_block[0], x.shape[0]),
        access.bounded(x_block[1], columns),
        access.access_width(x),
        access.access_width(result) if result is not None else 0,
        rows,
    )
    builder = _CAST if in_registers else _row_chunks.CHUNKS
    return builder.get(key, x.device) or builder.compile(key, x.device)


def mode_of(round_sf: bool, use_e4m3_sf: bool) -> str:
    """The name of a scale mode in keys."""
    return "round" if round_sf else "e4m3" if use_e4m3_sf else "plain"


def refuse_words(packed: bool, ue8m0_per_word: int) -> str | None:
    """Words of packed scales hold four bytes here."""
    if packed and ue8m0_per_word != 4:
        return f"packs 4 scales in a word, the layout asks for {ue8m0_per_word}"
    return None


def stored_scales(sf: Tensor, padded: bool) -> Tensor:
    """Scales as a kernel takes them: column-major ones as their whole storage."""
    return whole_storage(sf) if padded else access.unit_columns(sf)


class PerTokenCast:
    """Data and scales."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        x_sf: Tensor | None,
        fmt: str,
        num_per_channels: int,
        x_block_rows: int,
        x_block_columns: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        use_e4m3_sf: bool,
        stochastic_cast: bool,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> str | None:
        packed = use_packed_ue8m0 or (x_sf is not None and groups.sf_type(groups.sf_kind(x_sf, 2)) == "int32")
        return refuse_words(packed, ue8m0_per_word)

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, x_sf, fmt, group, x_rows, x_columns, padded, round_sf, packed, e4m3_sf, stochastic, clamp, _, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        x = access.unit_columns(x)
        mode, block = mode_of(round_sf, e4m3_sf), (x_rows, x_columns)
        launch = launcher("all", x, x_sf, outs[0], fmt, group, mode, packed, padded, stochastic, block)
        inputs = (x,) if x_sf is None else (x, x_sf)
        launch(*inputs, outs[0], stored_scales(outs[1], padded), clamp)


class PerTokenCastWithSfOnly:
    """Scales alone."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        fmt: str,
        num_per_channels: int,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        use_e4m3_sf: bool,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> str | None:
        return refuse_words(use_packed_ue8m0, ue8m0_per_word)

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        x, fmt, group, padded, round_sf, packed, e4m3_sf, clamp, _, _ = args
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        x = access.unit_columns(x)
        launch = launcher("sf", x, None, None, fmt, group, mode_of(round_sf, e4m3_sf), packed, padded)
        launch(x, stored_scales(outs[0], padded), clamp)


class PerTokenCastWithPrecomputedSf:
    """Data for given scales."""

    revision = 1

    def refusal(self, x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> str | None:
        return None

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> None:
        x = access.unit_columns(x)
        mode = mode_of(False, sf.dtype == outs[0].dtype or sf.element_size() == 1)
        launch = launcher("data", x, None, outs[0], fmt, num_per_channels, mode)
        launch(x, access.unit_columns(sf), outs[0])


KERNELS = {
    "quant.per_token_cast": PerTokenCast(),
    "quant.per_token_cast_with_sf_only": PerTokenCastWithSfOnly(),
    "quant.per_token_cast_with_precomputed_sf": PerTokenCastWithPrecomputedSf(),
}


def _key(part: str, dtype: str, fmt: str, group: int, mode: str, **other: Any) -> Key:
    plain = Key(part, dtype, 7168, fmt, group, mode, False, False, False, groups.SF_NONE, 0, 0, 16, 16, ROWS)
    return plain._replace(**other)


CI_KEYS = [
    (_CAST, _key("all", "bfloat16", "e4m3", 32, "round", packed=True, padded=True)),
    (_CAST, _key("all", "bfloat16", "e2m1", 128, "round", packed=True, rows=1)),
    (_CAST, _key("all", "float32", "e4m3", 128, "plain", padded=True)),
    (_CAST, _key("all", "float32", "e2m1", 16, "e4m3", stochastic=True, columns=7154, load_width=8, store_width=1)),
    (_CAST, _key("all", "float8_e4m3fn", "e4m3", 32, "round", x_kind=groups.SF_PACKED, x_rows=128, x_columns=128)),
    (_CAST, _key("all", "int8", "e4m3", 64, "plain", stochastic=True, x_kind=groups.SF_FLOAT, x_rows=1, x_columns=4)),
    (_CAST, _key("sf", "bfloat16", "e2m1", 16, "e4m3", padded=True)),
    (_CAST, _key("data", "bfloat16", "e4m3", 128, "plain")),
    (_CAST, _key("back", "bfloat16", "e4m3", 128, "plain")),
]
