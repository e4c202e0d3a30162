"""per_token_cast and its variants: each vector core takes rows in turn.

A row is copied to UB. One SIMT thread takes the groups of one word of scales: their amax over absolute bit patterns as
integers, where NaN and Inf sort above every finite value; then scale and factor; the scale goes straight to global
memory, through strides, so that one kernel serves every layout. Then one thread a byte of codes.

Bytes: x once in, codes and scales once out.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.backend import Refused
from tk_core.formats import FORMATS

from ..jit import Builder, vector_cores
from ..tile import codes
from ..tile.rows import UB_BYTES, room

THREADS = 256


def _build(x_dtype: str, fmt: str, mode: str, group: int, width: int, data: bool, cores: int):
    from tilelang.ascend import language as T

    form = FORMATS[fmt]
    packed = mode == "packed"
    groups = -(-width // group)
    in_word = 2 if packed else 1
    code_dtype = "float8_e4m3fn" if fmt == "e4m3" else "int8"
    sf_dtype = {"packed": "int16", "e4m3": "uint8", "given e4m3": "uint8"}.get(mode, "float32")
    rows, columns, ld = T.dynamic("rows"), T.dynamic("columns"), T.dynamic("ld")
    stored, sf_columns, sf_s0, sf_s1 = (T.dynamic(n) for n in ("stored", "sf_columns", "sf_s0", "sf_s1"))

    @T.prim_func
    def per_token_cast(
        x: T.StridedTensor((rows, columns), (ld, 1), x_dtype),
        q: T.Tensor((rows, stored), code_dtype),
        sf: T.StridedTensor((rows, sf_columns), (sf_s0, sf_s1), sf_dtype),
        clamp_min: T.float32,
    ):
        with T.Kernel(cores) as core:
            source = T.alloc_shared((width,), x_dtype)
            factor = T.alloc_shared((groups + 1,), T.float32)
            coded = T.alloc_shared((width // form.codes,), code_dtype)
            for row in T.Persistent([rows], cores, core, group_size=1):
                T.copy(x[row, 0:columns], source[0:columns])
                with T.SimtVF(threads=THREADS):
                    for word in T.Parallel(-(-groups // in_word)):
                        most = T.alloc_var(T.int32)
                        stored_word = T.alloc_var(T.int32)
                        stored_word = 0
                        for part in T.serial(in_word):
                            first = (word * in_word + part) * group
                            if first < columns:
                                most = 0
                                for j in T.serial(group):
                                    if first + j < columns:
                                        most = T.max(most, codes.magnitude(T, T.Cast(T.float32, source[first + j])))
                                if mode == "given":
                                    factor[word] = T.float32(1.0) / sf[row, word]
                                elif mode == "given e4m3":
                                    scale = T.Cast(T.float32, T.reinterpret(sf[row, word], "float8_e4m3fn"))
                                    factor[word] = T.float32(1.0) / scale
                                else:
                                    scale, inverse = codes.scale(
                                        T, most, clamp_min, form.qmax, mode in ("round", "packed"), mode == "e4m3"
                                    )
                                    factor[word * in_word + part] = inverse
                                    if packed:
                                        stored_word = stored_word | (codes.exponent(T, scale) << (part * 8))
                                    else:
                                        sf[row, word] = codes.stored_scale(T, scale, mode == "e4m3")
                        if packed and word * in_word * group < columns:
                            sf[row, word] = T.Cast(T.int16, stored_word)
                if data:
                    with T.SimtVF(threads=THREADS):
                        for c in T.Parallel(width // form.codes):
                            if c * form.codes < columns:
                                if fmt == "e4m3":
                                    coded[c] = codes.to_e4m3(T, T.Cast(T.float32, source[c]) * factor[c // group])
                                else:
                                    low = codes.to_e2m1(T, T.Cast(T.float32, source[2 * c]) * factor[2 * c // group])
                                    high = codes.to_e2m1(
                                        T, T.Cast(T.float32, source[2 * c + 1]) * factor[(2 * c + 1) // group]
                                    )
                                    coded[c] = T.Cast(T.int8, low | (high << 4))
                    T.copy(coded[0:stored], q[row, 0:stored])

    return per_token_cast


_CAST = Builder("quant.per_token_cast", _build)


def _refusal(x: Tensor, quantized: bool, stochastic: bool) -> str | None:
    if quantized:
        return "no kernel for a quantized input"
    if stochastic:
        return "no kernel for stochastic rounding"
    fits = (x.dtype.itemsize + 6) * room(x.shape[1]) <= 2 * UB_BYTES
    return None if fits else f"a row of {x.shape[1]} elements does not fit in the unified buffer"


def _launch(
    x: Tensor, q: Tensor | None, sf: Tensor, fmt: str, group: int, mode: str, clamp_min: float, reason: str | None
) -> None:
    if reason is not None:
        raise Refused(reason)
    width = room(x.shape[1])
    group = min(group, width)
    data = q is not None
    if q is None:
        q = x.new_empty((x.shape[0], 1), dtype=FORMATS[fmt].dtype)
    if sf.dtype == torch.float8_e4m3fn:  # SIMT code loads and stores them as bytes
        sf = sf.view(torch.uint8)
    _CAST((x.dtype, fmt, mode, group, width, data, vector_cores(x.device)), x, q, sf, clamp_min)


def _mode(round_sf: bool, packed: bool, e4m3_sf: bool) -> str:
    return "packed" if packed else "round" if round_sf else "e4m3" if e4m3_sf else "plain"


class PerTokenCast:
    """``quant.per_token_cast``."""

    revision = 1

    def refusal(self, x: Tensor, x_sf: Tensor | None, *rest: Any) -> str | None:
        return _refusal(x, x_sf is not None, rest[8])

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, x_sf: Tensor | None, *rest: Any) -> None:
        fmt, group, _, _, _, round_sf, packed, e4m3_sf, _, clamp_min, *_ = rest
        reason = self.refusal(x, x_sf, *rest)
        _launch(x, outs[0], outs[1], fmt, group, _mode(round_sf, packed, e4m3_sf), clamp_min, reason)


class PerTokenCastWithSfOnly:
    """``quant.per_token_cast_with_sf_only``."""

    revision = 1

    def refusal(self, x: Tensor, *rest: Any) -> str | None:
        return _refusal(x, False, False)

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, *rest: Any) -> None:
        fmt, group, _, round_sf, packed, e4m3_sf, clamp_min, *_ = rest
        _launch(x, None, outs[0], fmt, group, _mode(round_sf, packed, e4m3_sf), clamp_min, self.refusal(x))


class PerTokenCastWithPrecomputedSf:
    """``quant.per_token_cast_with_precomputed_sf``."""

    revision = 1

    def refusal(self, x: Tensor, *rest: Any) -> str | None:
        return _refusal(x, False, False)

    def __call__(self, outs: tuple[Tensor, ...], x: Tensor, sf: Tensor, fmt: str, num_per_channels: int) -> None:
        mode = "given e4m3" if sf.dtype == torch.float8_e4m3fn else "given"
        _launch(x, outs[0], sf, fmt, num_per_channels, mode, 0.0, self.refusal(x))


KERNELS: dict[str, Any] = {
    "quant.per_token_cast": PerTokenCast(),
    "quant.per_token_cast_with_sf_only": PerTokenCastWithSfOnly(),
    "quant.per_token_cast_with_precomputed_sf": PerTokenCastWithPrecomputedSf(),
}
