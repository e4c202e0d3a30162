"""Cases of quant.per_block_cast_lossless."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgumentError, InvalidDtypeError
from ...reference.scales import pack_exponents
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, all_bytes, call
from ._casts import FLAGS, argument, bench_matrix, clear_by_block, place, quantized

Block = tuple[int, int]
_TOKEN: Block = (1, 32)
_OUT: list[Block] = [(1, 128), (32, 32), (128, 128), (32, 64)]
_ROUNDED = {k: v for k, v in FLAGS.items() if k in ("packed", "packed column-major")}
_ROUNDED |= {"row-major": {"round_sf": True}, "column-major": {"round_sf": True, **FLAGS["column-major"]}}


def _values(m: Maker, rows: int, columns: int) -> Tensor:
    """Values whose scales differ by less than 2**11 everywhere."""
    x = m.randn(rows, columns)
    return torch.where(x < 0, -1.0, 1.0) * x.abs().clamp(min=2.0**-7)


def _of(rows: int, columns: int, inner: Block, outer: Block, flags_in: Any = None, **flags: Any) -> Any:
    def make(m: Maker) -> Call:
        x = quantized(m, _values(m, rows, columns), "e2m1", inner, **(flags_in or {"round_sf": True}))
        return call(x, "e4m3", inner, outer, **flags)

    return make


def _layouts() -> list[Sample]:
    samples = []
    for name_in, flags_in in _ROUNDED.items():
        for name, flags in _ROUNDED.items():
            for outer in _OUT:
                level: Level = "quick" if outer in ((1, 128), (128, 128)) or name_in == name else "full"
                why = f"1x32 {name_in} to {outer[0]}x{outer[1]} {name}"
                samples.append(Sample(why, _of(133, 320, _TOKEN, outer, flags_in, **flags), level))
    return samples


def _exponents(m: Maker, exponents: list[list[int]], outer: Block, packed: bool, **flags: Any) -> Call:
    """Every code under given scales of 1 x 16 blocks."""
    e = torch.tensor(exponents, dtype=torch.int32)
    codes = torch.arange(256, dtype=torch.uint8)[: e.shape[1] * 8].view(torch.int8)
    data = m.to(codes.expand(e.shape[0], -1).contiguous())
    if packed:
        sf = pack_exponents(e, ue8m0_per_word=m.layout.ue8m0_per_word).to(m.device)
    else:
        sf = (e << 23).view(torch.float32).to(m.device)
    return call((data, sf), "e4m3", (1, 16), outer, **flags)


def _columns(m: Maker) -> Call:
    x = quantized(m, _values(m, 70, 64), "e2m1", (8, 1), **FLAGS["packed"])
    return call(x, "e4m3", (8, 1), (16, 1), **FLAGS["packed"])


def _strided(m: Maker) -> Call:
    data, sf = quantized(m, _values(m, 9, 512), "e2m1", _TOKEN, round_sf=True)
    return call((data[:, :128], sf[:, :8]), "e4m3", _TOKEN, (1, 64))


def _misaligned(m: Maker) -> Call:
    data, sf = quantized(m, _values(m, 9, 256), "e2m1", _TOKEN, round_sf=True)
    shifted = m.full((9 * 128 + 1,), 0, torch.int8)[1:].view(9, 128)
    return call((shifted.copy_(data), sf), "e4m3", _TOKEN, (1, 128))


def _bench(m: Maker, rows: int, columns: int, outer: Block, **flags: Any) -> Call:
    data = bench_matrix(m, rows, columns // 2).to(torch.float8_e4m3fn).view(torch.int8)
    if not flags:
        return call((data, m.full((rows, columns // 32), 0.125)), "e4m3", _TOKEN, outer)
    word = torch.int32 if m.layout.ue8m0_per_word == 4 else torch.int16
    words = columns // 32 // m.layout.ue8m0_per_word
    sf = place(m, m.full((rows, words), 0x7C7C, word), True, m.layout.sf_align_bytes)
    if m.layout.ue8m0_per_word == 4:
        sf |= 0x7C7C0000
    return call((data, sf), "e4m3", _TOKEN, outer, **flags)


def _small(m: Maker) -> Any:
    return quantized(m, _values(m, 4, 64), "e2m1", _TOKEN, round_sf=True)


_WEIGHTS = (7168, 4096)

CASES = {
    "quant.per_block_cast_lossless": Cases(
        samples=[
            *_layouts(),
            Sample("no row", _of(0, 128, _TOKEN, (32, 32))),
            Sample("no row, packed column-major", _of(0, 128, _TOKEN, (32, 32), **FLAGS["packed column-major"])),
            Sample("one row", _of(1, 128, _TOKEN, (128, 128))),
            Sample("K = 2", _of(3, 2, _TOKEN, (1, 32))),
            Sample("K = 100: not a multiple of 16 bytes", _of(37, 100, _TOKEN, (32, 32))),
            Sample("K = 576, partial blocks at both edges", _of(131, 576, _TOKEN, (128, 128))),
            Sample("the same blocks", _of(9, 128, _TOKEN, _TOKEN)),
            Sample("blocks of odd size", _of(20, 84, (3, 7), (6, 21))),
            Sample("square input blocks", _of(130, 256, (32, 32), (128, 128))),
            Sample("one column to one column, packed along the rows", _columns),
            Sample("row-strided", _strided),
            Sample("Q11: misaligned base", _misaligned),
            Sample(
                "the widest range of scales",
                lambda m: _exponents(m, [[100, 89, 95, 99], [100, 100, 89, 90]], (2, 64), False),
            ),
            Sample(
                "output exponent 0, from bytes 0 to 6",
                lambda m: _exponents(m, [[0, 1, 2, 3], [4, 5, 6, 0], [7, 0, 3, 1]], (1, 64), True),
            ),
            Sample(
                "output exponent 0, packed, fp32 scales from 2**-126",
                lambda m: _exponents(m, [[1, 5, 6, 2], [8, 1, 7, 3]], (1, 32), False, **FLAGS["packed"]),
            ),
            Sample(
                "the largest scales", lambda m: _exponents(m, [[254, 250, 249, 253]], (1, 64), True, **FLAGS["packed"])
            ),
            Sample("more than 2**31 elements", lambda m: _bench(m, 299_594, 7168, (128, 128)), "large"),
        ],
        errors=[
            ErrorSample("e2m1 out", lambda m: call(_small(m), "e2m1", _TOKEN, (1, 64)), InvalidArgumentError, "fmt"),
            ErrorSample(
                "e4m3 data",
                lambda m: call(quantized(m, m.randn(4, 64), "e4m3", _TOKEN), "e4m3", _TOKEN, (1, 64)),
                InvalidDtypeError,
                "x[0] must be int8",
            ),
            ErrorSample(
                "not a multiple",
                lambda m: call(_small(m), "e4m3", _TOKEN, (1, 48)),
                InvalidArgumentError,
                "out_block_size[1] must be a multiple of x_block_size[1] = 32",
            ),
            ErrorSample(
                "packed without round",
                lambda m: call(_small(m), "e4m3", _TOKEN, (1, 64), use_packed_ue8m0=True),
                InvalidArgumentError,
                "use_packed_ue8m0",
            ),
            ErrorSample(
                "e4m3 scales",
                lambda m: call((_small(m)[0], _small(m)[1].to(torch.float8_e4m3fn)), "e4m3", _TOKEN, (1, 64)),
                InvalidDtypeError,
                "x[1] must be",
            ),
        ],
        bench=[
            Point("v4-weights 1x32 to 128x128 7168x4096", lambda m: _bench(m, *_WEIGHTS, (128, 128))),
            Point("v4-weights 1x32 to 32x32 7168x4096", lambda m: _bench(m, *_WEIGHTS, (32, 32))),
            Point(
                "v4-experts 1x32 to 1x128 ue8m0 16384x7168",
                lambda m: _bench(m, 16384, 7168, (1, 128), **FLAGS["packed column-major"]),
            ),
            Point("v4-experts 1x32 to 32x32 16384x7168", lambda m: _bench(m, 16384, 7168, (32, 32))),
        ],
        bytes_moved=all_bytes,
        unspecified=clear_by_block(lambda arguments: argument(arguments, 3, "out_block_size")),
    ),
}
