"""CUDA kernel of ``quant.per_block_cast_lossless``: one pass over e2m1 codes, bound by bandwidth.

The scale of an output block depends only on the input's scales, so the threads of a block read those first, find the
largest and smallest exponent together, and then move codes: sixteen of them, eight bytes, in a thread. A code times a
power of two from 2^-5 to 2^6 is a normal e4m3, so the eight magnitudes of a scale are a table of eight bytes, of which
one instruction picks four. A team of threads, a part of a warp or all of a thread block, walks over each output block;
where sixteen codes straddle input blocks they are moved eight or two at a time, and in blocks of odd width, which may
begin in the middle of a byte, one at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import is_column_major

from ..jit import Builder
from ..tile import access, block_scales, source
from ..tile.function import prim_func
from .per_channel_cast import refuse_words

_THREADS = 256

_SOURCE = r"""
// Biased exponent of a scale: 255 where it is not a normal power of two.
TK_FN int tk_exponent_of(float sf) {
  const unsigned bits = tk_bits(sf);
  return bits != 0u && (bits & 0x807fffffu) == 0u ? (int)(bits >> 23) : 255;
}
TK_FN int tk_exponent_at(unsigned word, int byte) { return (int)(word >> (8 * byte) & 255u); }
// Eight e2m1 codes times 2^shift as two words of e4m3, for shifts from -5 to 6. A code of exponent e >= 1 is
// (2 + m) * 2^(e - 2), and 1, one half, is 2^-1; as e4m3 these are the bits (e + 6 + shift) << 3 | m << 2.
TK_FN void tk_e2m1_to_e4m3(unsigned* out, unsigned codes, int shift) {
  const unsigned exponent = (unsigned)(6 + shift) & 15u;
  const unsigned low = (exponent * 0x08080800u + 0x0c080000u) & 0x7f7f7f00u;
  const unsigned high = (exponent * 0x08080808u + 0x1c181410u) & 0x7f7f7f7fu;
  const unsigned magnitudes = codes & 0x77777777u;
  // Signs of even codes in `even`, of odd codes in `codes`, at the top of each byte.
  const unsigned even = codes << 4;
  out[0] = __byte_perm(low, high, magnitudes) | (__byte_perm(even, codes, 0x5140) & 0x80808080u);
  out[1] = __byte_perm(low, high, magnitudes >> 16) | (__byte_perm(even, codes, 0x7362) & 0x80808080u);
}
template <int kCodes>
TK_FN void tk_move_codes(unsigned* out, const unsigned* codes, int shift) {
#pragma unroll
  for (int i = 0; i < (kCodes + 7) / 8; ++i) tk_e2m1_to_e4m3(out + 2 * i, codes[i], shift);
}
"""


class _Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        x_packed, packed, padded: UE8M0 words come in; go out; the columns of the result's scales are padded.
        codes: of a step of a thread, 16, 8, 2 or 1.
        load_width, store_width: widest access in bytes of that many codes in ``x`` and in the result.
        threads: of a team, which makes one output block.
    """

    x_block_rows: int
    x_block_columns: int
    block_rows: int
    block_columns: int
    x_packed: bool
    packed: bool
    padded: bool
    codes: int
    load_width: int
    store_width: int
    threads: int


def _build(*key: Any) -> Any:
    import tilelang.language as T

    k = _Key(*key)
    teams = _THREADS // k.threads
    in_down, in_across = k.block_rows // k.x_block_rows, k.block_columns // k.x_block_columns
    steps_across = k.block_columns // k.codes
    steps = k.block_rows * steps_across
    unroll = math.gcd(steps // k.threads, 8) if steps % k.threads == 0 else 1
    words = (k.codes + 7) // 8
    load = f"tk_load<{max(k.codes // 2, 1)}, {k.load_width}>"
    store = f"tk_store<{k.codes}, {k.store_width}>"

    rows, columns, x_columns = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("x_columns")
    x_strides = (T.dynamic("x_sf_stride_0", "int64"), T.dynamic("x_sf_stride_1", "int64"))
    strides = (T.dynamic("sf_stride_0", "int64"), T.dynamic("sf_stride_1", "int64"))
    x_type = T.StridedTensor((rows, x_columns), (T.dynamic("row_stride", "int64"), 1), "int8")
    x_sf_type = T.StridedTensor(
        (T.dynamic("x_sf_rows"), T.dynamic("x_sf_columns")), x_strides, "int32" if k.x_packed else "float32"
    )
    out_type = T.Tensor((rows, columns), "float8_e4m3fn")
    sf_type = T.StridedTensor(
        (T.dynamic("sf_rows"), T.dynamic("sf_columns")), strides, "int32" if k.packed else "float32"
    )

    def exponent(x_sf: Any, row: Any, column: Any) -> Any:
        """Biased exponent of the scale of an input block."""
        if not k.x_packed:
            return T.call_extern("int32", "tk_exponent_of", x_sf[row, column])
        if k.x_block_columns == 1:
            return T.call_extern("int32", "tk_exponent_at", T.reinterpret("uint32", x_sf[row // 4, column]), row % 4)
        return T.call_extern("int32", "tk_exponent_at", T.reinterpret("uint32", x_sf[row, column // 4]), column % 4)

    @T.macro
    def team_extremes(largest: Any, smallest: Any, shared: Any, thread: Any) -> None:
        for d in T.unroll(min(k.threads, 32).bit_length() - 1):
            largest[0] = T.max(largest[0], T.shfl_xor(largest[0], T.int32(1) << d))
            smallest[0] = T.min(smallest[0], T.shfl_xor(smallest[0], T.int32(1) << d))
        if k.threads > 32:
            if thread % 32 == 0:
                shared[thread // 32] = largest[0]
                shared[_THREADS // 32 + thread // 32] = smallest[0]
            T.sync_threads()
            for i in T.unroll(k.threads // 32):
                at = thread // k.threads * (k.threads // 32) + i
                largest[0] = T.max(largest[0], shared[at])
                smallest[0] = T.min(smallest[0], shared[_THREADS // 32 + at])

    @T.macro
    def find_exponent(result: Any, x_sf: Any, block_row: Any, block_column: Any, shared: Any, thread: Any) -> None:
        """The output's biased exponent, and (second) 255 in its place where the block cannot be exact."""
        largest = T.alloc_local((1,), "uint32")
        smallest = T.alloc_local((1,), "uint32")
        largest[0] = T.uint32(0)
        smallest[0] = T.uint32(255)
        for i in T.serial(T.ceildiv(in_down * in_across, k.threads)):
            at = i * k.threads + thread % k.threads
            row, column = block_row * in_down + at // in_across, block_column * in_across + at % in_across
            inside = row < T.ceildiv(rows, k.x_block_rows) and column < T.ceildiv(columns, k.x_block_columns)
            if at < in_down * in_across and inside:
                e = T.Cast("uint32", exponent(x_sf, row, column))
                largest[0] = T.max(largest[0], e)
                smallest[0] = T.min(smallest[0], e)
        team_extremes(largest, smallest, shared, thread)
        result[0] = T.max(T.Cast("int32", largest[0]) - 6, 0)
        exact = largest[0] < 255 and T.Cast("int32", smallest[0]) + 5 >= result[0]
        result[1] = T.if_then_else(exact, result[0], 255)

    @T.macro
    def write_scale(sf: Any, block_row: Any, block_column: Any, biased: Any) -> None:
        down, across = T.ceildiv(rows, k.block_rows), T.ceildiv(columns, k.block_columns)
        byte = T.Cast("uint32", biased)
        if not k.packed:
            T.call_extern(
                "handle",
                "tk_put_sf",
                T.access_ptr(sf[0, 0], "w"),
                *strides,
                block_row,
                block_column,
                down,
                T.bool(k.padded),
                T.call_extern("float32", "tk_from_ue8m0", byte),
            )
        elif k.block_columns == 1:
            T.call_extern(
                "handle",
                "tk_put_ue8m0_down<1>",
                T.access_ptr(sf[0, 0], "w"),
                strides[0],
                block_row,
                block_column,
                down,
                byte,
            )
        else:
            T.call_extern(
                "handle",
                "tk_put_ue8m0",
                T.access_ptr(sf[0, 0], "w"),
                *strides,
                block_row,
                block_column,
                down,
                across,
                T.bool(k.padded),
                byte,
            )

    @T.macro
    def move(x: Any, x_sf: Any, out: Any, block_row: Any, block_column: Any, biased: Any, thread: Any) -> None:
        codes = T.alloc_local((unroll * words,), "uint32")
        moved = T.alloc_local((2 * words,), "uint32")
        for i in T.serial(T.ceildiv(steps, k.threads * unroll)):
            for u in T.unroll(unroll):
                at = (i * unroll + u) * k.threads + thread % k.threads
                row = block_row * k.block_rows + at // steps_across
                column = block_column * k.block_columns + at % steps_across * k.codes
                T.call_extern(
                    "handle",
                    load,
                    T.access_ptr(codes[u * words], "w", words),
                    T.access_ptr(x[row, column // 2], "r"),
                    T.if_then_else(at < steps and row < rows, (columns - column + 1) // 2, 0),
                )
            for u in T.unroll(unroll):
                at = (i * unroll + u) * k.threads + thread % k.threads
                row = block_row * k.block_rows + at // steps_across
                column = block_column * k.block_columns + at % steps_across * k.codes
                if at < steps and row < rows and column < columns:
                    if k.codes == 1:
                        codes[u] = codes[u] >> T.Cast("uint32", column % 2 * 4)
                    shift = exponent(x_sf, row // k.x_block_rows, column // k.x_block_columns) - biased
                    T.call_extern(
                        "handle",
                        f"tk_move_codes<{k.codes}>",
                        T.access_ptr(moved[0], "w", 2 * words),
                        T.access_ptr(codes[u * words], "r", words),
                        shift,
                    )
                    T.call_extern(
                        "handle",
                        store,
                        T.access_ptr(out[row, column], "w"),
                        T.access_ptr(moved[0], "r", 2 * words),
                        columns - column,
                    )

    def per_block_cast_lossless(x: Any, x_sf: Any, out: Any, sf: Any) -> None:
        across = T.ceildiv(columns, k.block_columns)
        blocks = T.ceildiv(rows, k.block_rows) * across
        with T.Kernel(T.ceildiv(blocks, teams), threads=_THREADS) as index:
            T.import_source(source.SOURCE + access.SOURCE + block_scales.SOURCE + _SOURCE)
            thread = T.get_thread_binding()
            team = T.alloc_var("int32", init=index * teams + thread // k.threads)
            width = T.alloc_var("int32", init=T.ceildiv(columns, k.block_columns))
            block_row = T.alloc_var("int32", init=T.truncdiv(team, width))
            block_column = T.alloc_var("int32", init=T.truncmod(team, width))
            biased = T.alloc_local((2,), "int32")
            shared = T.alloc_shared((2 * _THREADS // 32,), "uint32", scope="shared")
            find_exponent(biased, x_sf, block_row, block_column, shared, thread)
            if block_row < T.ceildiv(rows, k.block_rows):
                if thread % k.threads == 0:
                    write_scale(sf, block_row, block_column, biased[1])
                move(x, x_sf, out, block_row, block_column, biased[0], thread)

    return prim_func(per_block_cast_lossless, x_type, x_sf_type, out_type, sf_type)


# Every access is predicated where it is made.
_CAST = Builder("quant.per_block_cast_lossless", _build, pass_configs={"tl.disable_safe_memory_legalize": True})


def _bounded(inner: int, outer: int, extent: int) -> tuple[int, int]:
    """Sizes that divide ``extent`` like ``inner`` and ``outer``, but not far past it: indices stay within 32 bits."""
    ratio = outer // inner
    whole = access.bounded(max(inner, outer), extent)
    inner = min(inner, whole)
    return inner, inner * min(ratio, -(-whole // inner))


def _team(elements: int, codes: int) -> int:
    """Threads that make a block: no more than it has steps, up to a warp; a thread block for large ones."""
    if elements > 2048:
        return _THREADS
    return min(32, 1 << ((elements // codes).bit_length() - 1))


class PerBlockCastLossless:
    """Exact e2m1 to e4m3 in coarser blocks."""

    revision = 1

    def refusal(
        self,
        x: Tensor,
        x_sf: Tensor,
        x_block_rows: int,
        x_block_columns: int,
        block_rows: int,
        block_columns: int,
        use_tma_aligned_col_major_sf: bool,
        use_packed_ue8m0: bool,
        ue8m0_per_word: int,
        sf_align_bytes: int,
    ) -> str | None:
        return refuse_words(ue8m0_per_word, use_packed_ue8m0 or not x_sf.is_floating_point())

    def __call__(self, outs: tuple[Tensor, ...], *args: Any) -> None:
        reason = self.refusal(*args)
        if reason is not None:
            raise Refused(reason)
        x, x_sf, x_block_rows, x_block_columns, block_rows, block_columns, _, packed, _, _ = args
        out, sf = outs
        x_block_rows, block_rows = _bounded(x_block_rows, block_rows, out.shape[0])
        x_block_columns, block_columns = _bounded(x_block_columns, block_columns, out.shape[1])
        codes = next(c for c in (16, 8, 2, 1) if x_block_columns % c == 0)
        key = _Key(
            x_block_rows,
            x_block_columns,
            block_rows,
            block_columns,
            x_sf.dtype == torch.int32,
            packed,
            is_column_major(sf),
            codes,
            access.access_width(x, max(codes // 2, 1)),
            access.access_width(out, codes),
            _team(block_rows * block_columns, codes),
        )
        launch = _CAST.get(key, x.device) or _CAST.compile(key, x.device)
        launch(x, x_sf, out, sf)


KERNELS = {"quant.per_block_cast_lossless": PerBlockCastLossless()}

CI_KEYS = [
    (_CAST, _Key(1, 32, 1, 128, True, True, True, 16, 8, 16, 8)),
    (_CAST, _Key(1, 32, 128, 128, False, False, False, 16, 8, 16, 256)),
    (_CAST, _Key(1, 8, 32, 32, True, True, True, 8, 4, 8, 32)),
    (_CAST, _Key(2, 6, 4, 12, False, True, False, 2, 1, 1, 32)),
    (_CAST, _Key(3, 7, 9, 21, False, False, False, 1, 1, 1, 32)),
    (_CAST, _Key(8, 1, 16, 1, True, True, False, 1, 1, 1, 16)),
]
