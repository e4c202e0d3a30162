"""Cases of swiglu_backward and of its casting form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from ...reference.scales import quantize
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, Tolerance, all_bytes, call
from .._near import differs
from ._swiglu import INF, NAN, clear_poisoned_codes, gate_up, poisoned, psum_of

_BF16, _FP32 = torch.bfloat16, torch.float32
_PACKED: dict[str, Any] = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
Form = Callable[..., Call]


def _compare(expected: list[Tensor], actual: list[Tensor]) -> str | None:
    """Bit for bit, but for the weight gradient, which is a sum."""
    quantized = len(expected) > 1 and expected[1].dtype == torch.float8_e4m3fn
    for i, (e, a) in enumerate(zip(expected, actual)):
        sum_of_row = i == (3 if quantized else 1) and tuple(e.shape) != (
            expected[0].shape[0],
            expected[0].shape[1] // 2,
        )
        found = differs(f"result[{i}]", e, a, rtol=1e-4, atol=1e-4) if sum_of_row else differs(f"result[{i}]", e, a)
        if found is not None:
            return found
    return None


_TOLERANCE = Tolerance(
    "bit for bit, but for the weight gradient: an fp32 sum over H channels in any order, off by at most H * 2^-24 of "
    "the sum of magnitudes; 1e-4 covers H up to 1600 for any data and far more for random signs",
    compare=_compare,
)


def _plain(m: Maker, x: Tensor, fmt: str = "bf16", grad: Tensor | None = None, **options: Any) -> Call:
    if grad is None:
        grad = m.randn(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    return call(x, grad, fmt, **options)


def _cast(
    m: Maker, x: Tensor, npc: int = 32, grad: Tensor | None = None, grad_dtype: torch.dtype = _BF16, **options: Any
) -> Call:
    """The quantized form of ``x``, with scales that are not powers of two."""
    q, sf = quantize(torch.where(x.isfinite(), x, 1.0), "e4m3", 1, npc, 1e-4)
    sf = sf.masked_fill(x.view(x.shape[0], -1, npc).isfinite().logical_not().any(2), NAN) if x.numel() else sf
    if grad is None:
        grad = m.randn(x.shape[0], x.shape[1] // 2, dtype=grad_dtype)
    return call((q, sf), grad, "e4m3", npc, **options)


def _special(m: Maker) -> tuple[Tensor, Tensor]:
    """Gates where exp overflows or is not finite, clamps at and around the bound; and the gradient."""
    gates = [50, -88.5, -88.8, -104, -200, 200, 0.0, -0.0, 2.5, 2.5000002, -2.5, INF, -INF, NAN, 1.0, 1e-40]
    ups = [50, 1, 1, 1, 1, 1, -0.0, 3, 2.5, -2.5, -2.5000002, 1, 1, 1, NAN, INF]
    return m.tensor([gates + ups, [1.0] * 32], _FP32), m.tensor([[1.0] * 8 + [-1.0] * 8, [INF] * 16], _FP32)


def _expert_rows(form: Form, counts: list[int], alignment: int, channels: int = 96, **options: Any) -> Sample:
    def make(m: Maker) -> Call:
        psum, rows = psum_of(m, counts, alignment)
        where = {"psum_num_tokens_per_expert": psum, "token_alignment": alignment}
        grad = poisoned(m.randn(rows, channels, dtype=_BF16), where)
        x = poisoned(gate_up(m, rows, channels), where)
        return form(m, x, grad=grad, **where, **options)

    shown = counts if len(counts) < 9 else f"{len(counts)} experts of {counts[0]} to {counts[-1]} rows"
    return Sample(f"rows of experts {shown} aligned to {alignment}, NaN in the padding", make)


def _rows_past_the_experts(form: Form) -> Sample:
    def make(m: Maker) -> Call:
        where = {"psum_num_tokens_per_expert": m.tensor([3, 3, 9], torch.int32), "token_alignment": 4}
        weights = poisoned(m.rand(21)[:, None], where)[:, 0]
        x, grad = poisoned(gate_up(m, 21, 32), where), m.randn(21, 32, dtype=_BF16)
        return form(m, x, grad=grad, topk_weights=weights, do_recompute=True, **where)

    return Sample("rows past the last expert, and an empty expert whose end is below its aligned start", make)


def _weighted(form: Form) -> Callable[[Maker], Call]:
    return lambda m: form(
        m,
        gate_up(m, 9, 96),
        topk_weights=m.rand(9),
        routed_scaling_factor=2.5,
        clamp_value=0.5,
        do_recompute=True,
    )


def _gathered_weights(form: Form) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        pos = m.tensor([5, -1, 0, 11, 3, 12, 7], torch.int32)
        experts = m.tensor([0, -1, 0, 1, 1, 2, 3], torch.int32)
        x = poisoned(gate_up(m, 7, 64), {"pos_to_expert": experts})
        return form(m, x, topk_weights=m.randn(4, 3), pos_to_token_topk=pos, pos_to_expert=experts, do_recompute=True)

    return make


def _rows(form: Form) -> list[Sample]:
    """The row sources and options of both forms."""
    return [
        _expert_rows(form, [3, 0, 5, 2], 4),
        _expert_rows(form, [130, 0, 1, 128], 128, 64),
        _expert_rows(form, list(range(300)), 1, 32),
        _expert_rows(form, [0, 0], 16),
        _rows_past_the_experts(form),
        Sample("weights, their gradient, a factor, a clamp, the activation again", _weighted(form)),
        Sample("the gradient of weights alone", lambda m: form(m, gate_up(m, 5, 64), topk_weights=m.rand(5))),
        Sample("the activation again, without weights", lambda m: form(m, gate_up(m, 5, 64), do_recompute=True)),
        Sample("weights by index, rows without a weight or an expert", _gathered_weights(form)),
        Sample(
            "no rows: the gradient of gathered weights is zero",
            lambda m: form(
                m, gate_up(m, 0, 32), topk_weights=m.rand(3, 2), pos_to_token_topk=m.tensor([], torch.int32)
            ),
        ),
        Sample("no rows", lambda m: form(m, gate_up(m, 0, 32), do_recompute=True)),
        Sample("one row", lambda m: form(m, gate_up(m, 1, 192))),
        Sample("more than 8192 channels", lambda m: form(m, gate_up(m, 2, 8320))),
        Sample(
            "a gradient whose rows have stride 0",
            lambda m: form(m, gate_up(m, 5, 64), grad=m.randn(1, 64, dtype=_BF16).expand(5, 64)),
        ),
        Sample(
            "a gradient with padded rows",
            lambda m: form(m, gate_up(m, 5, 64), grad=m.randn(5, 80, dtype=_BF16)[:, 3:67]),
        ),
    ]


def _batched(m: Maker) -> Call:
    return call(m.randn(2, 3, 128, dtype=_BF16), m.randn(2, 3, 64, dtype=_BF16), "bf16", do_recompute=True)


def _batched_cast(m: Maker) -> Call:
    (q, sf), grad, fmt, npc = _cast(m, gate_up(m, 6, 64)).args
    return call((q.view(2, 3, 128), sf), grad.view(2, 3, 64), fmt, npc)


def _misaligned(m: Maker) -> Call:
    x, grad = m.randn(1 + 4 * 128, dtype=_BF16)[1:].view(4, 128), m.randn(1 + 4 * 64, dtype=_BF16)[1:].view(4, 64)
    return call(x, grad, "bf16")


def _special_plain(m: Maker) -> Call:
    x, grad = _special(m)
    return _plain(m, x, "fp32", grad, clamp_value=2.5, topk_weights=m.tensor([1.0, -2.0], _FP32), do_recompute=True)


def _special_cast(m: Maker) -> Call:
    x, grad = _special(m)
    return _cast(m, x, 4, grad, clamp_value=2.5, do_recompute=True)


def _large(m: Maker) -> Call:
    x = m.large(61681, 34816)
    return call(x, x[:, :17408], "bf16")


def _cast_unspecified(arguments: Call, results: list[Tensor]) -> None:
    clear_poisoned_codes(results[1], results[2], 1, arguments.args[3])


def _grouped(form: Form, **options: Any) -> Callable[[Maker], Call]:
    def make(m: Maker) -> Call:
        psum, rows = psum_of(m, [750] * 32, 128)
        return form(
            m,
            gate_up(m, rows, 2048),
            psum_num_tokens_per_expert=psum,
            topk_weights=m.rand(rows),
            routed_scaling_factor=2.5,
            clamp_value=10.0,
            do_recompute=True,
            **options,
        )

    return make


def _error(
    form: Form, why: str, match: str, error: type[Exception] = InvalidArgumentError, **options: Any
) -> ErrorSample:
    def make(m: Maker) -> Call:
        made = {name: value(m) if callable(value) else value for name, value in options.items()}
        return form(m, gate_up(m, 4, 32), **made)

    return ErrorSample(why, make, error, match)


def _row_errors(form: Form) -> list[ErrorSample]:
    return [
        _error(form, "a clamp of 0", "greater than 0, or None for no clamp", clamp_value=0.0),
        _error(form, "a negative clamp", "greater than 0", clamp_value=-1.0),
        _error(form, "a factor without weights", "only together with topk_weights", routed_scaling_factor=2.0),
        _error(form, "weights of other rows", "topk_weights must have shape (4,)", topk_weights=lambda m: m.rand(5)),
        _error(
            form,
            "double weights",
            "topk_weights must be float32",
            InvalidDtypeError,
            topk_weights=lambda m: m.rand(4).double(),
        ),
        _error(
            form,
            "no experts",
            "at least 1 element",
            psum_num_tokens_per_expert=lambda m: m.tensor([], torch.int32),
        ),
        _error(
            form,
            "a gradient of other rows",
            "act_x_grad must have shape (4, 32)",
            grad=lambda m: m.randn(3, 32, dtype=_BF16),
        ),
        _error(form, "a gradient with strided columns", "unit stride", grad=lambda m: m.randn(32, 4, dtype=_BF16).t()),
        _error(
            form,
            "a gradient expanded from one number",
            "unit stride",
            grad=lambda m: m.full((1, 1), 1.0, _BF16).expand(4, 32),
        ),
    ]


CASES = {
    "quant.swiglu_backward": Cases(
        samples=[
            Sample("bf16 to bf16", lambda m: _plain(m, gate_up(m, 33, 192))),
            Sample("float32 to float32", lambda m: _plain(m, gate_up(m, 9, 192, _FP32), "fp32")),
            Sample("bf16 to float32", lambda m: _plain(m, gate_up(m, 9, 192), "fp32", do_recompute=True)),
            Sample("float32 to bf16", lambda m: _plain(m, gate_up(m, 9, 192, _FP32), do_recompute=True)),
            *_rows(_plain),
            Sample("three dimensions", _batched),
            Sample("one channel", lambda m: _plain(m, gate_up(m, 5, 1))),
            Sample("an odd number of channels", lambda m: _plain(m, gate_up(m, 6, 37), topk_weights=m.rand(6))),
            Sample("padded row stride", lambda m: _plain(m, gate_up(m, 9, 96)[:, :160])),
            Sample("base pointers not aligned to 16 bytes", _misaligned),
            Sample("values that are not finite, and the clamp's bounds", _special_plain),
            Sample("every magnitude", lambda m: _plain(m, m.magnitudes(64, 64, low=-60, high=30), "fp32")),
            Sample("many blocks", _grouped(_plain), "full"),
            Sample("more than 2^31 elements", _large, "large"),
        ],
        errors=[
            *_row_errors(_plain),
            _error(
                _plain,
                "a gradient of another dtype",
                "act_x_grad must be bfloat16",
                InvalidDtypeError,
                grad=lambda m: m.randn(4, 32),
            ),
            _error(_plain, "another format", "fmt must be 'bf16' or 'fp32'", fmt="e4m3"),
            ErrorSample(
                "rank 1", lambda m: call(m.randn(8), m.randn(4), "fp32"), InvalidArgumentError, "shape (T, 2H)"
            ),
            ErrorSample(
                "odd columns", lambda m: call(m.randn(2, 3), m.randn(2, 1), "fp32"), InvalidArgumentError, "even number"
            ),
            ErrorSample(
                "a batch that is no view of rows",
                lambda m: call(m.randn(2, 4, 8)[:, :3], m.randn(2, 3, 4), "fp32"),
                InvalidArgumentError,
                "rows at one stride",
            ),
        ],
        bench=[
            Point("v4-train-8k", lambda m: _plain(m, gate_up(m, 8192, 3072))),
            Point("v4-train-64", lambda m: _plain(m, gate_up(m, 64, 3072))),
            Point("v3-experts-24k", _grouped(_plain)),
        ],
        tolerance=_TOLERANCE,
        bytes_moved=all_bytes,
    ),
    "quant.swiglu_backward_and_per_token_cast": Cases(
        samples=[
            Sample("groups of 32", lambda m: _cast(m, gate_up(m, 33, 192))),
            Sample("groups of 128", lambda m: _cast(m, gate_up(m, 33, 256), 128)),
            Sample("groups of 8", lambda m: _cast(m, gate_up(m, 5, 40), 8)),
            Sample("gradient in float32", lambda m: _cast(m, gate_up(m, 9, 96), grad_dtype=_FP32)),
            Sample("rounded", lambda m: _cast(m, gate_up(m, 9, 96), round_sf=True)),
            Sample("column-major", lambda m: _cast(m, gate_up(m, 9, 96), use_tma_aligned_col_major_sf=True)),
            Sample("column-major packed, 6 groups", lambda m: _cast(m, gate_up(m, 9, 96), **_PACKED)),
            Sample("row-major packed", lambda m: _cast(m, gate_up(m, 9, 96), round_sf=True, use_packed_ue8m0=True)),
            *_rows(_cast),
            _expert_rows(_cast, [3, 0, 5, 2], 4, 96, **_PACKED),
            Sample("three dimensions", _batched_cast),
            Sample("values that are not finite, and the clamp's bounds", _special_cast),
            Sample("many blocks", _grouped(_cast, **_PACKED), "full"),
            Sample("many blocks, groups of 128", _grouped(_cast, npc=128), "full"),
        ],
        errors=[
            *_row_errors(_cast),
            ErrorSample(
                "not quantized",
                lambda m: call(m.randn(2, 64), m.randn(2, 32), "e4m3", 32),
                InvalidDtypeError,
                "pair (data, sf)",
            ),
            ErrorSample(
                "data in bf16",
                lambda m: call((gate_up(m, 2, 32), m.rand(2, 2)), m.randn(2, 32), "e4m3", 32),
                InvalidDtypeError,
                "x[0] must be float8_e4m3fn",
            ),
            ErrorSample(
                "scales of another block size",
                lambda m: call((gate_up(m, 2, 32).to(torch.float8_e4m3fn), m.rand(2, 4)), m.randn(2, 32), "e4m3", 32),
                InvalidArgumentError,
                "x[1] must have shape (2, 2)",
            ),
            ErrorSample(
                "a group across gate and up",
                lambda m: call((gate_up(m, 2, 48).to(torch.float8_e4m3fn), m.rand(2, 3)), m.randn(2, 48), "e4m3", 32),
                InvalidArgumentError,
                "num_per_channels must divide H = 48, got 32",
            ),
            ErrorSample(
                "column-major scales",
                lambda m: call(
                    (gate_up(m, 4, 32).to(torch.float8_e4m3fn), m.rand(2, 4).t()), m.randn(4, 32), "e4m3", 32
                ),
                InvalidArgumentError,
                "x[1] must be contiguous",
            ),
            _error(_cast, "packed but not rounded", "round_sf=True", use_packed_ue8m0=True),
        ],
        bench=[
            Point("v4-train-8k", lambda m: _cast(m, gate_up(m, 8192, 3072), **_PACKED)),
            Point("v3-train-8k", lambda m: _cast(m, gate_up(m, 8192, 2048), 128)),
            Point("v3-experts-24k", _grouped(_cast, **_PACKED)),
        ],
        tolerance=_TOLERANCE,
        bytes_moved=all_bytes,
        unspecified=_cast_unspecified,
    ),
}
