"""CUDA kernels of ``quant.swiglu_forward`` and ``quant.swiglu_forward_and_per_token_cast``: bound by bandwidth.

A warp takes one row and segments of 512 results of it, 16 in each lane (four loads of 16 bytes), so that whether the
row is real, and its weight, are facts of the warp; with many rows it takes several segments, to look at those facts
once. Blocks of several warps take tiles of as many rows. Groups of scales are lanes of the warp where they are 16, 32,
64, 128, 256 or 512 wide; any other group is the segment of a warp, in as many steps of 512 as it needs, and computed
twice if that is more than one: for its amax, and for its codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tk_core.backend import Refused

from ..jit import Builder, num_sms
from ..tile import access, vectors
from ..tile.function import prim_func
from . import _swiglu

_VECTORS = 2
_PER_LANE = 8 * _VECTORS
_STEP = 32 * _PER_LANE
_ITEMS_PER_SM = 96
"""Segments for each multiprocessor (about two for each warp that fits) from which on warps take several of a row."""


def _warps(group: int) -> int:
    """Warps of a block, each with a row: fewer where they also cast, so that blocks end and start more evenly."""
    return 4 if group else 8


def _segment_of(group: int) -> tuple[int, int, int]:
    """Channels that a warp takes, steps of 512 in them, and the lanes of a group (32 where it is the segment)."""
    if group == 0:
        return _STEP, 1, 32
    if group % _PER_LANE == 0 and _STEP % group == 0:
        return _STEP, 1, group // _PER_LANE
    return group, -(-group // _STEP), 32


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        channels: results in a row.
        group: channels per scale; 0 without a cast.
        rounded, packed: scales are powers of two; UE8M0 bytes in words.
        load_width, store_width: widest access in bytes that rows of ``x`` and of the result allow.
        rows: which of the arguments of :class:`_swiglu.Facts` are given.
        clamped, counted: whether there is a clamp, and a count of it.
    """

    dtype: Any
    out_dtype: Any
    channels: int
    group: int
    rounded: bool
    packed: bool
    load_width: int
    store_width: int
    rows: _swiglu.Facts
    clamped: bool
    counted: bool


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    warps = _warps(k.group)
    facts = _swiglu.Facts(*k.rows)
    segment, steps, lanes = _segment_of(k.group)
    whole = segment == _STEP and k.channels % _STEP == 0
    groups = -(-k.channels // k.group) if k.group else 0
    e, out_e = vectors.element(k.dtype), vectors.element(k.out_dtype)
    gate_up8 = f"tk_gate_up8<{e}, {k.load_width}>"
    store8 = f"tk_store8<{out_e}, {k.store_width}>"
    swiglu8 = f"tk_swiglu8<{_swiglu.flag(k.clamped)}, {_swiglu.flag(facts.weighted)}>"
    group_scale = f"tk_group_scale<{_swiglu.flag(k.rounded)}, {_swiglu.flag(k.packed)}>"
    store_scale = f"tk_store_scale<{_swiglu.flag(k.packed)}, {lanes}, true>"

    rows, row_stride = T.dynamic("rows"), T.dynamic("row_stride", "int64")
    scale_stride, group_stride = T.dynamic("scale_stride", "int64"), T.dynamic("group_stride", "int64")
    experts, tokens, topk = T.dynamic("experts"), T.dynamic("tokens"), T.dynamic("topk")
    x_type = T.StridedTensor((rows, 2 * k.channels), (row_stride, 1), k.dtype)
    out_type = T.Tensor((rows, k.channels), k.out_dtype)
    sf_columns = T.dynamic("sf_columns")
    sf_type = T.StridedTensor((rows, sf_columns), (scale_stride, group_stride), "int32" if k.packed else "float32")
    count_type = T.Tensor((4,), "int64")

    def left(start: Any, column: Any) -> Any:
        """Channels of the segment from ``column`` on."""
        return 8 if whole else T.min(start + segment, k.channels) - column

    @T.macro
    def compute(
        v: Any, x: Any, row: Any, column: Any, start: Any, outside: Any, clamp: Any, weight: Any, counted: bool
    ) -> None:
        """Results of consecutive channels, from ``column`` on."""
        l = T.alloc_local((_PER_LANE,), "float32")
        r = T.alloc_local((_PER_LANE,), "float32")
        for j in T.unroll(_VECTORS):
            T.call_extern(
                "handle",
                gate_up8,
                T.access_ptr(l[8 * j], "w", 8),
                T.access_ptr(r[8 * j], "w", 8),
                T.access_ptr(x[row, column + 8 * j], "r"),
                k.channels,
                left(start, column + 8 * j),
            )
        for j in T.unroll(_VECTORS):
            if counted:
                T.call_extern(
                    "handle",
                    "tk_count8",
                    T.access_ptr(outside[0], "rw", 4),
                    T.access_ptr(l[8 * j], "r", 8),
                    T.access_ptr(r[8 * j], "r", 8),
                    clamp,
                )
            T.call_extern(
                "handle",
                swiglu8,
                T.access_ptr(v[8 * j], "w", 8),
                T.access_ptr(l[8 * j], "rw", 8),
                T.access_ptr(r[8 * j], "rw", 8),
                clamp,
                weight,
            )

    def pointer(t: Any) -> Any:
        return T.address_of(t[(0,) * len(t.shape)])

    def swiglu(
        x: Any,
        out: Any,
        sf: Any,
        counts: Any,
        psum: Any,
        weights: Any,
        index: Any,
        expert_of: Any,
        alignment: Any,
        factor: Any,
        clamp: Any,
        clamp_min: Any,
        stored_rows: Any,
        blocks: Any,
        passes: Any,
        turns: Any,
        parts: Any,
    ) -> None:
        with T.Kernel(blocks, threads=warps * 32) as block:
            T.import_source(_swiglu.SOURCE)
            lane = T.get_thread_binding() % 32
            warp = T.get_thread_binding() // 32
            v = T.alloc_local((_PER_LANE,), "float32")
            scale = T.alloc_local((1,), "uint32")
            outside = T.alloc_local((4,), "int32")
            tile = T.alloc_var("int32")
            start = T.alloc_var("int32")
            row = T.alloc_var("int64")
            real = T.alloc_var("bool")
            weight = T.alloc_local((1,), "float32")
            amax = T.alloc_var("uint32")
            inverse = T.alloc_var("float32")
            for i in T.unroll(4):
                outside[i] = 0

            for i in T.serial(passes if k.counted else 1):
                tile = block + i * blocks
                row = T.cast(T.truncdiv(tile, parts) * warps + warp, "int64")
                real = row < rows
                if real:
                    real = T.call_extern(
                        "bool",
                        facts.function,
                        T.access_ptr(weight[0], "w", 1),
                        pointer(psum),
                        experts if facts.psum else 0,
                        alignment,
                        pointer(weights),
                        pointer(index),
                        tokens * topk if facts.indexed else 0,
                        pointer(expert_of),
                        factor,
                        row,
                        lane,
                    )
                for turn in T.serial(turns):
                    start = (T.truncmod(tile, parts) * turns + turn) * segment
                    scale[0] = T.uint32(0)
                    if real and start < k.channels:
                        if k.counted and start == 0 and lane == 0:
                            outside[3] = outside[3] + 1
                        amax = T.uint32(0)
                        for step in T.serial(steps):
                            column = start + step * _STEP + lane * _PER_LANE
                            compute(v, x, row, column, start, outside, clamp, weight[0], k.counted)
                            if k.group:
                                for j in T.unroll(_VECTORS):
                                    amax = T.max(
                                        amax, T.call_extern("uint32", "tk_amax8", T.access_ptr(v[8 * j], "r", 8))
                                    )
                            else:
                                for j in T.unroll(_VECTORS):
                                    T.call_extern(
                                        "handle",
                                        store8,
                                        T.access_ptr(out[row, column + 8 * j], "w"),
                                        T.access_ptr(v[8 * j], "r", 8),
                                        left(start, column + 8 * j),
                                    )
                        if k.group:
                            amax = T.call_extern("uint32", f"tk_amax_lanes<{lanes}>", amax)
                            inverse = T.call_extern(
                                "float32", group_scale, T.access_ptr(scale[0], "w", 1), amax, clamp_min
                            )
                            for step in T.serial(steps):
                                column = start + step * _STEP + lane * _PER_LANE
                                if steps > 1:
                                    compute(v, x, row, column, start, outside, clamp, weight[0], False)
                                for j in T.unroll(_VECTORS):
                                    T.call_extern("handle", "tk_scale8", T.access_ptr(v[8 * j], "rw", 8), inverse)
                                T.call_extern(
                                    "handle",
                                    f"tk_store_codes16<{k.store_width}>",
                                    T.access_ptr(out[row, column], "w"),
                                    T.access_ptr(v[0], "r", _PER_LANE),
                                    _PER_LANE if whole else T.min(start + segment, k.channels) - column,
                                )
                    if k.group:  # noqa: SIM102 - the second condition is of the kernel
                        # Rows past the last one are padding of the scales.
                        if (real or (row >= rows and row < stored_rows)) and start < k.channels:
                            T.call_extern(
                                "handle",
                                store_scale,
                                T.access_ptr(sf[row, 0], "w"),
                                scale[0],
                                start // k.group + lane // lanes,
                                groups,
                                groups,
                                group_stride,
                                lane,
                            )
            if k.counted:
                T.call_extern(
                    "handle",
                    "tk_add_counts",
                    T.access_ptr(counts[0], "rw", 4),
                    T.access_ptr(outside[0], "r", 4),
                    k.channels,
                )

    return prim_func(
        swiglu,
        x_type,
        out_type,
        sf_type if k.group else x_type,
        count_type if k.counted else x_type,
        *facts.types(rows, experts, tokens, topk, x_type),
        T.int32,
        T.float32,
        T.float32,
        T.float32,
        *[T.int32] * 5,
    )


_SWIGLU = Builder("quant.swiglu_forward", _build, pass_configs={"tl.disable_safe_memory_legalize": True})
_TILES_PER_COUNT = 16
"""Tiles of a block that counts, so that few blocks add to the same counters."""


def _launch(
    out: Tensor,
    sf: Tensor | None,
    column_major: bool,
    group: int,
    rounded: bool,
    packed: bool,
    clamp_min: float,
    x: Tensor,
    psum: Tensor | None,
    weights: Tensor | None,
    index: Tensor | None,
    experts: Tensor | None,
    factor: float | None,
    clamp: float | None,
    counts: Tensor | None,
    alignment: int,
) -> None:
    rows, channels = out.shape
    group = access.bounded(group, channels)
    segment, _, _ = _segment_of(group)
    widths = _swiglu.width_of(x, channels, segment), _swiglu.width_of(out, segment)
    facts = _swiglu.facts_of(psum, weights, index, experts)
    key = _Key(
        x.dtype, out.dtype, channels, group, rounded, packed, *widths, facts, clamp is not None, counts is not None
    )
    launch = _SWIGLU.get(key, x.device)
    if launch is None:
        reason = _swiglu.unsupported(x)
        if reason:
            raise Refused(reason)
        launch = _SWIGLU.compile(key, x.device)
    stored = rows if sf is None else _swiglu.stored_rows(sf, column_major)
    segments = -(-channels // segment)
    turns = max(1, min(segments, stored * segments // (_ITEMS_PER_SM * num_sms(x.device))))
    parts = -(-segments // turns)
    tiles = -(-stored // _warps(group)) * parts
    passes = _TILES_PER_COUNT if counts is not None else 1
    launch(
        x,
        out,
        x if sf is None else sf,
        x if counts is None else counts,
        x if psum is None else psum,
        x if weights is None else weights,
        x if index is None else index,
        x if experts is None else experts,
        alignment,
        1.0 if factor is None else factor,
        0.0 if clamp is None else clamp,
        clamp_min,
        stored,
        -(-tiles // passes),
        passes,
        turns,
        parts,
    )


class SwigluForward:
    """SwiGLU to bf16 or fp32."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        psum_num_tokens_per_expert: Tensor | None,
        topk_weights: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        routed_scaling_factor: float | None,
        clamp_value: float | None,
        clamped_count: Tensor | None,
        token_alignment: int,
    ) -> None:
        _launch(
            outs[0],
            None,
            False,
            0,
            False,
            False,
            0.0,
            x,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            clamp_value,
            clamped_count,
            token_alignment,
        )


class SwigluForwardAndPerTokenCast:
    """SwiGLU to e4m3 with scales of groups of channels."""

    revision = 1

    def refusal(self, x: Tensor, *args: Any) -> str | None:
        return _swiglu.unsupported(x)

    def __call__(
        self,
        outs: tuple[Tensor, ...],
        x: Tensor,
        fmt: str,
        num_per_channels: int,
        psum_num_tokens_per_expert: Tensor | None,
        topk_weights: Tensor | None,
        pos_to_token_topk: Tensor | None,
        pos_to_expert: Tensor | None,
        routed_scaling_factor: float | None,
        use_tma_aligned_col_major_sf: bool,
        round_sf: bool,
        use_packed_ue8m0: bool,
        clamp_value: float | None,
        clamped_count: Tensor | None,
        token_alignment: int,
        clamp_min: float,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> None:
        out, sf = outs
        _launch(
            out,
            sf,
            use_tma_aligned_col_major_sf,
            num_per_channels,
            round_sf,
            use_packed_ue8m0,
            clamp_min,
            x,
            psum_num_tokens_per_expert,
            topk_weights,
            pos_to_token_topk,
            pos_to_expert,
            routed_scaling_factor,
            clamp_value,
            clamped_count,
            token_alignment,
        )


KERNELS = {
    "quant.swiglu_forward": SwigluForward(),
    "quant.swiglu_forward_and_per_token_cast": SwigluForwardAndPerTokenCast(),
}

_ALL = (True, True, False, False)
_NONE = (False, False, False, False)
CI_KEYS = [
    (_SWIGLU, ("bfloat16", "bfloat16", 3072, 0, False, False, 16, 16, _ALL, True, False)),
    (_SWIGLU, ("float32", "float32", 77, 0, False, False, 4, 4, _NONE, True, True)),
    (_SWIGLU, ("bfloat16", "float8_e4m3fn", 3072, 32, True, True, 16, 16, _ALL, True, True)),
    (_SWIGLU, ("bfloat16", "float8_e4m3fn", 3072, 128, False, False, 16, 16, _NONE, False, False)),
    (_SWIGLU, ("bfloat16", "float8_e4m3fn", 576, 576, True, True, 16, 16, (False, True, True, True), True, False)),
]
