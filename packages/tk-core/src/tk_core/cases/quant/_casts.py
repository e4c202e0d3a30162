"""What the cases of the casts share: inputs at the edges of the formats, quantized inputs in every layout, benchmark
shapes, and which codes are unspecified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats import FORMATS, align, ceil_div
from ...reference.scales import load_scales, quantize, spread, store_scales
from .. import Call, Maker, Point

BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")

FLAGS: dict[str, dict[str, Any]] = {
    "row-major": {},
    "column-major": {"use_tma_aligned_col_major_sf": True},
    "rounded": {"round_sf": True},
    "packed": {"round_sf": True, "use_packed_ue8m0": True},
    "packed column-major": {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True},
}
"""Output flags of each scale layout, by name."""

E4M3_FLAGS: dict[str, dict[str, Any]] = {
    "e4m3 scales": {"use_e4m3_sf": True},
    "e4m3 scales column-major": {"use_e4m3_sf": True, "use_tma_aligned_col_major_sf": True},
}

MODEL_COLUMNS = (576, 2048, 5120, 7168, 16384)
DECODE_ROWS = (1, 64, 512, 4001)


def place(m: Maker, sf: Tensor, column_major: bool, align_bytes: int) -> Tensor:
    """A scale tensor on the device of the sample, row-major or column-major with padding that must not be read."""
    if not column_major:
        return sf.to(m.device)
    unit = sf.element_size()
    ld = align(sf.shape[0] * unit, align_bytes) // unit if align_bytes else sf.shape[0]
    padded = torch.full((sf.shape[1], ld * unit), 0xFF, dtype=torch.uint8, device=m.device).view(sf.dtype)
    return padded.t()[: sf.shape[0]].copy_(sf)


def quantized(
    m: Maker,
    x: Tensor,
    fmt: str,
    block: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """A matrix quantized by the reference, with scales in any layout."""
    data, sf = quantize(x.cpu(), fmt, *block, 1e-4, round_sf, use_e4m3_sf)
    per_word = m.layout.ue8m0_per_word
    sf = store_scales(sf, use_packed_ue8m0, use_e4m3_sf, pack_rows=block[1] == 1, ue8m0_per_word=per_word)
    return data.to(m.device), place(m, sf, use_tma_aligned_col_major_sf, m.layout.sf_align_bytes)


def around(m: Maker, qmax: float, group: int, dtype: torch.dtype) -> Tensor:
    """Groups whose amax is qmax * 2**n and the numbers next to it, over all magnitudes; one group in a row."""
    step = 2.0**-7 if dtype == BF16 else 2.0**-23
    tops = [qmax * 2.0**n * (1 + i * step) for n in (-100, -20, -9, -1, 0, 1, 9, 100) for i in (-1, 0, 1)]
    x = m.rand(len(tops), group) * 2 - 1
    x = x * m.tensor(tops, torch.float32)[:, None]
    x[:, group // 2] = m.tensor(tops, torch.float32)
    x[1::2, group // 2] *= -1
    return x.to(dtype)


def boundaries(m: Maker, fmt: str, group: int) -> Tensor:
    """fp32 groups with scale 1: every code, every tie between codes and the numbers next to it, with both signs."""
    if fmt == "e4m3":
        codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = (codes[1:] + codes[:-1]) / 2
    down, up = torch.zeros(1), torch.full((1,), INF)
    values = torch.cat((codes, ties, torch.nextafter(ties, down), torch.nextafter(ties, up)))
    values = torch.cat((values, -values))
    qmax = FORMATS[fmt].qmax
    rows = ceil_div(len(values), group - 1)
    x = torch.full((rows, group), qmax)
    x[:, 1:] = torch.nn.functional.pad(values, (0, rows * (group - 1) - len(values))).view(rows, group - 1)
    return x.to(m.device)


def subnormals(m: Maker, columns: int) -> Tensor:
    """fp32 rows of zeros, negative zeros, subnormals, and the smallest and largest numbers."""
    x = m.full((6, columns), 0.0)
    x[1] = -0.0
    x[2] = 2.0**-127
    x[3, ::2], x[3, 1::2] = 2.0**-149, -(2.0**-126)
    x[4] = 3.4e38
    x[5, ::3] = 1e-30
    return x


def poisoned(m: Maker, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random values; every third row holds one NaN, Inf or -Inf somewhere."""
    x = m.randn(rows, columns)
    for i, row in enumerate(range(0, rows, 3)):
        x[row, (7 * row) % columns] = (NAN, INF, -INF)[i % 3]
    return x.to(dtype)


def strided(m: Maker, rows: int, columns: int, dtype: torch.dtype, gap: int) -> Tensor:
    """Rows with a gap between them."""
    return m.randn(rows, columns + gap, dtype=dtype)[:, :columns]


def misaligned(m: Maker, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A contiguous matrix that starts one element past an allocation."""
    return m.randn(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)


def bench_matrix(m: Maker, rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random values; for large matrices made on the device."""
    if rows * columns > 2**22:
        return m.large(rows, columns, dtype)
    return m.randn(rows, columns, dtype=dtype)


def grid(name: str, make: Callable[[Maker, int, int], Call]) -> list[Point]:
    """Few tokens to a few thousand, at the hidden sizes of models."""

    def point(rows: int, columns: int) -> Point:
        return Point(f"{name} {rows}x{columns}", lambda m: make(m, rows, columns))

    return [point(rows, columns) for rows in DECODE_ROWS for columns in MODEL_COLUMNS]


def bound(make: Callable[..., Call], **values: Any) -> Callable[[Maker], Call]:
    """A sample's maker with some arguments fixed."""
    return lambda m: make(m, **values)


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, however it was passed."""
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def clear_codes(q: Tensor, sf: Tensor, block: tuple[int, int], transposed: bool = False) -> None:
    """Zero the codes of blocks with a NaN scale, which are unspecified."""
    codes = q.t() if transposed else q
    fmt = next(f for f in FORMATS.values() if f.dtype == q.dtype)
    rows, columns = codes.shape[0], fmt.logical(codes.shape[1])
    bad = load_scales(sf, block[1], ceil_div(rows, block[0]), ceil_div(columns, block[1])).isnan()
    if not bool(bad.any()):
        return
    clear(q, spread(bad, *block, rows, columns), transposed)


def clear(q: Tensor, bad: Tensor, transposed: bool = False) -> None:
    """Zero the codes of some elements ``(M, K)``; of e5m6, of the eight that share their words."""
    if q.dtype == torch.int8:
        keep = (~bad[:, 0::2]).to(torch.uint8) * 0x0F | (~bad[:, 1::2]).to(torch.uint8) * 0xF0
        q.view(torch.uint8).bitwise_and_(keep)
    elif q.dtype == torch.uint8:
        octets = bad.view(bad.shape[0], -1, 8).any(-1)
        q.masked_fill_(octets.repeat_interleave(12, dim=1), 0)
    else:
        codes = q.view(torch.uint8)
        (codes.t() if transposed else codes).masked_fill_(bad, 0)


def clear_by_block(block_of: Callable[[Call], tuple[int, int]]) -> Callable[[Call, Sequence[Tensor]], None]:
    """The ``unspecified`` of a cast that returns ``(q, sf)``."""
    return lambda call, results: clear_codes(results[0], results[1], block_of(call))
