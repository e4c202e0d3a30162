"""Cases of norm_forward and of its casting form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, Tolerance, bytes_of, call
from ._norm import compare_normal, compare_quantized, parts
from ._swiglu import bits, clear_poisoned_codes

_BF16, _FP32 = torch.bfloat16, torch.float32
_NAN, _INF = float("nan"), float("inf")
_EPS = 1e-6
_PACKED: dict[str, Any] = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
Form = Callable[..., Call]


def _plain(m: Maker, x: Tensor, weight: bool = True, **options: Any) -> Call:
    return call(x, m.randn(x.shape[-1], dtype=x.dtype) if weight else None, options.pop("eps", _EPS), **options)


def _cast(m: Maker, x: Tensor, weight: bool = True, npc: int = 32, **options: Any) -> Call:
    w = m.randn(x.shape[-1], dtype=x.dtype) if weight else None
    return call(x, w, options.pop("eps", _EPS), "e4m3", npc, **options)


def _rows(m: Maker, *shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return m.randn(*shape, dtype=dtype)


def _residual(form: Form, *shape: int, dtype: torch.dtype = _BF16, **options: Any) -> Callable[[Maker], Call]:
    return lambda m: form(
        m, _rows(m, *shape, dtype=dtype), residual=_rows(m, *shape, dtype=dtype), with_rstd=True, **options
    )


def _strided(form: Form, **options: Any) -> Callable[[Maker], Call]:
    """Batches and rows with gaps, and buffers with other gaps."""

    def make(m: Maker) -> Call:
        x, residual = _rows(m, 3, 6, 144)[:2, :5, :128], _rows(m, 2, 5, 132)[..., 4:]
        return form(m, x, residual=residual, residual_out=m.full((2, 6, 160), 7.0, _BF16)[:, 1:, 16:144], **options)

    return make


def _not_finite(form: Form, dtype: torch.dtype, **options: Any) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        x = m.randn(6, 128)
        x[0, 5], x[1, 7], x[2, 9] = _NAN, _INF, -_INF
        x[3] = 0.0
        x[4] = -0.0
        return form(m, x.to(dtype), **options)

    return make


def _shifted(m: Maker, *shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    """Contiguous values that start one element past an allocation."""
    return m.randn(1 + math.prod(shape), dtype=dtype)[1:].view(shape)


def _misaligned(form: Form, *names: str, dtype: torch.dtype = _BF16) -> Callable[[Maker], Call]:
    """Some tensors that start one element past an allocation, beside others that do not."""

    def make(m: Maker) -> Call:
        tensors = {
            name: (_shifted if name in names else _rows)(m, *(() if name == "weight" else (5,)), 96, dtype=dtype)
            for name in ("x", "weight", "residual", "residual_out")
        }
        made = form(m, tensors["x"], **{name: tensors[name] for name in ("residual", "residual_out")})
        return Call((made.args[0], tensors["weight"], *made.args[2:]), made.kwargs)

    return make


def _shapes(form: Form) -> list[Sample]:
    """Sizes, strides, base pointers and options, common to both forms."""
    return [
        Sample("one row, with residual", _residual(form, 1, 256)),
        Sample("float32, with residual", _residual(form, 9, 256, dtype=_FP32)),
        Sample("one channel", lambda m: form(m, _rows(m, 5, 1))),
        Sample("100 channels", lambda m: form(m, _rows(m, 5, 100))),
        Sample("37 channels, float32", lambda m: form(m, _rows(m, 5, 37, dtype=_FP32))),
        Sample("7168 channels, with residual", _residual(form, 3, 7168)),
        Sample("8328 channels", lambda m: form(m, _rows(m, 2, 8328))),
        Sample("65536 channels, with residual", _residual(form, 2, 65536)),
        Sample("65536 channels, float32", lambda m: form(m, _rows(m, 1, 65536, dtype=_FP32))),
        Sample("without a weight", lambda m: form(m, _rows(m, 5, 192), weight=False)),
        Sample("scaled, without a weight", lambda m: form(m, _rows(m, 5, 192), weight=False, out_scale=0.3)),
        Sample("scaled", lambda m: form(m, _rows(m, 5, 192), out_scale=0.3)),
        Sample("three dimensions", _residual(form, 2, 5, 192)),
        Sample("three dimensions with gaps, a residual with other gaps, a buffer for the sum", _strided(form)),
        Sample("the residual is the input itself", _twice(form)),
        Sample("rows with stride 0", lambda m: form(m, _rows(m, 1, 96).expand(5, 96), residual=_rows(m, 5, 96))),
        *(
            Sample(
                f"base pointer of {' and '.join(names)} not aligned to 16 bytes, {dtype}",
                _misaligned(form, *names, dtype=dtype),
            )
            for dtype in (_BF16, _FP32)
            for names in (
                ("x",),
                ("weight",),
                ("residual",),
                ("residual_out",),
                ("x", "weight", "residual", "residual_out"),
            )
        ),
        Sample("no rows", _residual(form, 0, 192)),
        Sample("no rows in a batch", _residual(form, 2, 0, 192)),
        Sample("NaN, Inf and zeros, bf16", _not_finite(form, _BF16, with_rstd=True)),
        Sample("NaN, Inf and zeros, float32", _not_finite(form, _FP32, with_rstd=True)),
        Sample("zeros and an eps of 0", lambda m: form(m, m.full((2, 64), 0.0, _BF16), eps=0.0)),
        Sample("magnitudes from 2^-40 to 2^40", lambda m: form(m, m.magnitudes(32, 96, low=-40, high=40))),
        Sample("many blocks", _residual(form, 4001, 7168), "full"),
        Sample("more than 2^31 elements", lambda m: form(m, m.large(299594, 7168)), "large"),
    ]


def _twice(form: Form) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        x = _rows(m, 5, 96)
        return form(m, x, residual=x)

    return make


def _mega_moe(m: Maker, tokens: int, block_m: int, channels: int = 256, **options: Any) -> Call:
    blocks, padded = -(-tokens // block_m), -(-block_m // 128) * 128
    buffer = m.full((channels // 128, blocks * padded + 3), -1, torch.int32)
    return _cast(
        m, _rows(m, tokens, channels), mega_moe_sf=buffer.t(), mega_moe_block_m=block_m, **{"round_sf": True, **options}
    )


def _not_rounded(m: Maker) -> Call:
    made = _mega_moe(m, 4, 8)
    return Call(made.args, {**made.kwargs, "round_sf": False})


def _short_buffer(m: Maker) -> Call:
    made = _mega_moe(m, 4, 8)
    return Call(made.args, {**made.kwargs, "mega_moe_block_m": 130})


def _row_major_buffer(m: Maker) -> Call:
    made = _mega_moe(m, 4, 8)
    return Call(made.args, {**made.kwargs, "mega_moe_sf": m.full((4, 2), 0, torch.int32)})


def _halves(m: Maker) -> dict[str, Any]:
    """Two buffers, each in the gaps of the other."""
    left, right = m.full((5, 128), 0.0, _BF16).chunk(2, 1)
    return {"out": left, "residual_out": right}


def _error(
    form: Form, why: str, match: str, error: type[Exception] = InvalidArgumentError, **options: Any
) -> ErrorSample:
    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in options.items()}
        return form(m, made.pop("x", None) if "x" in made else _rows(m, 4, 64), **made)

    return ErrorSample(why, make, error, match)


def _overlapping(form: Form, name: str) -> Callable[[Maker], Call]:
    """The input itself as a buffer."""

    def make(m: Maker) -> Call:
        x = _rows(m, 4, 64)
        residual = {"residual": _rows(m, 4, 64)} if name == "residual_out" else {}
        return form(m, x, **{name: x}, **residual)

    return make


def _common_errors(form: Form) -> list[ErrorSample]:
    def rows(*shape: int, dtype: torch.dtype = _BF16) -> Callable[[Maker], Tensor]:
        return lambda m: _rows(m, *shape, dtype=dtype)

    return [
        _error(form, "rank 1", "x must have shape (T, H) or (B, T, H)", x=rows(64)),
        _error(form, "rank 4", "x must have shape (T, H) or (B, T, H)", x=rows(1, 2, 3, 4)),
        _error(form, "float16", "x must be bfloat16", InvalidDtypeError, x=lambda m: m.randn(4, 64).half()),
        _error(form, "columns strided", "unit stride", x=lambda m: _rows(m, 64, 4).t()),
        _error(form, "no columns", "at least 1 column, got 0", x=rows(4, 0)),
        _error(form, "a negative eps", "eps must be finite and at least 0", eps=-1.0),
        _error(form, "an eps that is NaN", "eps must be finite", eps=_NAN),
        _error(form, "a residual of other rows", "residual must have shape (4, 64)", residual=rows(3, 64)),
        _error(
            form,
            "a residual of another dtype",
            "residual must be bfloat16",
            InvalidDtypeError,
            residual=rows(4, 64, dtype=_FP32),
        ),
        _error(form, "a buffer of other rows", "residual_out must have shape (4, 64)", residual_out=rows(5, 64)),
        _error(
            form,
            "a buffer with overlapping rows",
            "no overlapping rows",
            residual=rows(4, 64),
            residual_out=lambda m: _rows(m, 128).as_strided((4, 64), (8, 1)),
        ),
        ErrorSample(
            "the input as the buffer of the sum",
            _overlapping(form, "residual_out"),
            InvalidArgumentError,
            "not overlap x",
        ),
    ]


def _weight(m: Maker, weight: Any) -> Call:
    return call(_rows(m, 4, 64), weight, _EPS)


def _plain_bytes(arguments: Call, results: list[Tensor]) -> int:
    residual = arguments.kwargs.get("residual")
    made = results if residual is not None else results[:-1]
    return bytes_of([*arguments.args, residual]) + bytes_of(made)


def _cast_unspecified(arguments: Call, results: list[Tensor]) -> None:
    """Clear the codes of blocks that are not finite; and drop buffers that are among the results already."""
    for name in ("residual_out", "out_bf16"):
        if arguments.kwargs.get(name) is not None:
            results.pop()
    r = parts(results)
    if r.q.numel():
        codes = r.flat[0]
        clear_poisoned_codes(codes, r.flat[1], 1, arguments.args[4])
        bits(r.q).copy_(bits(codes).view(r.q.shape))


def _cast_bytes(arguments: Call, results: list[Tensor]) -> int:
    r = parts(results)
    residual = arguments.kwargs.get("residual")
    made = [r.q, r.sf, r.out_bf16, r.rstd, r.buffer, r.norm_input if residual is not None else None]
    return bytes_of([*arguments.args, residual]) + bytes_of(made)


def _big(form: Form, tokens: int, **options: Any) -> Callable[[Maker], Call]:
    return lambda m: form(m, _rows(m, tokens, 7168), residual=_rows(m, tokens, 7168), with_rstd=tokens > 64, **options)


CASES = {
    "quant.norm_forward": Cases(
        samples=[
            Sample("bf16", lambda m: _plain(m, _rows(m, 33, 192))),
            Sample("bf16, with residual and rstd", _residual(_plain, 33, 256)),
            *_shapes(_plain),
            Sample(
                "a buffer with gaps", lambda m: _plain(m, _rows(m, 5, 96), out=m.full((5, 128), 3.0, _BF16)[:, 16:112])
            ),
            Sample(
                "buffers in gaps of one another",
                lambda m: _plain(
                    m,
                    _rows(m, 5, 64),
                    residual=_rows(m, 5, 64),
                    **_halves(m),
                ),
            ),
        ],
        errors=[
            *_common_errors(_plain),
            ErrorSample(
                "a weight of other channels",
                lambda m: _weight(m, m.randn(32, dtype=_BF16)),
                InvalidArgumentError,
                "weight must have shape (64,)",
            ),
            ErrorSample(
                "a weight of another dtype",
                lambda m: _weight(m, m.randn(64)),
                InvalidDtypeError,
                "weight must be bfloat16",
            ),
            ErrorSample("the input as the buffer", _overlapping(_plain, "out"), InvalidArgumentError, "not overlap x"),
            _error(
                _plain,
                "a buffer of another dtype",
                "out must be torch.bfloat16",
                InvalidDtypeError,
                out=lambda m: m.randn(4, 64),
            ),
            _error(_plain, "a buffer with strided columns", "unit stride", out=lambda m: _rows(m, 64, 4).t()),
        ],
        bench=[
            Point("v3-decode-64", lambda m: _plain(m, _rows(m, 64, 7168))),
            Point("v3-prefill-8k", lambda m: _plain(m, _rows(m, 8192, 7168))),
            Point("v3-prefill-8k-residual", _big(_plain, 8192)),
            Point("v4-prefill-8k-4096", lambda m: _plain(m, _rows(m, 8192, 4096))),
        ],
        tolerance=Tolerance("rstd is a sum in any order: 2e-6 relative; the rest follows", compare=compare_normal),
        bytes_moved=_plain_bytes,
        inplace=("residual_out",),
    ),
    "quant.norm_forward_and_per_token_cast": Cases(
        samples=[
            Sample("groups of 32", lambda m: _cast(m, _rows(m, 33, 192), with_out_bf16=True)),
            Sample("column-major packed, 6 groups", _residual(_cast, 33, 192, with_out_bf16=True, **_PACKED)),
            Sample("groups of 128", lambda m: _cast(m, _rows(m, 9, 384), npc=128, with_out_bf16=True)),
            Sample("groups of 24", lambda m: _cast(m, _rows(m, 9, 192), npc=24, with_out_bf16=True)),
            Sample("groups of 5, packed", lambda m: _cast(m, _rows(m, 9, 192), npc=5, with_out_bf16=True, **_PACKED)),
            *(
                Sample(f"a group far wider than {n} channels", _residual(_cast, 3, n, npc=2**40, with_out_bf16=True))
                for n in (37, 192, 7168)
            ),
            Sample("a group far wider than the row, packed", _residual(_cast, 3, 192, npc=2**40, **_PACKED)),
            Sample("rounded", lambda m: _cast(m, _rows(m, 9, 192), with_out_bf16=True, round_sf=True)),
            Sample("column-major", lambda m: _cast(m, _rows(m, 9, 192), use_tma_aligned_col_major_sf=True)),
            Sample("row-major packed", lambda m: _cast(m, _rows(m, 9, 192), round_sf=True, use_packed_ue8m0=True)),
            Sample("three dimensions, column-major packed", _residual(_cast, 2, 5, 192, **_PACKED)),
            Sample("three dimensions, column-major", _residual(_cast, 2, 5, 192, use_tma_aligned_col_major_sf=True)),
            *_shapes(_cast),
            Sample("float32, bf16 rows too", lambda m: _cast(m, _rows(m, 9, 192, dtype=_FP32), with_out_bf16=True)),
            Sample(
                "buffers with gaps",
                lambda m: _cast(
                    m,
                    _rows(m, 5, 96),
                    with_out_bf16=True,
                    out=(m.full((5, 128), 0.0).to(torch.float8_e4m3fn)[:, 16:112], m.full((5, 8), 0.0)[:, 2:5]),
                    out_bf16=m.full((5, 112), 0.0, _BF16)[:, :96],
                ),
            ),
            Sample(
                "a buffer for the codes alone",
                lambda m: _cast(m, _rows(m, 5, 96), out=(m.full((5, 96), 0.0).to(torch.float8_e4m3fn), None)),
            ),
            Sample(
                "scales for a fused MoE kernel, blocks of 192", lambda m: _mega_moe(m, 256, 192, with_out_bf16=True)
            ),
            Sample("scales for a fused MoE kernel, blocks of 5", lambda m: _mega_moe(m, 12, 5, **_PACKED)),
            Sample("scales for a fused MoE kernel, blocks of 128", lambda m: _mega_moe(m, 128, 128)),
            Sample("no rows for a fused MoE kernel", lambda m: _mega_moe(m, 0, 128)),
        ],
        errors=[
            *_common_errors(_cast),
            _error(
                _cast,
                "float64",
                "x must be bfloat16 or float32",
                InvalidDtypeError,
                x=lambda m: m.randn(4, 64).double(),
            ),
            _error(_cast, "groups of 0", "at least 1, got 0", npc=0),
            _error(_cast, "packed but not rounded", "round_sf=True", use_packed_ue8m0=True),
            _error(_cast, "bf16 rows not asked for", "with_out_bf16=True", out_bf16=lambda m: _rows(m, 4, 64)),
            _error(
                _cast,
                "a column-major buffer",
                "out[1] must not be combined with use_tma_aligned_col_major_sf",
                out=lambda m: (None, m.full((4, 2), 0.0)),
                use_tma_aligned_col_major_sf=True,
            ),
            _error(
                _cast,
                "a scale buffer of another shape",
                "out[1] must have shape (4, 2)",
                out=lambda m: (None, m.full((4, 3), 0.0)),
            ),
            _error(
                _cast, "a block size without a buffer", "mega_moe_block_m must be given exactly", mega_moe_block_m=4
            ),
            ErrorSample("MoE scales not rounded", _not_rounded, InvalidArgumentError, "round_sf=True"),
            ErrorSample(
                "MoE scales of groups of 128", lambda m: _mega_moe(m, 4, 8, npc=128), InvalidArgumentError, "must be 32"
            ),
            ErrorSample("a short MoE buffer", _short_buffer, InvalidArgumentError, "at least 256 buffer rows"),
            ErrorSample("a row-major MoE buffer", _row_major_buffer, InvalidArgumentError, "stride(0) == 1"),
        ],
        bench=[
            Point("v4-decode-64", lambda m: _cast(m, _rows(m, 64, 7168), **_PACKED)),
            Point("v4-prefill-8k", lambda m: _cast(m, _rows(m, 8192, 7168), **_PACKED)),
            Point("v4-prefill-8k-residual", _big(_cast, 8192, with_out_bf16=True, **_PACKED)),
        ],
        tolerance=Tolerance(
            "rstd is a sum in any order: 2e-6 relative, so a rounded value may be its neighbour, its code too; codes "
            "and scales are those of the returned rows bit for bit",
            compare=compare_quantized,
        ),
        bytes_moved=_cast_bytes,
        unspecified=_cast_unspecified,
        inplace=("mega_moe_sf", "residual_out", "out_bf16"),
    ),
}
