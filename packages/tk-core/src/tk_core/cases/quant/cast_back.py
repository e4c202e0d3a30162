"""Cases of quant.cast_back."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidArgumentError, InvalidDtypeError
from .. import Call, Cases, ErrorSample, Level, Maker, Point, Sample, all_bytes, call
from ._casts import E4M3_FLAGS, FLAGS, bench_matrix, grid, place, quantized

_BLOCKS = [(1, 32), (32, 32), (128, 128), (32, 1), (128, 1), (1, 16), (1, 64), (1, 128)]


def _layouts() -> list[Sample]:
    samples = []
    for name, flags in (FLAGS | E4M3_FLAGS).items():
        for block in _BLOCKS:
            if block[1] == 1 and "packed column-major" in name:
                continue
            for i, (fmt_in, out) in enumerate((f, o) for f in ("e4m3", "e2m1") for o in ("bf16", "fp32")):
                why = f"{fmt_in} in blocks {block[0]}x{block[1]} to {out}, scales {name}"

                def make(
                    m: Maker, fmt_in: str = fmt_in, out: str = out, block: Any = block, flags: Any = flags
                ) -> Call:
                    return call(quantized(m, m.randn(133, 320), fmt_in, block, **flags), out, block)

                quick = i in (0, 3) and (block in ((1, 32), (128, 128), (32, 1)) or not flags)
                level: Level = "quick" if quick else "full"
                samples.append(Sample(why, make, level))
    return samples


def _of(rows: int, columns: int, fmt: str, block: tuple[int, int], out: str = "bf16", **flags: Any) -> Any:
    return lambda m: call(quantized(m, m.randn(rows, columns), fmt, block, **flags), out, block)


def _every_code(m: Maker, out: str) -> Call:
    """All 256 e4m3 codes, subnormals and NaN included, under scales at the edges."""
    codes = m.to(torch.arange(256, dtype=torch.uint8)).expand(8, 256).contiguous().view(torch.float8_e4m3fn)
    edges = [1.0, 2.0**-127, 2.0**-149, 2.0**-126, 3.3e38, 0.0, 1.0 / 3.0, float("nan")]
    return call((codes, m.tensor(edges, torch.float32)[:, None].contiguous()), out, (1, 256))


def _every_pair(m: Maker, out: str) -> Call:
    codes = m.to(torch.arange(256, dtype=torch.uint8)).expand(3, 256).contiguous().view(torch.int8)
    return call((codes, m.tensor([[1.0], [2.0**-127], [3.0]], torch.float32)), out, (1, 512))


def _every_exponent(m: Maker, out: str) -> Call:
    """All UE8M0 bytes: 0 is 2**-127, 255 is NaN."""
    data = m.full((256, 8), 1.5).to(torch.float8_e4m3fn)
    data[:, 1] = -448.0
    data.view(torch.uint8)[:, 2] = 1
    per_word = m.layout.ue8m0_per_word
    sf = torch.zeros(256, per_word, dtype=torch.uint8)
    sf[:, 0] = torch.arange(256)
    sf = sf.view(torch.int32 if per_word == 4 else torch.int16)
    return call((data, place(m, sf, True, m.layout.sf_align_bytes)), out, (1, 8))


def _e4m3_scale_codes(m: Maker) -> Call:
    """All e4m3 scales, subnormals and NaN included."""
    data = m.full((256, 8), 1.5).to(torch.float8_e4m3fn)
    sf = m.to(torch.arange(256, dtype=torch.uint8)).view(torch.float8_e4m3fn)[:, None].contiguous()
    return call((data, sf), "fp32", (1, 8))


def _strided_scales(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 256), "e4m3", (1, 32))
    wide = m.full((9, 11), -1.0)
    wide[:, :8] = sf
    return call((data, wide[:, :8]), "fp32", (1, 32))


def _token_slice(m: Maker) -> Call:
    """Rows of a larger quantized tensor: column-major scales with a larger leading stride, off alignment."""
    data, sf = quantized(m, m.randn(20, 256), "e4m3", (1, 32), **FLAGS["packed column-major"])
    return call((data[3:12], sf[3:12]), "bf16", (1, 32))


def _strided_rows(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 512), "e4m3", (1, 32))
    return call((data[:, :250], sf[:, :8]), "bf16", (1, 32))


def _misaligned(m: Maker) -> Call:
    data, sf = quantized(m, m.randn(9, 256), "e4m3", (1, 64))
    shifted = m.full((9 * 256 + 1,), 0, torch.int8).view(data.dtype)[1:].view(9, 256)
    return call((shifted.copy_(data), sf), "fp32", (1, 64))


def _bench(fmt: str, block: tuple[int, int], out: str = "bf16", **flags: Any) -> Any:
    def make(m: Maker, rows: int, columns: int) -> Call:
        x = bench_matrix(m, rows, columns)
        if fmt == "e2m1":
            data = x.view(torch.int8)[:, : columns // 2].contiguous()
        else:
            data = x.to(torch.float8_e4m3fn)
        sf = m.full((-(-rows // block[0]), -(-columns // block[1])), 0.125)
        if flags:
            words = sf.shape[1] // m.layout.ue8m0_per_word
            word = torch.int32 if m.layout.ue8m0_per_word == 4 else torch.int16
            sf = place(m, m.full((sf.shape[0], words), 0x7C7C, word), True, m.layout.sf_align_bytes)
        return call((data, sf), out, block)

    return make


def _point(name: str, make: Any, rows: int, columns: int) -> Point:
    return Point(f"{name} {rows}x{columns}", lambda m: make(m, rows, columns))


def _small(m: Maker) -> Any:
    return quantized(m, m.randn(4, 64), "e4m3", (1, 32))


def _small_word(m: Maker) -> torch.dtype:
    return torch.int32 if m.layout.ue8m0_per_word == 4 else torch.int16


CASES = {
    "quant.cast_back": Cases(
        samples=[
            *_layouts(),
            Sample("one token, K = 7168", _of(1, 7168, "e4m3", (1, 128))),
            Sample("no token", _of(0, 128, "e4m3", (1, 32))),
            Sample("K = 2", _of(3, 2, "e2m1", (1, 2), "fp32")),
            Sample("K = 1", _of(3, 1, "e4m3", (1, 2), "fp32")),
            Sample("K = 100: not a multiple of 16 bytes", _of(5, 100, "e2m1", (1, 32))),
            Sample("K = 35, odd", _of(5, 35, "e4m3", (1, 32), "fp32")),
            Sample("K = 576, rows past a tile", _of(131, 576, "e4m3", (1, 128))),
            Sample("a partial last block in both directions", _of(131, 200, "e4m3", (128, 128), "fp32")),
            Sample("blocks of odd size", _of(10, 70, "e2m1", (3, 7), "fp32")),
            Sample("a block larger than the matrix", _of(10, 70, "e4m3", (64, 512))),
            Sample("a block far larger than the matrix", _of(10, 70, "e4m3", (2**40, 2**40))),
            Sample("blocks of one column, few rows", _of(3, 64, "e4m3", (32, 1), round_sf=True, use_packed_ue8m0=True)),
            Sample("every e4m3 code, bf16", lambda m: _every_code(m, "bf16")),
            Sample("Q13: every e4m3 code, fp32", lambda m: _every_code(m, "fp32")),
            Sample("every pair of e2m1 codes, bf16", lambda m: _every_pair(m, "bf16")),
            Sample("every pair of e2m1 codes, fp32", lambda m: _every_pair(m, "fp32")),
            Sample("Q13: every UE8M0 byte, fp32", lambda m: _every_exponent(m, "fp32")),
            Sample("every UE8M0 byte, bf16", lambda m: _every_exponent(m, "bf16")),
            Sample("every e4m3 scale", _e4m3_scale_codes),
            Sample("Q07: scales with a row stride", _strided_scales),
            Sample("Q07: a slice of tokens", _token_slice),
            Sample("row-strided data of 250 columns", _strided_rows),
            Sample("Q11: misaligned base", _misaligned),
            Sample(
                "more than 2**31 elements",
                lambda m: call(
                    (m.large(299_594, 7168).to(torch.float8_e4m3fn), m.full((299_594, 56), 0.5)), "bf16", (1, 128)
                ),
                "large",
            ),
        ],
        errors=[
            ErrorSample(
                "unknown result", lambda m: call(_small(m), "fp16", (1, 32)), InvalidArgumentError, "fmt must be"
            ),
            ErrorSample(
                "unknown special format",
                lambda m: call(_small(m), "fp32", (1, 32), "e3m8"),
                InvalidArgumentError,
                "x_special_fmt",
            ),
            ErrorSample(
                "plain tensor", lambda m: call(m.randn(4, 64), "fp32", (1, 32)), InvalidDtypeError, "x must be"
            ),
            ErrorSample(
                "uint8 data",
                lambda m: call((_small(m)[0].view(torch.uint8), _small(m)[1]), "fp32", (1, 32)),
                InvalidDtypeError,
                "x[0] must be",
            ),
            ErrorSample(
                "one scale too few",
                lambda m: call((_small(m)[0], _small(m)[1][:3]), "fp32", (1, 32)),
                InvalidArgumentError,
                "x[1] must have shape (4, 2)",
            ),
            ErrorSample(
                "block of 0 columns", lambda m: call(_small(m), "fp32", (1, 0)), InvalidArgumentError, "x_block_size[1]"
            ),
            ErrorSample(
                "block as a number", lambda m: call(_small(m), "fp32", 32), InvalidArgumentError, "x_block_size must be"
            ),
            ErrorSample(
                "scales packed along the rows, column-major",
                lambda m: call(
                    (
                        m.full((512, 4), 1.0).to(torch.float8_e4m3fn),
                        m.full((4, 16 // m.layout.ue8m0_per_word), 0, _small_word(m)).t(),
                    ),
                    "fp32",
                    (32, 1),
                ),
                InvalidArgumentError,
                "row-major where rows are packed",
            ),
        ],
        bench=[
            _point("v3-prefill e4m3/128", _bench("e4m3", (1, 128)), 8192, 7168),
            _point("v3-weights e4m3 128x128", _bench("e4m3", (128, 128)), 7168, 4096),
            _point("v4-prefill e2m1/32 ue8m0", _bench("e2m1", (1, 32), packed=True), 8192, 7168),
            _point("v4-prefill e4m3/32 ue8m0", _bench("e4m3", (1, 32), packed=True), 8192, 7168),
            _point("prefill e4m3/128 to fp32", _bench("e4m3", (1, 128), "fp32"), 8192, 7168),
            _point("wgrad e4m3 32x1", _bench("e4m3", (32, 1)), 8064, 7168),
            *grid("v3 e4m3/128", _bench("e4m3", (1, 128))),
        ],
        bytes_moved=all_bytes,
    ),
}
