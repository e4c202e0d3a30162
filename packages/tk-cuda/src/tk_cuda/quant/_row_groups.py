"""What the kernels of row groups share: keys, signatures, scales and vectors of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

from tk_core.formats import FORMATS

from ..tile import groups
from ..tile.function import prim_func

VECTOR = 8


class Key(NamedTuple):
    """What is compiled into a kernel.

    Attributes:
        part: ``all``; only the scales (``sf``); only data for given scales (``data``); dequantized in place (``back``).
        dtype: of ``x``.
        columns: logical columns.
        group: columns of a scale.
        mode: ``plain``, ``round`` (powers of two) or ``e4m3`` scales.
        packed, padded: UE8M0 bytes in words; column-major scales, whose padding is written.
        x_kind, x_rows, x_columns: scales of a quantized ``x`` and its block.
        load_width, store_width: widest access in bytes that rows of ``x`` and of the result allow.
        rows: rows of a thread (registers), or columns of a thread block (shared memory).
    """

    part: str
    dtype: Any
    columns: int
    fmt: str
    group: int
    mode: str
    packed: bool
    padded: bool
    stochastic: bool
    x_kind: int
    x_rows: int
    x_columns: int
    load_width: int
    store_width: int
    rows: int


def lanes_of(group: int) -> int:
    """Lanes that share a group held in registers, or 0 where it does not suit."""
    lanes, odd = divmod(group, VECTOR)
    return 0 if odd or lanes not in (1, 2, 4, 8, 16, 32) else lanes


def signature(k: Key, body: Any) -> Any:
    """The TileLang function of a part, given what it does with ``(x, x_sf, out, sf, clamp)`` and sizes."""
    import tilelang.language as T

    rows = T.dynamic("rows")
    stride = T.dynamic("x_stride", "int64")
    sf_rows, sf_columns = T.dynamic("sf_rows"), T.dynamic("sf_columns")
    sf_stride = T.dynamic("sf_stride", "int64")
    in_rows, in_columns = T.dynamic("x_sf_rows"), T.dynamic("x_sf_columns")
    in_strides = (T.dynamic("x_sf_stride_0", "int64"), T.dynamic("x_sf_stride_1", "int64"))
    width = k.columns // {"int8": 2}.get(k.dtype, 1)
    sf_dtype = "int32" if k.packed else "float8_e4m3fn" if k.mode == "e4m3" else "float32"
    x_type = T.StridedTensor((rows, width), (stride, 1), k.dtype)
    x_sf_type = T.StridedTensor((in_rows, in_columns), in_strides, groups.sf_type(k.x_kind))
    out_type = T.Tensor((rows, FORMATS[k.fmt].width(k.columns)), groups.data_type(k.fmt))
    # Column-major scales come as their whole storage, a row for each column.
    sf_type = T.StridedTensor((sf_rows, sf_columns), (sf_stride, 1), sf_dtype)
    last = sf_columns if k.padded else rows
    strides = in_strides

    def cast(x: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, x, out, sf, clamp, rows, last, T.int64(0), T.int64(0))

    def requantize(x: Any, x_sf: Any, out: Any, sf: Any, clamp: Any) -> None:
        body(x, x_sf, out, sf, clamp, rows, last, *strides)

    def scales(x: Any, sf: Any, clamp: Any) -> None:
        body(x, x, x, sf, clamp, rows, last, T.int64(0), T.int64(0))

    def data(x: Any, sf: Any, out: Any) -> None:
        body(x, x, out, sf, T.float32(0), rows, rows, sf_stride, T.int64(1))

    def in_place(x: Any, clamp: Any) -> None:
        body(x, x, x, x, clamp, rows, rows, T.int64(0), T.int64(0))

    if k.part == "sf":
        return prim_func(scales, x_type, sf_type, T.float32)
    if k.part == "data":
        return prim_func(data, x_type, sf_type, out_type)
    if k.part == "back":
        return prim_func(in_place, x_type, T.float32)
    if k.x_kind >= 0:
        return prim_func(requantize, x_type, x_sf_type, out_type, sf_type, T.float32)
    return prim_func(cast, x_type, out_type, sf_type, T.float32)


class Scale:
    """Expressions of a scale mode, from the bits of a clamped amax."""

    def __init__(self, k: Key) -> None:
        import tilelang.language as T

        self.T, self.mode, self.packed = T, k.mode, k.packed
        self.qmax = T.float32(FORMATS[k.fmt].qmax)
        self.put = "tk_put_byte" if k.mode == "e4m3" and not k.packed else "tk_put_word"

    def code(self, amax: Any) -> Any:
        """What is kept of the amax: the biased exponent, the e4m3 byte, or the amax itself."""
        if self.mode == "plain":
            return amax
        return self.T.call_extern("uint32", "tk_ue8m0" if self.mode == "round" else "tk_sf_e4m3", amax, self.qmax)

    def factor(self, code: Any) -> Any:
        """What quantizes."""
        if self.mode == "plain":
            return self.T.call_extern("float32", "tk_inv_plain", code, self.qmax)
        return self.T.call_extern("float32", "tk_inv_ue8m0" if self.mode == "round" else "tk_inv_e4m3", code)

    def value(self, code: Any) -> Any:
        """The scale in fp32."""
        T = self.T
        if self.mode == "plain":
            return T.call_extern("float32", "tk_sf_plain", code, self.qmax)
        if self.mode == "round":
            return T.call_extern("float32", "tk_sf_ue8m0", code)
        return T.call_extern("float32", "tk_from_e4m3", code, T.int32(0))

    def stored(self, code: Any) -> Any:
        """The stored bits: of the fp32, the e4m3 byte, or the byte that goes into a word."""
        if self.packed or self.mode == "e4m3":
            return code
        return self.T.reinterpret("uint32", self.value(code))


class Vector:
    """Macros that act on one vector of a row: where it is, what it holds, what it becomes."""

    def __init__(self, k: Key) -> None:
        import tilelang.language as T

        kind, fmt, words = groups.element(k.dtype), groups.number(k.fmt), groups.words(k.dtype)
        short = k.dtype == "bfloat16" and k.x_kind < 0 and k.mode == "round" and k.part != "data"
        encode = f"tk_encode8<{fmt}, {', '.join(str(flag).lower() for flag in (k.stochastic, short))}>"
        per_element = k.x_kind >= 0 and k.x_columns % VECTOR != 0
        self.factors = factors = VECTOR if per_element else 1
        given_kind = groups.SF_E4M3 if k.mode == "e4m3" else groups.SF_FLOAT
        scale = Scale(k)

        def len_of(local: Any) -> int:
            return int(local.shape[0])

        def scales(codes: Any) -> bool:
            """Whether the encoder scales: the factor of an e4m3 scale can take a power of two that it needs."""
            plain = k.fmt == "e2m1" and k.mode == "e4m3" and k.x_kind < 0 and k.part != "data" and not k.stochastic
            return plain and len_of(codes) == 1

        @T.macro
        def fetch(
            x: Any, x_sf: Any, raw: Any, input_sf: Any, at: Any, row: Any, column: Any, rows: Any, s0: Any, s1: Any
        ) -> None:
            exists = T.if_then_else(row < rows, k.columns, 0)
            T.call_extern(
                "handle",
                f"tk_fetch8<{kind}, {k.load_width}>",
                T.access_ptr(raw[at * words], "w", words),
                T.access_ptr(x[row, 0], "r"),
                column,
                exists,
            )
            if k.x_kind >= 0:
                for j in T.unroll(factors):
                    input_sf[at * factors + j] = T.call_extern(
                        "float32",
                        f"tk_sf_at<{k.x_kind}>",
                        T.access_ptr(x_sf[0, 0], "r"),
                        s0,
                        s1,
                        T.min(row, rows - 1) // k.x_rows,
                        T.min(column + j, k.columns - 1) // k.x_columns,
                    )

        @T.macro
        def values(v: Any, raw: Any, at: Any) -> None:
            T.call_extern(
                "handle",
                f"tk_values8<{kind}>",
                T.access_ptr(v[0], "w", VECTOR),
                T.access_ptr(raw[at * words], "r", words),
            )

        @T.macro
        def amax(found: Any, raw: Any, input_sf: Any, at: Any) -> None:
            if factors == 1:
                found[0] = T.call_extern("uint32", f"tk_amax8<{kind}>", T.access_ptr(raw[at * words], "r", words))
                if k.x_kind >= 0:
                    product = T.ieee_mul(T.reinterpret("float32", found[0]), input_sf[at])
                    found[0] = T.call_extern("uint32", "tk_amax", T.uint32(0), product)
            else:
                v = T.alloc_local((VECTOR,), "float32")
                values(v, raw, at)
                found[0] = T.uint32(0)
                for j in T.unroll(VECTOR):
                    product = T.ieee_mul(v[j], input_sf[at * factors + j])
                    found[0] = T.call_extern("uint32", "tk_amax", found[0], product)

        @T.macro
        def given(scales: Any, sf: Any, row: Any, column: Any, rows: Any, s0: Any, s1: Any, at: Any) -> None:
            """A given scale; some other one where there is no element."""
            scales[at] = T.call_extern(
                "float32",
                f"tk_sf_at<{given_kind}>",
                T.access_ptr(sf[0, 0], "r"),
                s0,
                s1,
                T.min(row, rows - 1),
                T.min(column, k.columns - 1) // k.group,
            )

        @T.macro
        def encoded(to: Any, v: Any, raw: Any, input_sf: Any, at: Any, column: Any, codes: Any) -> None:
            inv = T.alloc_local((len_of(codes),), "float32")
            for j in T.unroll(len_of(codes)):
                # A given scale has its bits for a code.
                inv[j] = T.ieee_frcp(T.reinterpret("float32", codes[j])) if k.part == "data" else scale.factor(codes[j])
            values(v, raw, at)
            for j in T.unroll(VECTOR):
                if k.x_kind >= 0:
                    v[j] = T.ieee_mul(v[j], T.ieee_mul(input_sf[at * factors + j % factors], inv[j % len_of(codes)]))
                elif not scales(codes):
                    v[j] = T.ieee_mul(v[j], inv[j % len_of(codes)])
            saturate = (
                T.call_extern("bool", f"tk_are_coarse<{len_of(codes)}>", T.access_ptr(codes[0], "r", len_of(codes)))
                if k.mode == "e4m3" and k.part != "data"
                else T.bool(k.part == "data")
            )
            if scales(codes):
                to[0] = T.call_extern("uint32", "tk_scaled_e2m1x8", T.access_ptr(v[0], "r", VECTOR), inv[0], saturate)
            else:
                T.call_extern(
                    "handle",
                    encode,
                    T.access_ptr(to[0], "w", 3),
                    T.access_ptr(v[0], "r", VECTOR),
                    T.Cast("uint32", column // 4),
                    saturate,
                )

        @T.macro
        def write(
            out: Any, raw: Any, input_sf: Any, at: Any, row: Any, column: Any, rows: Any, end: Any, codes: Any
        ) -> None:
            """Encode a vector by the code of its group, or the codes of its elements; store what is before ``end``."""
            v = T.alloc_local((VECTOR,), "float32")
            packed = T.alloc_local((3,), "uint32")
            encoded(packed, v, raw, input_sf, at, column, codes)
            exists = T.if_then_else(row < rows, end, 0)
            if k.part == "back":
                sf = T.alloc_local((len_of(codes),), "float32")
                for j in T.unroll(len_of(codes)):
                    sf[j] = scale.value(codes[j])
                T.call_extern(
                    "handle", f"tk_decode8<{fmt}>", T.access_ptr(v[0], "w", VECTOR), T.access_ptr(packed[0], "r", 3)
                )
                for j in T.unroll(VECTOR):
                    v[j] = T.ieee_mul(v[j], sf[j % len_of(codes)])
                T.call_extern(
                    "handle",
                    f"tk_store8<{kind}, {k.store_width}>",
                    T.access_ptr(out[row, column], "w"),
                    T.access_ptr(v[0], "r", VECTOR),
                    exists - column,
                )
            else:
                T.call_extern(
                    "handle",
                    f"tk_emit8<{fmt}, {k.store_width}>",
                    T.access_ptr(out[row, 0], "w"),
                    T.access_ptr(packed[0], "r", 3),
                    column,
                    exists,
                )

        self.fetch, self.amax, self.given, self.write = fetch, amax, given, write
        self.values = values
