"""Cases of swiglu_forward and of its casting forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, all_bytes, call
from ._swiglu import (
    INF,
    NAN,
    clear_poisoned_codes,
    clear_rows,
    gate_up,
    poisoned,
    psum_of,
    valid_bytes,
)

_BF16, _FP32 = torch.bfloat16, torch.float32
Form = Callable[..., Call]


def _plain(x: Tensor, fmt: str = "bf16", **options: Any) -> Call:
    return call(x, fmt, **options)


def _cast(x: Tensor, npc: int = 32, **options: Any) -> Call:
    return call(x, "e4m3", npc, **options)


def _special(m: Maker, dtype: torch.dtype = _FP32) -> Tensor:
    """Gates where exp overflows, vanishes or is not finite, and clamps at and around the bound."""
    gates = [50, -88.5, -88.8, -104, -200, 200, 0.0, -0.0, 2.5, 2.5000002, -2.5, INF, -INF, NAN, 1.0, 1e-40]
    ups = [50, 1, 1, 1, 1, 1, -0.0, 3, 2.5, -2.5, -2.5000002, 1, 1, 1, NAN, INF]
    return m.tensor([gates + ups, [1.0] * 32], dtype)


def _expert_rows(form: Form, counts: list[int], alignment: int, channels: int = 96, **options: Any) -> Sample:
    def make(m: Maker) -> Call:
        psum, rows = psum_of(m, counts, alignment)
        where = {"psum_num_tokens_per_expert": psum, "token_alignment": alignment}
        return form(poisoned(gate_up(m, rows, channels), where), **where, **options)

    shown = counts if len(counts) < 9 else f"{len(counts)} experts of {counts[0]} to {counts[-1]} rows"
    return Sample(f"rows of experts {shown} aligned to {alignment}, NaN in the padding", make)


def _empty_expert_not_aligned(form: Form) -> Sample:
    def make(m: Maker) -> Call:
        where = {"psum_num_tokens_per_expert": m.tensor([3, 3, 9, 9], torch.int32), "token_alignment": 4}
        return form(poisoned(gate_up(m, 12, 32), where), **where)

    return Sample("empty experts whose ends are below their aligned starts", make)


def _weighted(form: Form) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        return form(gate_up(m, 9, 96), topk_weights=m.randn(9), routed_scaling_factor=2.5)

    return make


def _gathered_weights(form: Form) -> Callable[[Maker], Call]:
    """Padding rows of the gathered form, and indices that refer to no weight."""

    def make(m: Maker) -> Call:
        pos = m.tensor([5, -1, 0, 11, 3, 12, 7], torch.int32)
        experts = m.tensor([0, -1, 0, 1, 1, 2, 3], torch.int32)
        x = poisoned(gate_up(m, 7, 64), {"pos_to_expert": experts})
        return form(x, topk_weights=m.randn(4, 3), pos_to_token_topk=pos, pos_to_expert=experts)

    return make


def _counted(form: Form) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        psum, rows = psum_of(m, [5, 0, 37], 8)
        where = {"psum_num_tokens_per_expert": psum, "token_alignment": 8}
        x = poisoned(gate_up(m, rows, 160), where)
        count = m.tensor([1, 2, 3, 2**40], torch.int64)
        return form(x, **where, topk_weights=m.rand(rows), clamp_value=0.5, clamped_count=count)

    return make


def _rows(form: Form) -> list[Sample]:
    """The row sources and options, common to the forms that have them."""
    return [
        _expert_rows(form, [3, 0, 5, 2], 4),
        _expert_rows(form, [130, 0, 1, 128], 128, 64),
        _expert_rows(form, list(range(300)), 1, 8),
        _expert_rows(form, [0, 0], 16),
        _empty_expert_not_aligned(form),
        Sample("weights of rows, negative ones too, times a factor", _weighted(form)),
        Sample("weights by index, rows without a weight or an expert", _gathered_weights(form)),
        Sample("clamped values counted over valid rows only", _counted(form)),
        Sample(
            "NaN is not counted; the bound is not clamped",
            lambda m: form(_special(m), clamp_value=2.5, clamped_count=m.tensor([0] * 4, torch.int64)),
        ),
        Sample(
            "no rows leave the counters alone",
            lambda m: form(gate_up(m, 0, 32), clamp_value=1.0, clamped_count=m.tensor([4, 3, 2, 1], torch.int64)),
        ),
    ]


def _shapes(form: Form) -> list[Sample]:
    """Sizes, strides and base pointers."""
    return [
        Sample("one row", lambda m: form(gate_up(m, 1, 192))),
        Sample("one channel", lambda m: form(gate_up(m, 5, 1))),
        Sample("an odd number of channels", lambda m: form(gate_up(m, 6, 37))),
        Sample("channels past 128, not a multiple of 8", lambda m: form(gate_up(m, 6, 300))),
        Sample("more than 8192 channels", lambda m: form(gate_up(m, 2, 8320))),
        Sample("16384 channels, float32", lambda m: form(gate_up(m, 1, 16384, _FP32))),
        Sample("padded row stride", lambda m: form(gate_up(m, 9, 96)[:, :160])),
        Sample("row stride that is odd", lambda m: form(m.randn(9, 131, dtype=_BF16)[:, :128])),
        Sample(
            "base pointer not aligned to 16 bytes",
            lambda m: form(gate_up(m, 1, 640)[0, 1:1279:].narrow(0, 0, 1276).view(2, 638)),
        ),
        Sample("rows with stride 0", lambda m: form(gate_up(m, 1, 64).expand(5, 128))),
    ]


def _past_2_31(form: Form) -> Sample:
    return Sample("more than 2^31 elements", lambda m: form(m.large(61681, 34816)), "large")


def _plain_unspecified(arguments: Call, results: list[Tensor]) -> None:
    clear_rows(arguments, results[0])


def _cast_unspecified(arguments: Call, results: list[Tensor]) -> None:
    q, sf = results[:2]
    clear_rows(arguments, q, sf)
    clear_poisoned_codes(q, sf, 1, arguments.args[2])


def _channel_unspecified(arguments: Call, results: list[Tensor]) -> None:
    q, sf = results
    if not arguments.kwargs.get("without_transpose", False):
        q = q.t()
    clear_poisoned_codes(q, sf, arguments.args[2], 1)


def _row_errors(form: Form) -> list[ErrorSample]:
    """Arguments that no form accepts."""

    def sample(why: str, match: str, error: type[Exception] = InvalidArgumentError, **options: Any) -> ErrorSample:
        def make(m: Maker) -> Call:
            made = {name: value(m) if callable(value) else value for name, value in options.items()}
            return form(made.pop("x", None) if "x" in made else gate_up(m, 4, 32), **made)

        return ErrorSample(why, make, error, match)

    def ints(*values: int) -> Callable[[Maker], Tensor]:
        return lambda m: m.tensor(list(values), torch.int32)

    return [
        sample("rank 3", "x must have shape (T, 2H)", x=lambda m: m.randn(2, 3, 64)),
        sample("an odd number of columns", "even number of columns, at least 2, got 33", x=lambda m: m.randn(2, 33)),
        sample("columns strided", "unit stride", x=lambda m: m.randn(64, 4).t()),
        sample("integers", "x must be bfloat16", InvalidDtypeError, x=lambda m: ints(*range(64))(m).view(2, 32)),
        sample("a clamp of 0", "clamp_value must be greater than 0, or None for no clamp, got 0.0", clamp_value=0.0),
        sample("a negative clamp", "clamp_value must be greater than 0", clamp_value=-1.0),
        sample("a clamp that is NaN", "clamp_value must be greater than 0", clamp_value=NAN),
        sample(
            "counters without a clamp",
            "clamped_count must be used only together with clamp_value",
            clamped_count=lambda m: m.tensor([0] * 4, torch.int64),
        ),
        sample(
            "three counters",
            "clamped_count must have shape (4,)",
            clamp_value=1.0,
            clamped_count=lambda m: m.tensor([0] * 3, torch.int64),
        ),
        sample(
            "counters in int32",
            "clamped_count must be int64, got int32",
            InvalidDtypeError,
            clamp_value=1.0,
            clamped_count=ints(0, 0, 0, 0),
        ),
        sample("a factor without weights", "routed_scaling_factor must be used only", routed_scaling_factor=2.5),
        sample("weights of other rows", "topk_weights must have shape (4,)", topk_weights=lambda m: m.rand(3)),
        sample(
            "bfloat16 weights",
            "topk_weights must be float32",
            InvalidDtypeError,
            topk_weights=lambda m: m.rand(4, dtype=_BF16),
        ),
        sample("2-D weights without an index", "needs pos_to_token_topk", topk_weights=lambda m: m.rand(2, 2)),
        sample("an index without weights", "only together with topk_weights", pos_to_token_topk=ints(0, 1, 2, 3)),
        sample(
            "an index with 1-D weights",
            "topk_weights must have shape (num_tokens, num_topk)",
            topk_weights=lambda m: m.rand(4),
            pos_to_token_topk=ints(0, 1, 2, 3),
        ),
        sample("no experts", "at least 1 element", psum_num_tokens_per_expert=ints()),
        sample(
            "ends in int64",
            "psum_num_tokens_per_expert must be int32",
            InvalidDtypeError,
            psum_num_tokens_per_expert=lambda m: m.tensor([4], torch.int64),
        ),
        sample("an alignment of 0", "at least 1", psum_num_tokens_per_expert=ints(4), token_alignment=0),
        sample(
            "two row sources",
            "psum_num_tokens_per_expert must not be combined with pos_to_expert",
            psum_num_tokens_per_expert=ints(4),
            pos_to_expert=ints(0, 0, 0, 0),
        ),
        sample("experts of other rows", "pos_to_expert must have shape (4,)", pos_to_expert=ints(0, 0, 0)),
    ]


def _channel(x: Tensor, npt: int = 32, **options: Any) -> Call:
    return call(x, "e4m3", npt, **options)


def _benchmark(form: Form, **options: Any) -> list[Point]:
    def grouped(m: Maker) -> Call:
        psum, rows = psum_of(m, [750] * 32, 128)
        where = {"psum_num_tokens_per_expert": psum, "topk_weights": m.rand(rows), "routed_scaling_factor": 2.5}
        return form(gate_up(m, rows, 2048), **where, clamp_value=10.0, **options)

    return [
        Point("v4-decode-64", lambda m: form(gate_up(m, 64, 3072), **options)),
        Point("v4-prefill-8k", lambda m: form(gate_up(m, 8192, 3072), **options)),
        Point("v3-experts-24k", grouped),
    ]


_PACKED: dict[str, Any] = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}

CASES = {
    "quant.swiglu_forward": Cases(
        samples=[
            Sample("bf16 to bf16", lambda m: _plain(gate_up(m, 33, 192))),
            Sample("float32 to float32", lambda m: _plain(gate_up(m, 9, 192, _FP32), "fp32")),
            Sample("bf16 to float32", lambda m: _plain(gate_up(m, 9, 192), "fp32")),
            Sample("float32 to bf16", lambda m: _plain(gate_up(m, 9, 192, _FP32), "bf16")),
            *_shapes(_plain),
            *_rows(_plain),
            Sample(
                "gate 50, up 50, clamp 10 gives 99.99546",
                lambda m: _plain(m.full((3, 64), 50.0), "fp32", clamp_value=10.0),
            ),
            Sample("values that are not finite", lambda m: _plain(_special(m), "fp32")),
            Sample("every magnitude", lambda m: _plain(m.magnitudes(64, 64, low=-60, high=30), "fp32")),
            Sample("many blocks", lambda m: _plain(gate_up(m, 4001, 3072)), "full"),
            _past_2_31(_plain),
        ],
        errors=[
            *_row_errors(_plain),
            ErrorSample(
                "fp64 of bf16", lambda m: _plain(gate_up(m, 2, 8), "fp64"), InvalidArgumentError, "'bf16' or 'fp32'"
            ),
            ErrorSample("quantized", lambda m: _plain(gate_up(m, 2, 8), "e4m3"), InvalidArgumentError, "fmt must be"),
        ],
        bench=_benchmark(_plain),
        bytes_moved=valid_bytes,
        unspecified=_plain_unspecified,
        inplace=("clamped_count",),
    ),
    "quant.swiglu_forward_and_per_token_cast": Cases(
        samples=[
            Sample("groups of 32", lambda m: _cast(gate_up(m, 33, 192))),
            Sample("groups of 128", lambda m: _cast(gate_up(m, 33, 256), 128)),
            Sample("groups of 128, the last one short", lambda m: _cast(gate_up(m, 5, 320), 128)),
            Sample("one group in a row", lambda m: _cast(gate_up(m, 5, 512), 512)),
            Sample("groups far wider than the row", lambda m: _cast(gate_up(m, 5, 320), 2**40)),
            Sample("groups of 3", lambda m: _cast(gate_up(m, 5, 32), 3)),
            Sample("float32", lambda m: _cast(gate_up(m, 9, 192, _FP32))),
            Sample("rounded", lambda m: _cast(gate_up(m, 9, 192), round_sf=True)),
            Sample("rounded, groups of 128", lambda m: _cast(gate_up(m, 70, 256), 128, round_sf=True)),
            Sample("column-major", lambda m: _cast(gate_up(m, 9, 192), use_tma_aligned_col_major_sf=True)),
            Sample("column-major packed, 6 groups", lambda m: _cast(gate_up(m, 9, 192), **_PACKED)),
            Sample("row-major packed", lambda m: _cast(gate_up(m, 9, 192), round_sf=True, use_packed_ue8m0=True)),
            Sample("packed, groups of 128", lambda m: _cast(gate_up(m, 131, 640), 128, **_PACKED)),
            *_shapes(_cast),
            *_rows(_cast),
            _expert_rows(_cast, [3, 0, 5, 2], 4, 192, **_PACKED),
            Sample("gate 50, up 50, clamp 10 gives 99.99546", lambda m: _cast(m.full((3, 64), 50.0), clamp_value=10.0)),
            Sample("a floor of its own", lambda m: _cast(gate_up(m, 5, 96) * 1e-3, sf_clamp_min=1.0)),
            Sample("a floor of 0 and zeros", lambda m: _cast(m.full((2, 128), 0.0), sf_clamp_min=0.0)),
            Sample("zeros of both signs", lambda m: _cast(torch.cat([m.full((2, 64), 1.0), m.full((2, 64), -0.0)], 1))),
            Sample("values that are not finite", lambda m: _cast(_special(m), 4)),
            Sample("values that are not finite, rounded", lambda m: _cast(_special(m), 4, **_PACKED)),
            Sample("every magnitude", lambda m: _cast(m.magnitudes(64, 128, low=-60, high=30))),
            Sample("every magnitude, rounded", lambda m: _cast(m.magnitudes(64, 128, low=-60, high=30), round_sf=True)),
            Sample("many blocks", lambda m: _cast(gate_up(m, 4001, 3072), **_PACKED), "full"),
            Sample("many blocks, exact scales", lambda m: _cast(gate_up(m, 4001, 2048), 128), "full"),
            _past_2_31(_cast),
        ],
        errors=[
            *_row_errors(_cast),
            ErrorSample("float64", lambda m: _cast(gate_up(m, 2, 8).double()), InvalidDtypeError, "got float64"),
            ErrorSample(
                "another format", lambda m: call(gate_up(m, 2, 8), "e2m1", 4), InvalidArgumentError, "fmt must be"
            ),
            ErrorSample("groups of 0", lambda m: _cast(gate_up(m, 2, 8), 0), InvalidArgumentError, "at least 1, got 0"),
            ErrorSample(
                "packed but not rounded",
                lambda m: _cast(gate_up(m, 2, 8), use_packed_ue8m0=True),
                InvalidArgumentError,
                "round_sf=True",
            ),
            ErrorSample(
                "a negative floor",
                lambda m: _cast(gate_up(m, 2, 8), sf_clamp_min=-1.0),
                InvalidArgumentError,
                "at least 0",
            ),
        ],
        bench=[*_benchmark(_cast, **_PACKED), Point("v3-prefill-8k", lambda m: _cast(gate_up(m, 8192, 2048), 128))],
        bytes_moved=valid_bytes,
        unspecified=_cast_unspecified,
        inplace=("clamped_count",),
    ),
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": Cases(
        samples=[
            Sample("groups of 32 rows", lambda m: _channel(gate_up(m, 128, 96))),
            Sample("groups of 128 rows", lambda m: _channel(gate_up(m, 256, 64), 128)),
            Sample("not transposed", lambda m: _channel(gate_up(m, 128, 96), without_transpose=True)),
            Sample("rounded", lambda m: _channel(gate_up(m, 128, 96), 128, round_sf=True)),
            Sample("clamped", lambda m: _channel(m.full((64, 64), 50.0, _BF16), clamp_value=10.0)),
            Sample("float32", lambda m: _channel(gate_up(m, 64, 40, _FP32))),
            Sample("the last group short", lambda m: _channel(gate_up(m, 130, 72), 128)),
            Sample(
                "the last group short, not transposed", lambda m: _channel(gate_up(m, 33, 72), without_transpose=True)
            ),
            Sample("groups of 5 rows", lambda m: _channel(gate_up(m, 13, 16), 5)),
            Sample("a group of more rows than 32 bits count", lambda m: _channel(gate_up(m, 13, 16), 2**40)),
            Sample("no rows", lambda m: _channel(gate_up(m, 0, 32))),
            Sample("no rows, not transposed", lambda m: _channel(gate_up(m, 0, 32), without_transpose=True)),
            Sample("values that are not finite", lambda m: _channel(_special(m))),
            *_shapes(_channel),
            Sample("many blocks", lambda m: _channel(gate_up(m, 4064, 2048), 128, round_sf=True), "full"),
            _past_2_31(_channel),
        ],
        errors=[
            ErrorSample("rank 3", lambda m: _channel(m.randn(2, 3, 4)), InvalidArgumentError, "shape (T, 2H)"),
            ErrorSample(
                "an odd number of columns", lambda m: _channel(m.randn(2, 3)), InvalidArgumentError, "even number"
            ),
            ErrorSample("float64", lambda m: _channel(gate_up(m, 2, 8).double()), InvalidDtypeError, "got float64"),
            ErrorSample(
                "another format", lambda m: call(gate_up(m, 2, 8), "bf16", 32), InvalidArgumentError, "fmt must be"
            ),
            ErrorSample(
                "groups of 0", lambda m: _channel(gate_up(m, 2, 8), 0), InvalidArgumentError, "at least 1, got 0"
            ),
            ErrorSample(
                "a clamp of 0",
                lambda m: _channel(gate_up(m, 2, 8), clamp_value=0.0),
                InvalidArgumentError,
                "greater than 0",
            ),
        ],
        bench=[
            Point("v3-wgrad-8k", lambda m: _channel(gate_up(m, 8192, 2048), 128)),
            Point("v4-wgrad-8k", lambda m: _channel(gate_up(m, 8192, 3072), 32, round_sf=True)),
        ],
        bytes_moved=all_bytes,
        unspecified=_channel_unspecified,
    ),
}
