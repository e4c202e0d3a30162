"""Cases of quant.cast_back_e5m6."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Maker, Point, Sample, all_bytes, call
from ._casts import FLAGS, bench_matrix, grid, quantized


def _of(rows: int, columns: int, block: tuple[int, int], out: str = "bf16", **flags: Any) -> Any:
    return lambda m: call(quantized(m, m.randn(rows, columns), "e5m6", block, **flags), out, block)


def _every_code(m: Maker, out: str) -> Call:
    """All 4096 codes, Inf and NaN of fp16 included, in each of the eight places."""
    h = torch.arange(4096).view(512, 8)
    h = torch.cat([h.roll(i, 1) for i in range(8)])
    bits = (h[:, :, None] >> torch.arange(11, -1, -1) & 1).view(-1, 3, 4, 8)
    data = (bits << torch.arange(7, -1, -1)).sum(-1).flip(-1).to(torch.uint8).view(-1, 12)
    return call((data.contiguous().to(m.device), m.full((data.shape[0], 1), 3.0)), out, (1, 8))


def _random_bytes(m: Maker) -> Call:
    return call((m.randint(0, 256, (33, 96), torch.uint8), m.rand(33, 1)), "fp32", (1, 64))


def _strided(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 128), "e5m6", (1, 128))
    wide = m.full((9, 200), 0, torch.uint8)
    wide[:, :192] = data
    return call((wide[:, :192], sf), "bf16", (1, 128))


def _misaligned(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 64), "e5m6", (1, 64))
    shifted = m.full((9 * 96 + 1,), 0, torch.uint8)[1:].view(9, 96)
    return call((shifted.copy_(data), sf), "fp32", (1, 64))


def _bench(m: Maker, rows: int, columns: int) -> Call:
    data = bench_matrix(m, rows, columns).view(torch.uint8)[:, : columns * 3 // 2].contiguous()
    return call((data, m.full((rows, 1), 0.125)), "bf16", (1, columns))


CASES = {
    "quant.cast_back_e5m6": Cases(
        samples=[
            *(Sample(f"whole rows, scales {n}", _of(9, 320, (1, 320), **f)) for n, f in FLAGS.items()),
            *(Sample(f"groups of 64, scales {n}", _of(9, 320, (1, 64), "fp32", **f)) for n, f in FLAGS.items()),
            Sample("every code, fp32", lambda m: _every_code(m, "fp32")),
            Sample("every code, bf16", lambda m: _every_code(m, "bf16")),
            Sample("random bytes", _random_bytes),
            Sample("one token, K = 7168", _of(1, 7168, (1, 7168))),
            Sample("no token", _of(0, 64, (1, 64))),
            Sample("K = 8", _of(3, 8, (1, 8))),
            Sample("K = 24: rows of 36 bytes", _of(7, 24, (1, 24), "fp32")),
            Sample("P02: K = 576, rows past a tile", _of(131, 576, (1, 576))),
            Sample("blocks of 32 x 32 with a partial last one", _of(40, 72, (32, 32), "fp32")),
            Sample("row-strided data", _strided),
            Sample("Q11: misaligned base", _misaligned),
            Sample(
                "more than 2**31 elements",
                lambda m: call(
                    (m.full((299_594, 10752), 0x3C, torch.uint8), m.full((299_594, 1), 0.5)), "bf16", (1, 7168)
                ),
                "large",
            ),
        ],
        errors=[
            ErrorSample(
                "int8 data",
                lambda m: call((m.full((4, 12), 0, torch.int8), m.full((4, 1), 1.0)), "fp32", (1, 8)),
                InvalidDtypeError,
                "x[0] must be uint8",
            ),
            ErrorSample(
                "half a group of eight",
                lambda m: call((m.full((4, 18), 0, torch.uint8), m.full((4, 1), 1.0)), "fp32", (1, 12)),
                InvalidArgumentError,
                "multiple of 12 columns",
            ),
        ],
        bench=[
            Point("prefill e5m6/row 8192x7168", lambda m: _bench(m, 8192, 7168)),
            *grid("e5m6/row", _bench),
        ],
        bytes_moved=all_bytes,
    ),
}
