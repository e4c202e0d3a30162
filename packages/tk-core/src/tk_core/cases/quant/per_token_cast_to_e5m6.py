"""Cases of quant.per_token_cast_to_e5m6."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, all_bytes, call
from ._casts import (
    BF16,
    FLAGS,
    FP32,
    argument,
    around,
    bench_matrix,
    bound,
    clear_by_block,
    grid,
    misaligned,
    poisoned,
    strided,
    subnormals,
)

_MX = FLAGS["packed column-major"]


def _plain(why: str, rows: int, columns: int, n: int, dtype: torch.dtype = BF16, **flags: Any) -> Sample:
    return Sample(why, lambda m: call(m.randn(rows, columns, dtype=dtype), n, **flags))


def _constant(value: float, dtype: torch.dtype) -> Any:
    """A constant whose last column makes the scale 1."""

    def make(m: Maker) -> Call:
        x = m.full((3, 64), value)
        x[:, -1] = 65024.0
        return call(x.to(dtype), 64)

    return make


def _low_bits(m: Maker) -> Call:
    """Values below 2**-14, whose rounding follows the low 17 mantissa bits whatever else was dropped."""
    x = m.magnitudes(16, 256, low=-40, high=14)
    x = x.clamp(-6e4, 6e4)
    x[:, 0] = 65024.0
    x[:, 1:4] = m.tensor([1.5 * 2.0**-20, (1 + 65537 * 2.0**-23) * 2.0**-20, 2.0**-21], torch.float32)
    x[:, 4] = 2.0**-60 * (1 + 65537 * 2.0**-23)
    return call(x, 256)


def _around_each_code(m: Maker) -> Call:
    """Normal codes, their ties and the numbers next to those, under scale 1."""
    codes = (torch.arange(0, 0x7C0) << 4).to(torch.int16).view(torch.float16).float()
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, ties, ties.nextafter(torch.zeros(1)), ties.nextafter(torch.full((1,), 1e9)), -ties))
    x = torch.zeros(-(-len(values) // 63), 64)
    x[:, 0] = 65024.0
    x[:, 1:] = torch.nn.functional.pad(values, (0, x.shape[0] * 63 - len(values))).view(-1, 63)
    return call(m.to(x), 64)


def _rows_of_every_magnitude(m: Maker, dtype: torch.dtype, flags: Any) -> Call:
    exponents = torch.linspace(-149, 120, 200).round().to(m.device)
    return call((m.randn(200, 64) * torch.exp2(exponents)[:, None]).to(dtype), 64, **flags)


def _numbers() -> list[Sample]:
    samples = []
    for mode, flags in (("plain", {}), ("rounded", {"round_sf": True}), ("packed", _MX)):
        for dtype in (BF16, FP32):
            of = f"{mode}, {str(dtype).removeprefix('torch.')}"
            samples += [
                Sample(
                    f"rows of every magnitude, {of}",
                    bound(lambda m, d, flags: _rows_of_every_magnitude(m, d, flags), d=dtype, flags=flags),
                ),
                Sample(
                    f"amax around 65024 * 2**n, {of}",
                    bound(lambda m, d, flags: call(around(m, 65024.0, 64, d), 64, **flags), d=dtype, flags=flags),
                ),
                Sample(
                    f"NaN and Inf, {of}",
                    bound(lambda m, d, flags: call(poisoned(m, 13, 64, d), 64, **flags), d=dtype, flags=flags),
                ),
            ]
        samples.append(
            Sample(
                f"zeros, subnormals, huge values, {mode}",
                bound(lambda m, flags: call(subnormals(m, 64), 64, **flags), flags=flags),
            )
        )
    return samples


def _bench(m: Maker, rows: int, columns: int) -> Call:
    return call(bench_matrix(m, rows, columns), columns, use_tma_aligned_col_major_sf=True)


CASES = {
    "quant.per_token_cast_to_e5m6": Cases(
        samples=[
            *(_plain(f"whole rows, scales {n}", 9, 320, 320, **f) for n, f in FLAGS.items()),
            *(_plain(f"groups of 64, scales {n}, fp32", 9, 320, 64, FP32, **f) for n, f in FLAGS.items()),
            *_numbers(),
            *(
                Sample(f"filled with {name}, {str(dtype).removeprefix('torch.')}", _constant(value, dtype))
                for name, value in (("2**-20", 2.0**-20), ("63/64 * 2**-14", 63 / 64 * 2.0**-14), ("2**-14", 2.0**-14))
                for dtype in (BF16, FP32)
            ),
            Sample("below 2**-14", _low_bits),
            Sample("every code and tie", _around_each_code),
            _plain("one token, K = 7168", 1, 7168, 7168),
            _plain("no token", 0, 64, 64),
            _plain("K = 8", 3, 8, 8),
            _plain("K = 24: rows of 36 bytes", 7, 24, 24, FP32),
            _plain("groups of 4, within eight codes", 3, 24, 4),
            _plain("P02: K = 576, rows past a tile", 131, 576, 576),
            *(
                Sample(
                    f"P02: 4001 rows, K = 576, scales {name}",
                    bound(lambda m, flags: call(m.randn(4001, 576, dtype=BF16), 576, **flags), flags=flags),
                    "full",
                )
                for name, flags in FLAGS.items()
            ),
            _plain("K = 16384", 2, 16384, 16384),
            Sample("row-strided", lambda m: call(strided(m, 9, 128, BF16, 128), 128)),
            Sample("odd row stride", lambda m: call(strided(m, 9, 128, FP32, 3), 128)),
            Sample("Q11: misaligned base", lambda m: call(misaligned(m, 9, 128, BF16), 128)),
            Sample("more than 2**31 elements", lambda m: call(m.large(299_594, 7168), 7168), "large"),
        ],
        errors=[
            ErrorSample("fp16", lambda m: call(m.randn(4, 64).half(), 64), InvalidDtypeError, "x must be bfloat16"),
            ErrorSample("K = 12", lambda m: call(m.randn(4, 12), 12), InvalidArgumentError, "multiple of 8 columns"),
            ErrorSample("groups do not fit", lambda m: call(m.randn(4, 64), 48), InvalidArgumentError, "divide"),
            ErrorSample(
                "packed without round",
                lambda m: call(m.randn(4, 64), 64, use_packed_ue8m0=True),
                InvalidArgumentError,
                "use_packed_ue8m0",
            ),
        ],
        bench=[Point("prefill e5m6/row 8192x7168", lambda m: _bench(m, 8192, 7168)), *grid("e5m6/row", _bench)],
        bytes_moved=all_bytes,
        unspecified=clear_by_block(lambda arguments: (1, argument(arguments, 1, "num_per_channels"))),
    ),
}
