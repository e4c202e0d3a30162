# ruff: noqa: E501  (lines of AscendC)
"""Each vector intrinsic on its own, through TileLang's wrappers, against PyTorch or values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I32, I16, I8, U8 = torch.int32, torch.int16, torch.int8, torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPP = {
    F32: "float",
    F16: "half",
    BF16: "bfloat16_t",
    I32: "int32_t",
    I16: "int16_t",
    I8: "int8_t",
    U8: "uint8_t",
    torch.uint16: "uint16_t",
    torch.uint32: "uint32_t",
    E4M3: "float8_e4m3_t",
    E5M2: "float8_e5m2_t",
    torch.int64: "int64_t",
}


@dataclass
class Case:
    name: str
    body: str
    inputs: list
    expected: torch.Tensor  # of the first bytes of the output
    before: torch.Tensor | None = None


CASES: list[Case] = []


def case(name, body, inputs, expected, before=None):
    CASES.append(Case(name, body, inputs, expected, before))


def ld(p, dtype, dist="norm", offset=0):
    t = CPP[dtype]
    return f"simd_inst::vlds_{dist}<{t}>((__ubuf__ {t}*){p} + {offset}, 0)"


def st(value, dtype, mask="all", dist="norm", offset=0):
    t = CPP[dtype]
    return f"simd_inst::vsts_{dist}<{t}>({value}, (__ubuf__ {t}*)o + {offset}, 0, {mask});"


ALL8 = "vector_bool all = asc_create_mask_b8(PAT_ALL);"
ALL16 = "vector_bool all = asc_create_mask_b16(PAT_ALL);"
ALL32 = "vector_bool all = asc_create_mask_b32(PAT_ALL);"
ALL = {1: ALL8, 2: ALL16, 4: ALL32, 8: "vector_bool all = asc_create_mask_b64(PAT_ALL);"}

g = torch.Generator().manual_seed(1)
x32 = torch.randn(128, generator=g)
y32 = torch.randn(128, generator=g)
z32 = torch.randn(128, generator=g)
i32 = torch.randint(-(2**31), 2**31 - 1, (128,), generator=g, dtype=I32)
j32 = torch.randint(-(2**31), 2**31 - 1, (128,), generator=g, dtype=I32)
u8 = torch.randint(0, 256, (512,), generator=g, dtype=torch.int32).to(U8)
x16 = torch.randn(256, generator=g).to(BF16)
h16 = torch.randn(256, generator=g).to(F16)


def zeros(n, dtype=F32):
    return torch.zeros(n, dtype=dtype)


# ---- predicates ---------------------------------------------------------------------------------------------------

PATTERNS = {
    "ALL": lambda i, n: i >= 0,
    "ALLF": lambda i, n: i < 0,
    "VL1": lambda i, n: i < 1,
    "VL3": lambda i, n: i < 3,
    "VL16": lambda i, n: i < 16,
    "VL64": lambda i, n: i < 64,
    "M3": lambda i, n: i % 3 == 0,
    "M4": lambda i, n: i % 4 == 0,
    "H": lambda i, n: i < n // 2,
    "Q": lambda i, n: i < n // 4,
}
for pattern, chosen in PATTERNS.items():
    for bits, dtype in ((8, U8), (16, I16), (32, I32)):
        lanes = 2048 // bits
        index = torch.arange(lanes)
        want = torch.where(chosen(index, lanes), 7, 0).to(dtype)
        body = f"vector_bool m = asc_create_mask_b{bits}(PAT_{pattern}); {ALL[bits // 8]}"
        body += st(f"simd_inst::vdup<{CPP[dtype]}>(7, m, MODE_ZEROING)", dtype)
        case(f"pattern_{pattern}_b{bits}", body, [], want)
case(
    "update_mask",
    f"{ALL32} uint32_t n = 70; vector_bool m0 = asc_update_mask_b32(n), m1 = asc_update_mask_b32(n);"
    + st("simd_inst::vdup<float>(1.0f, m0, MODE_ZEROING)", F32)
    + st("simd_inst::vdup<float>(1.0f, m1, MODE_ZEROING)", F32, offset=64)
    + st("simd_inst::vdup<float>(1.0f, simd_inst::update_mask_b32(5), MODE_ZEROING)", F32, offset=128),
    [],
    torch.cat([torch.ones(70), zeros(58), torch.ones(5), zeros(59)]),
)
LOGIC = {"pand": lambda p, q: p & q, "por": lambda p, q: p | q, "pxor": lambda p, q: p ^ q}
p32, q32 = x32[:64] > 0, y32[:64] > 0
for name, op in LOGIC.items():
    body = f"{ALL32} vector_bool h = asc_create_mask_b32(PAT_H);"
    body += f"auto p = simd_inst::vcmps_gt({ld('a', F32)}, 0.0f, all); auto q = simd_inst::vcmps_gt({ld('b', F32)}, 0.0f, all);"
    body += st(f"simd_inst::vdup<float>(1.0f, simd_inst::{name}(p, q, h), MODE_ZEROING)", F32)
    case(name, body, [x32, y32], (op(p32, q32) & (torch.arange(64) < 32)).float())
case(
    "pnot_psel",
    f"{ALL32} vector_bool h = asc_create_mask_b32(PAT_H);"
    f"auto p = simd_inst::vcmps_gt({ld('a', F32)}, 0.0f, all); auto q = simd_inst::vcmps_gt({ld('b', F32)}, 0.0f, all);"
    + st("simd_inst::vdup<float>(1.0f, simd_inst::pnot(p, all), MODE_ZEROING)", F32)
    + st("simd_inst::vdup<float>(1.0f, simd_inst::psel(p, q, h), MODE_ZEROING)", F32, offset=64),
    [x32, y32],
    torch.cat([(~p32).float(), torch.where(torch.arange(64) < 32, p32, q32).float()]),
)
case(  # one bit per byte in memory; a pack keeps every second bit
    "predicate_memory",
    f"{ALL16} auto p = simd_inst::vcmps_gt({ld('a', I16)}, (int16_t)0, all);"
    "simd_inst::psts_norm(p, (__ubuf__ uint32_t*)o, 0); simd_inst::psts_pack(p, (__ubuf__ uint32_t*)(o + 32), 0);"
    "simd_inst::mem_bar(VST_VLD); auto q = simd_inst::plds_norm((__ubuf__ uint32_t*)o, 0);"
    "auto u = simd_inst::plds_upsample((__ubuf__ uint32_t*)(o + 32), 0);"
    + st("simd_inst::vdup<int16_t>(1, q, MODE_ZEROING)", I16, offset=32)
    + st("simd_inst::vdup<int16_t>(1, u, MODE_ZEROING)", I16, offset=160),
    [torch.arange(-63, 65, dtype=I16)],
    torch.cat(
        [
            torch.tensor([0] * 16 + [0x55] * 16 + [0] * 8 + [0xFF] * 8 + [0] * 16, dtype=U8).view(I16),
            torch.cat([zeros(64, I16), torch.ones(64, dtype=I16)]),
            torch.cat([zeros(64, I16), torch.ones(64, dtype=I16)]),
        ]
    ),
)
case(
    "predicate_permute",
    f"{ALL32} auto p = simd_inst::vcmps_gt({ld('a', F32)}, 0.0f, all); vector_bool m4 = asc_create_mask_b32(PAT_M4);"
    "auto s = simd_inst::pintlv_b32(p, m4); auto t = simd_inst::pdintlv_b32(s.v0, s.v1);"
    + st("simd_inst::vdup<float>(1.0f, s.v0, MODE_ZEROING)", F32)
    + st("simd_inst::vdup<float>(1.0f, t.v0, MODE_ZEROING)", F32, offset=64)
    + st("simd_inst::vdup<float>(1.0f, t.v1, MODE_ZEROING)", F32, offset=128),
    [x32],
    torch.cat(
        [
            torch.stack([p32[:32], torch.arange(32) % 4 == 0], 1).flatten().float(),
            p32.float(),
            (torch.arange(64) % 4 == 0).float(),
        ]
    ),
)
case(  # a packed b32 predicate selects 16-bit lanes; unpacking restores it
    "ppack_punpack",
    f"{ALL32} vector_bool a16 = asc_create_mask_b16(PAT_ALL); auto p = simd_inst::vcmps_gt({ld('a', F32)}, 0.0f, all);"
    "auto low = simd_inst::ppack(p, LOWER); auto high = simd_inst::ppack(p, HIGHER); auto back = simd_inst::punpack(high, HIGHER);"
    + st("simd_inst::vdup<int16_t>(1, low, MODE_ZEROING)", I16, mask="a16")
    + st("simd_inst::vdup<int16_t>(1, high, MODE_ZEROING)", I16, mask="a16", offset=128)
    + st("simd_inst::vdup<int32_t>(1, back, MODE_ZEROING)", I32, offset=128),
    [x32],
    torch.cat([p32.to(I16), zeros(128, I16), p32.to(I16), p32.to(I32).view(I16)]),
)

# ---- loads and stores ---------------------------------------------------------------------------------------------

case("vlds_norm", ALL32 + st(ld("a", F32), F32), [x32], x32[:64])
case("vlds_brc", ALL32 + st(ld("a", F32, "brc_elem", 5), F32), [x32], x32[5].repeat(64))
case("vlds_upsample", ALL16 + st(ld("a", I16, "upsample"), I16), [x16], x16[:64].view(I16).repeat_interleave(2))
case("vlds_downsample", ALL16 + st(ld("a", I16, "downsample"), I16), [x16], x16[::2].view(I16))
case(
    "vlds_unpack",
    ALL16 + st(ld("a", I16, "unpack"), I16),
    [x16],
    torch.stack([x16[:64].view(I16), zeros(64, I16)], 1).flatten(),
)
case("vlds_unpack4", ALL8 + st(ld("a", U8, "unpack4"), U8), [u8], u8[:64].to(I32).view(U8))
case("vlds_brc_datablock", ALL32 + st(ld("a", F32, "brc_datablock", 8), F32), [x32], x32[8:16].repeat(8))
case("vlds_e2b_b32", ALL32 + st(ld("a", F32, "brc_elem2datablock", 8), F32), [x32], x32[8:16].repeat_interleave(8))
case(
    "vlds_e2b_b16",
    ALL16 + st(ld("a", I16, "brc_elem2datablock", 8), I16),
    [x16],
    x16[8:16].view(I16).repeat_interleave(16),
)
for bits, dtype, source in ((8, U8, u8), (16, I16, x16.view(I16)), (32, F32, x32)):
    t = CPP[dtype]
    body = ALL[bits // 8] + f"auto r = simd_inst::vld_x2<{t}>((__ubuf__ {t}*)a, DINTLV_B{bits});"
    lanes = 2048 // bits
    body += st("r.v0", dtype) + st("r.v1", dtype, offset=lanes)
    case(f"vld_x2_b{bits}", body, [source], torch.cat([source[: 2 * lanes : 2], source[1 : 2 * lanes : 2]]))
case(
    "vlds_postupdate",
    ALL32 + "auto p = (__ubuf__ float*)a; auto r = simd_inst::vlds_norm_postupdate<float>(p, 64);"
    "auto s = simd_inst::vlds_brc_elem_postupdate<float>(r.v1, 1);" + st("r.v0", F32) + st("s.v0", F32, offset=64),
    [x32],
    torch.cat([x32[:64], x32[64].repeat(64)]),
)
case(
    "vsts_mask",
    "vector_bool m = asc_create_mask_b32(PAT_M3);" + st(ld("a", F32), F32, "m"),
    [x32],
    torch.where(torch.arange(64) % 3 == 0, x32[:64], 9.0),
    torch.full((64,), 9.0),
)
case(
    "vsts_1st",
    ALL32 + st(ld("a", F32), F32, dist="1st", offset=3),
    [x32],
    torch.cat([zeros(3), x32[:1], zeros(60)]),
)
case("vsts_pack_b16", ALL16 + st(ld("a", I16), I16, dist="pack_b16"), [i32], i32.view(U8)[:256:2].clone())
case("vsts_pack_b32", ALL32 + st(ld("a", I32), I32, dist="pack_b32"), [i32], i32[:64].to(I16))
case(
    "vsts_pack_quarter",
    "vector_bool m = asc_create_mask_b32(PAT_VL16);" + st(ld("a", I32), I32, "m", "pack_quarter"),
    [i32],
    torch.cat([i32[:16].to(I8), torch.full((48,), 5, dtype=I8)]),
    torch.full((64,), 5, dtype=I8),
)
case(  # eight blocks of 32 bytes, two blocks apart; then the pointer moves by one block
    "vsstb",
    ALL32
    + f"auto r = {ld('a', F32)}; auto p = simd_inst::vsstb<float>(r, (__ubuf__ float*)o, (2 << 16) | 1, all, POST_UPDATE);"
    "simd_inst::vsstb<float>(r, p, (2 << 16) | 1, all);",
    [x32],
    x32[:64].reshape(8, 1, 8).repeat(1, 2, 1).flatten(),
)

# ---- arithmetic ---------------------------------------------------------------------------------------------------


def same_bits(dtype):
    return {F32: (x32, y32), F16: (h16, h16.flip(0)), BF16: (x16, x16.flip(0)), I32: (i32, j32)}[dtype]


for dtype in (F32, F16, BF16, I32):
    a, b = same_bits(dtype)
    lanes = 256 // a.element_size()
    a, b = a[:lanes], b[:lanes]
    binary = {
        "vadd": a + b,
        "vsub": a - b,
        "vmul": a * b,
        "vmax": torch.maximum(a, b),
        "vmin": torch.minimum(a, b),
    }
    for op, want in binary.items():
        body = ALL[a.element_size()]
        body += st(f"simd_inst::{op}({ld('a', dtype)}, {ld('b', dtype)}, all, MODE_ZEROING)", dtype)
        case(f"{op}_{CPP[dtype]}", body, [a, b], want)
BITWISE = {"vand": i32[:64] & j32[:64], "vor": i32[:64] | j32[:64], "vxor": i32[:64] ^ j32[:64]}
for op, want in BITWISE.items():
    case(op, ALL32 + st(f"simd_inst::{op}({ld('a', I32)}, {ld('b', I32)}, all, MODE_ZEROING)", I32), [i32, j32], want)
UNARY = {
    "vabs": x32[:64].abs(),
    "vneg": -x32[:64],
    "vrelu": x32[:64].relu(),
    "vexp": x32[:64].double().exp().float(),
    "vsqrt": x32[:64].double().sqrt().float(),
    "vln": x32[:64].double().log().float(),
}
for op, want in UNARY.items():
    case(op, ALL32 + st(f"simd_inst::{op}({ld('a', F32)}, all, MODE_ZEROING)", F32), [x32], want)
case("vnot", ALL32 + st(f"simd_inst::vnot({ld('a', I32)}, all, MODE_ZEROING)", I32), [i32], ~i32[:64])
SCALAR = {
    "vadds": x32[:64] + 0.3,
    "vmuls": x32[:64] * torch.tensor(0.3),
    "vmaxs": x32[:64].clamp(min=0.3),
    "vmins": x32[:64].clamp(max=0.3),
}
for op, want in SCALAR.items():
    case(op, ALL32 + st(f"simd_inst::{op}({ld('a', F32)}, 0.3f, all, MODE_ZEROING)", F32), [x32], want)
amount = torch.arange(64, dtype=I32)
for op, name, want in (
    ("vshl", "shift_left", torch.where(amount < 32, i32[:64].long() << amount, 0).to(I32)),
    ("vshr", "shift_right", (i32[:64].long() >> amount).to(I32)),
):
    body = ALL32 + st(f"simd_inst::{op}({ld('a', I32)}, {ld('b', I32)}, all, MODE_ZEROING)", I32)
    case(name, body, [i32, amount], want)
case(
    "shift_scalar",
    ALL32
    + st(f"simd_inst::vshls({ld('a', I32)}, 3, all, MODE_ZEROING)", I32)
    + st(f"simd_inst::vshrs({ld('a', torch.uint32)}, 3, all, MODE_ZEROING)", torch.uint32, offset=64),
    [i32],
    torch.cat([(i32[:64].long() << 3).to(I32), ((i32[:64].long() & 0xFFFFFFFF) >> 3).to(I32)]),
)
special = torch.tensor([math.nan, 1.0, -2.0, math.inf, 1.0, -math.inf, 0.0, math.nan] * 8)
other = torch.tensor([1.0, math.nan, 0.0, 2.0, math.inf, 2.0, -1.0, math.nan] * 8)
case(
    "vmax_nan",
    ALL32 + st(f"simd_inst::vmax({ld('a', F32)}, {ld('b', F32)}, all, MODE_ZEROING)", F32),
    [special, other],
    torch.maximum(special, other),
)
case(
    "vabsdif_vexpdif",
    ALL32
    + st(f"simd_inst::vabsdif({ld('a', F32)}, {ld('b', F32)}, all, MODE_ZEROING)", F32)
    + st(f"simd_inst::vexpdif({ld('a', F32)}, {ld('b', F32)}, all)", F32, offset=64),
    [x32, y32],
    torch.cat([(x32 - y32)[:64].abs(), (x32 - y32)[:64].double().exp().float()]),
)
case(
    "vlrelu_vprelu",
    ALL32
    + st(f"simd_inst::vlrelu({ld('a', F32)}, 0.25f, all)", F32)
    + st(f"simd_inst::vprelu({ld('a', F32)}, {ld('b', F32)}, all)", F32, offset=64),
    [x32, y32],
    torch.cat([torch.where(x32 >= 0, x32, x32 * 0.25)[:64], torch.where(x32 >= 0, x32, x32 * y32)[:64]]),
)
fma = (x32.double() * y32.double() + z32.double())[:64].float()
case(
    "vmula",
    ALL32
    + f"auto r = {ld('c', F32)}; simd_inst::vmula(&r, {ld('a', F32)}, {ld('b', F32)}, all, MODE_ZEROING);"
    + st("r", F32),
    [x32, y32, z32],
    fma,
)
case(
    "vmadd",
    ALL32
    + f"auto r = {ld('a', F32)}; simd_inst::vmadd(&r, {ld('b', F32)}, {ld('c', F32)}, all, MODE_ZEROING);"
    + st("r", F32),
    [x32, y32, z32],
    fma,
)
case(
    "vmula_merging",
    "vector_bool all = asc_create_mask_b32(PAT_ALL), h = asc_create_mask_b32(PAT_H);"
    f"auto r = {ld('c', F32)}; simd_inst::vmula(&r, {ld('a', F32)}, {ld('b', F32)}, h, MODE_MERGING);"
    f"auto s = {ld('c', F32)}; simd_inst::vmadd(&s, {ld('a', F32)}, {ld('b', F32)}, h, MODE_MERGING);"
    + st("r", F32)
    + st("s", F32, offset=64),
    [x32, y32, z32],
    torch.cat([fma[:32], z32[32:64], (z32.double() * x32 + y32)[:32].float(), z32[32:64]]),
)
case(
    "vaxpy",
    ALL32 + f"auto r = {ld('b', F32)}; simd_inst::vaxpy(&r, {ld('a', F32)}, 0.7f, all, MODE_ZEROING);" + st("r", F32),
    [x32, y32],
    (x32.double() * torch.tensor(0.7).double() + y32.double())[:64].float(),
)
wide = (i32[:64].long() & 0xFFFFFFFF) + (j32[:64].long() & 0xFFFFFFFF)
case(
    "vaddc",
    ALL32
    + f"auto r = simd_inst::vaddc({ld('a', I32)}, {ld('b', I32)}, all); auto s = simd_inst::vaddcs({ld('a', I32)}, {ld('b', I32)}, r.v0, all);"
    + st("r.v1", I32)
    + st("simd_inst::vdup<int32_t>(1, r.v0, MODE_ZEROING)", I32, offset=64)
    + st("s.v1", I32, offset=128),
    [i32, j32],
    torch.cat([wide.to(I32), (wide >> 32).to(I32), (wide + (wide >> 32)).to(I32)]),
)
borrow = ((i32[:64].long() & 0xFFFFFFFF) >= (j32[:64].long() & 0xFFFFFFFF)).to(I32)
case(
    "vsubc",
    ALL32
    + f"auto r = simd_inst::vsubc({ld('a', I32)}, {ld('b', I32)}, all); auto s = simd_inst::vsubcs({ld('a', I32)}, {ld('b', I32)}, r.v0, all);"
    + st("r.v1", I32)
    + st("simd_inst::vdup<int32_t>(1, r.v0, MODE_ZEROING)", I32, offset=64)
    + st("s.v1", I32, offset=128),
    [i32, j32],
    torch.cat([(i32 - j32)[:64], borrow, (i32 - j32)[:64] - 1 + borrow]),
)
product = i32[:64].long() * j32[:64].long()
case(
    "vmull",
    ALL32
    + f"auto r = simd_inst::vmull({ld('a', I32)}, {ld('b', I32)}, all);"
    + st("r.v0", I32)
    + st("r.v1", I32, offset=64),
    [i32, j32],
    torch.cat([product.to(I32), (product >> 32).to(I32)]),
)
tiny = torch.tensor([1e-38, 3e-39, 1.0, 4.0, 0.0, 2.0, 1e38, 0.1] * 8)
PRECISE = {
    "vdiv": (f"simd_inst::vdiv({ld('a', F32)}, {ld('b', F32)}, all, MODE_ZEROING)", x32 / y32),
    "vdiv_exact": (f"simd_inst::vdiv_0ulp_ftz_true({ld('a', F32)}, {ld('b', F32)}, all, MODE_ZEROING)", x32 / y32),
    "vsqrt_exact": (
        f"simd_inst::vsqrt_0ulp_ftz_false({ld('c', F32)}, all, MODE_ZEROING)",
        tiny.double().sqrt().float(),
    ),
}
for name, (value, want) in PRECISE.items():
    case(name, ALL32 + st(value, F32), [x32, y32, tiny], want[:64])
case(
    "vsel_vci",
    "vector_bool all = asc_create_mask_b32(PAT_ALL), m = asc_create_mask_b32(PAT_M4);"
    "auto up = simd_inst::vci<int32_t>(10, INC_ORDER); auto down = simd_inst::vci<int32_t>(10, DEC_ORDER);"
    + st("simd_inst::vsel(up, down, m)", I32),
    [],
    torch.where(torch.arange(64) % 4 == 0, 10 + torch.arange(64), 10 - torch.arange(64)).to(I32),
)
for name, op in {
    "eq": torch.eq,
    "ne": torch.ne,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
}.items():
    body = ALL32 + f"auto p = simd_inst::vcmp_{name}({ld('a', F32)}, {ld('b', F32)}, all);"
    body += f"auto q = simd_inst::vcmps_{name}({ld('a', I32)}, 3, all);"
    body += st("simd_inst::vdup<float>(1.0f, p, MODE_ZEROING)", F32)
    body += st("simd_inst::vdup<float>(1.0f, q, MODE_ZEROING)", F32, offset=64)
    small = torch.randint(0, 6, (64,), generator=g, dtype=I32)
    left, right = small.view(F32), small.flip(0).view(F32)
    case(f"vcmp_{name}", body, [left, right], torch.cat([op(left, right), op(small, 3)]).float())

# ---- merging ------------------------------------------------------------------------------------------------------

H32 = "vector_bool all = asc_create_mask_b32(PAT_ALL), h = asc_create_mask_b32(PAT_H);"


def half_of(new, old):
    return torch.where(torch.arange(new.numel()) < new.numel() // 2, new, old)


MERGING = {
    "vadds": (f"auto r = {ld('b', F32)}; ::vadds(r, {ld('a', F32)}, 2.0f, h, MODE_MERGING);", x32 + 2),
    "vmul": (f"auto r = {ld('b', F32)}; ::vmul(r, {ld('a', F32)}, {ld('a', F32)}, h, MODE_MERGING);", x32 * x32),
    "vabs": (f"auto r = {ld('b', F32)}; ::vabs(r, {ld('a', F32)}, h, MODE_MERGING);", x32.abs()),
    "vdup": (f"auto r = {ld('b', F32)}; ::vdup(r, 4.0f, h, MODE_MERGING);", torch.full((64,), 4.0)),
    "vdupv": (f"auto r = {ld('b', F32)}; ::vdup(r, {ld('a', F32)}, h, POS_LOWEST, MODE_MERGING);", x32[0].repeat(64)),
    "vdiv_wrapper": (
        f"auto r = {ld('b', F32)}; simd_inst::vdiv_0ulp_ftz_true(r, {ld('a', F32)}, {ld('c', F32)}, h, MODE_MERGING);",
        x32 / z32,
    ),
    "vaxpy": (f"auto r = {ld('b', F32)}; ::vaxpy(r, {ld('a', F32)}, 2.0f, h, MODE_MERGING);", x32 * 2 + y32),
}
for name, (body, new) in MERGING.items():
    case(f"merge_{name}", H32 + body + st("r", F32), [x32, y32, z32], half_of(new[:64], y32[:64]))
case(
    "merge_vcadd",
    H32 + f"auto r = {ld('b', F32)}; ::vcadd(r, {ld('a', F32)}, h, MODE_MERGING);" + st("r", F32),
    [torch.arange(64, dtype=F32), y32],
    torch.cat([torch.tensor([496.0]), y32[1:64]]),
)

# ---- conversions --------------------------------------------------------------------------------------------------

values = torch.tensor(
    [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.4, 0.6, -0.4, -0.6, 3.0, -3.0, 1e10, -1e10, math.nan, 0.0] * 4
)
TOP, BOTTOM = 2**31 - 1, -(2**31)
ROUNDED = {
    "R": [0, 2, 2, 0, -2, -2, 0, 1, 0, -1, 3, -3, TOP, BOTTOM, 0, 0],
    "A": [1, 2, 3, -1, -2, -3, 0, 1, 0, -1, 3, -3, TOP, BOTTOM, 0, 0],
    "F": [0, 1, 2, -1, -2, -3, 0, 0, -1, -1, 3, -3, TOP, BOTTOM, 0, 0],
    "C": [1, 2, 3, 0, -1, -2, 1, 1, 0, 0, 3, -3, TOP, BOTTOM, 0, 0],
    "Z": [0, 1, 2, 0, -1, -2, 0, 0, 0, 0, 3, -3, TOP, BOTTOM, 0, 0],
}
for mode, want in ROUNDED.items():
    body = ALL32 + st(f"simd_inst::vcvt<int32_t>({ld('a', F32)}, all, ROUND_{mode}, RS_ENABLE, MODE_ZEROING)", I32)
    case(f"round_{mode}", body, [values], torch.tensor(want * 4, dtype=I32))

halves = torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, 70000.0, -70000.0, 2**-25, math.inf] * 8)
HALF = {
    "ROUND_R, RS_DISABLE": [1.0, 1.0, 1 + 2**-9, 1.0, math.inf, -math.inf, 0.0, math.inf],
    "ROUND_R, RS_ENABLE": [1.0, 1.0, 1 + 2**-9, 1.0, 65504.0, -65504.0, 0.0, math.inf],
    "ROUND_A, RS_ENABLE": [1.0, 1 + 2**-10, 1 + 2**-9, 1.0, 65504.0, -65504.0, 2**-24, math.inf],
    "ROUND_Z, RS_ENABLE": [1.0, 1.0, 1 + 2**-10, 1.0, 65504.0, -65504.0, 0.0, math.inf],
    "ROUND_C, RS_ENABLE": [1.0, 1 + 2**-10, 1 + 2**-9, 1 + 2**-10, 65504.0, -65504.0, 2**-24, math.inf],
    "ROUND_O, RS_ENABLE": [1.0, 1 + 2**-10, 1 + 2**-10, 1 + 2**-10, 65504.0, -65504.0, 2**-24, math.inf],
}
for i, (controls, want) in enumerate(HALF.items()):
    body = ALL16 + st(f"simd_inst::vcvt<half>({ld('a', F32)}, all, {controls}, PART_ODD, MODE_ZEROING)", F16)
    expected = torch.stack([zeros(64, F16), torch.tensor(want * 8, dtype=F16)], 1).flatten()
    case(f"half_{i}", body, [halves], expected)
case(
    "f32_to_bf16",
    ALL16 + st(f"simd_inst::vcvt<bfloat16_t>({ld('a', F32)}, all, ROUND_R, RS_DISABLE, PART_EVEN, MODE_ZEROING)", BF16),
    [x32],
    torch.stack([x32[:64].to(BF16), zeros(64, BF16)], 1).flatten(),
)
for part in (0, 1):
    name = "ODD" if part else "EVEN"
    body = ALL16 + st(
        f"simd_inst::vcvt<float>({ld('a', BF16)}, all, PART_{name}, MODE_ZEROING)", F32, "asc_create_mask_b32(PAT_ALL)"
    )
    case(f"bf16_to_f32_{name}", body, [x16], x16[part:128:2].float())
eights = torch.cat(
    [
        x32[:50] * 100,
        torch.tensor(
            [448.0, 464.0, 465.0, 1e6, -1e6, math.inf, -math.inf, 2**-9, 2**-10, 0.0, -0.0, 240.0, 17.0, 19.0]
        ),
    ]
)
for part in range(4):
    spread = zeros(256, U8)
    spread[part::4] = eights.clamp(-448, 448).to(E4M3).view(U8)
    body = ALL8 + st(
        f"simd_inst::vcvt<float8_e4m3_t>({ld('a', F32)}, all, ROUND_R, RS_ENABLE, PART_P{part}, MODE_ZEROING)", E4M3
    )
    case(f"f32_to_e4m3_P{part}", body, [eights], spread)
    codes = torch.arange(256, dtype=I32).to(U8)
    body = ALL8 + st(
        f"simd_inst::vcvt<float>({ld('a', E4M3)}, all, PART_P{part}, MODE_ZEROING)", F32, "asc_create_mask_b32(PAT_ALL)"
    )
    case(f"e4m3_to_f32_P{part}", body, [codes], codes.view(E4M3).float()[part::4].clone())
case(  # without saturation e4m3 has only NaN beyond its range
    "f32_to_e4m3_unsaturated",
    ALL8 + st(f"simd_inst::vcvt<float8_e4m3_t>({ld('a', F32)}, all, ROUND_R, RS_DISABLE, PART_P0, MODE_ZEROING)", E4M3),
    [torch.tensor([464.0, 465.0, -1e6, math.nan] * 16)],
    torch.tensor([0x7E, 0, 0, 0, 0x7F, 0, 0, 0, 0xFF, 0, 0, 0, 0x7F, 0, 0, 0] * 16, dtype=U8),
)
case(
    "f32_to_e5m2",
    ALL8 + st(f"simd_inst::vcvt<float8_e5m2_t>({ld('a', F32)}, all, ROUND_R, RS_ENABLE, PART_P0, MODE_ZEROING)", E5M2),
    [eights],
    torch.stack([eights.clamp(-57344, 57344).to(E5M2).view(U8)] + [zeros(64, U8)] * 3, 1).flatten(),
)
fours = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6, 0.25, 0.75, 1.25, 2.5, 5, 7] * 8).to(BF16)
codes4 = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 15, 0, 2, 2, 4, 6, 7] * 8, dtype=U8)
packed = zeros(256, U8)
packed[2::4] = codes4[0::2] | codes4[1::2] << 4
case(
    "bf16_to_fp4",
    ALL8 + "auto r = simd_inst::vcvt<float4_e2m1x2_t>(" + ld("a", BF16) + ", all, ROUND_R, PART_P2, MODE_ZEROING);"
    "simd_inst::vsts_norm<float4_e2m1x2_t>(r, (__ubuf__ float4_e2m1x2_t*)o, 0, all);",
    [fours],
    packed,
)
decoded = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6, 0, 1, 1, 2, 4, 6] * 8).to(BF16)
case(
    "fp4_to_bf16",
    ALL8
    + "auto r = simd_inst::vlds_norm<float4_e2m1x2_t>((__ubuf__ float4_e2m1x2_t*)a, 0);"
    + st("simd_inst::vcvt<bfloat16_t>(r, all, PART_P2, MODE_ZEROING)", BF16, "asc_create_mask_b16(PAT_ALL)"),
    [packed],
    decoded,
)
case(
    "s32_to_f32",
    ALL32
    + st(f"simd_inst::vcvt<float>({ld('a', I32)}, all, ROUND_R, MODE_ZEROING)", F32)
    + st(f"simd_inst::vcvt<float>({ld('b', I32)}, all, ROUND_Z, MODE_ZEROING)", F32, offset=64),
    [i32, torch.full((64,), 2**24 + 3, dtype=I32)],
    torch.cat([i32[:64].float(), torch.full((64,), 2.0**24 + 2)]),
)
case(
    "integer_narrowing",
    ALL16
    + st(f"simd_inst::vcvt<int16_t>({ld('a', I32)}, all, RS_ENABLE, PART_EVEN, MODE_ZEROING)", I16)
    + st(f"simd_inst::vcvt<int16_t>({ld('a', I32)}, all, RS_DISABLE, PART_EVEN, MODE_ZEROING)", I16, offset=128)
    + st(
        f"simd_inst::vcvt<uint8_t>({ld('a', I32)}, asc_create_mask_b8(PAT_ALL), RS_ENABLE, PART_P1, MODE_ZEROING)",
        U8,
        "asc_create_mask_b8(PAT_ALL)",
        offset=512,
    ),
    [torch.tensor([70000, -70000, 5, -5] * 16, dtype=I32)],
    torch.cat(
        [
            torch.tensor([32767, 0, -32768, 0, 5, 0, -5, 0] * 16, dtype=I16),
            torch.tensor([4464, 0, -4464, 0, 5, 0, -5, 0] * 16, dtype=I16),
            torch.tensor([0, 255, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0] * 16, dtype=U8).view(I16),
        ]
    ),
)
case(
    "integer_widening",
    ALL8
    + st(f"simd_inst::vcvt<uint16_t>({ld('a', U8)}, all, PART_ODD, MODE_ZEROING)", torch.uint16)
    + st(f"simd_inst::vcvt<int32_t>({ld('a', I8)}, all, PART_P3, MODE_ZEROING)", I32, offset=64)
    + st(
        f"simd_inst::vcvt<float>({ld('b', I16)}, asc_create_mask_b16(PAT_ALL), PART_ODD, MODE_ZEROING)", F32, offset=128
    ),
    [u8, i32],
    torch.cat([u8[1:256:2].to(I16), u8[3:256:4].view(I8).to(I32).view(I16), i32.view(I16)[1:128:2].float().view(I16)]),
)
case(
    "f32_to_s16",
    ALL16 + st(f"simd_inst::vcvt<int16_t>({ld('a', F32)}, all, ROUND_Z, RS_ENABLE, PART_EVEN, MODE_ZEROING)", I16),
    [torch.tensor([1.9, -1.9, 1e6, -1e6] * 16)],
    torch.tensor([1, 0, -1, 0, 32767, 0, -32768, 0] * 16, dtype=I16),
)
case(
    "vcvt_merging",
    ALL16
    + f"auto r = {ld('b', BF16)}; ::vcvt(r, {ld('a', F32)}, all, ROUND_R, RS_DISABLE, PART_ODD, MODE_MERGING);"
    + st("r", BF16),
    [x32, x16],
    torch.stack([x16[0:128:2], x32[:64].to(BF16)], 1).flatten(),
)

# ---- reductions and permutations ----------------------------------------------------------------------------------

whole = torch.randint(-100, 100, (64,), generator=g).float()
case(
    "vcadd",
    H32 + st(f"simd_inst::vcadd({ld('a', F32)}, h, MODE_ZEROING)", F32),
    [whole],
    torch.cat([whole[:32].sum().reshape(1), zeros(63)]),
)
case(  # 16-bit integers are summed in 32 bits
    "vcadd_s16",
    "vector_bool all = asc_create_mask_b16(PAT_ALL), all32 = asc_create_mask_b32(PAT_ALL);"
    + st(f"simd_inst::vcadd({ld('a', I16)}, all, MODE_ZEROING)", I32, "all32"),
    [torch.full((128,), 30000, dtype=I16)],
    torch.cat([torch.tensor([3840000], dtype=I32), zeros(63, I32)]),
)
best = x32[:64]
for op, pick in (("vcmax", best.argmax()), ("vcmin", best.argmin())):
    want = torch.cat([best[pick].reshape(1), torch.tensor([int(pick)], dtype=I32).view(F32), zeros(62)])
    case(op, ALL32 + st(f"simd_inst::{op}({ld('a', F32)}, all, MODE_ZEROING)", F32), [x32], want)
blocks = whole.reshape(8, 8)
for op, want in (("vcgadd", blocks.sum(1)), ("vcgmax", blocks.amax(1)), ("vcgmin", blocks.amin(1))):
    body = ALL32 + st(f"simd_inst::{op}({ld('a', F32)}, all, MODE_ZEROING)", F32)
    case(op, body, [whole], torch.cat([want, zeros(56)]))
case(
    "vcgmax_masked",
    "vector_bool all = asc_create_mask_b32(PAT_ALL), m = asc_create_mask_b32(PAT_VL16);"
    + st(f"simd_inst::vcgmax({ld('a', F32)}, m, MODE_ZEROING)", F32),
    [whole],
    torch.cat([blocks[:2].amax(1), torch.full((6,), -math.inf), zeros(56)]),
)
case(
    "vcpadd",
    ALL32 + st(f"simd_inst::vcpadd({ld('a', F32)}, all, MODE_ZEROING)", F32),
    [whole],
    torch.cat([whole[0::2] + whole[1::2], zeros(32)]),
)
case(
    "vintlv_vdintlv",
    ALL32
    + f"auto r = simd_inst::vintlv({ld('a', F32)}, {ld('b', F32)}); auto s = simd_inst::vdintlv({ld('a', F32)}, {ld('b', F32)});"
    + st("r.v0", F32)
    + st("r.v1", F32, offset=64)
    + st("s.v0", F32, offset=128)
    + st("s.v1", F32, offset=192),
    [x32[:64], y32[:64]],
    torch.cat(
        [torch.stack([x32[:64], y32[:64]], 1).flatten(), torch.cat([x32[:64], y32[:64]]).reshape(64, 2).t().flatten()]
    ),
)
order = torch.randperm(64, generator=g).to(I32)
case(
    "vselr",
    ALL32 + st(f"simd_inst::vselr({ld('a', I32)}, {ld('b', torch.uint32)})", I32),
    [i32, order],
    i32[:64][order.long()],
)
case(
    "vpack_vunpack",
    ALL16
    + f"auto r = simd_inst::vpack<uint16_t>({ld('a', torch.uint32)}, HIGHER); auto s = simd_inst::vunpack({ld('a', I16)}, HIGHER);"
    + st("r", torch.uint16)
    + st("s", I32, "asc_create_mask_b32(PAT_ALL)", offset=64),
    [i32],
    torch.cat([zeros(64, I16), i32[:64].to(I16), i32.view(I16)[64:128].to(I32).view(I16)]),
)
positive = x32[:64][p32]
case(
    "vsqz_vusqz",
    ALL32
    + f"auto p = simd_inst::vcmps_gt({ld('a', F32)}, 0.0f, all);"
    + st(f"simd_inst::vsqz({ld('a', F32)}, p, MODE_STORED)", F32)
    + st("simd_inst::vusqz<int32_t>(p)", I32, offset=64),
    [x32],
    torch.cat([positive, zeros(64 - len(positive)), (p32.cumsum(0) - p32.long()).to(I32).view(F32)]),
)
case(
    "vgather2_vscatter",
    ALL32
    + f"auto r = simd_inst::vgather2((__ubuf__ float*)a, {ld('b', torch.uint32)}, all); simd_inst::vscatter<float>(r, (__ubuf__ float*)o, {ld('b', torch.uint32)}, all);",
    [x32, order],
    x32[:64],
)
case(  # bytes widen to 16 bits
    "vgather2_u8",
    ALL16 + st(f"simd_inst::vgather2((__ubuf__ uint8_t*)a, {ld('b', torch.uint16)}, all)", torch.uint16),
    [u8, torch.arange(127, -1, -1).to(I16)],
    u8[:128].flip(0).to(I16),
)
case(
    "vgatherb",
    ALL32 + st(f"simd_inst::vgatherb<float>((__ubuf__ float*)a, {ld('b', torch.uint32)})", F32),
    [x32, torch.tensor([96, 0, 64, 32, 480, 448, 224, 160], dtype=I32)],
    x32.reshape(16, 8)[[3, 0, 2, 1, 15, 14, 7, 5]].flatten(),
)
case(
    "vdupv",
    ALL32
    + st(f"simd_inst::vdupv({ld('a', F32)}, all, POS_LOWEST, MODE_ZEROING)", F32)
    + st(f"simd_inst::vdupv({ld('a', F32)}, all, POS_HIGHEST, MODE_ZEROING)", F32, offset=64),
    [x32],
    torch.cat([x32[0].repeat(64), x32[63].repeat(64)]),
)
counts = torch.bincount(u8[:256].long(), minlength=256)
case(
    "histograms",
    "vector_bool all = asc_create_mask_b8(PAT_ALL), all16 = asc_create_mask_b16(PAT_ALL);"
    "vector_u16 z = simd_inst::vdup<uint16_t>(0, all16, MODE_ZEROING); vector_u16 d0 = z, d1 = z, c0 = z, c1 = z;"
    f"simd_inst::dhistv2(&d0, {ld('a', U8)}, all, Bin_N0); simd_inst::dhistv2(&d1, {ld('a', U8)}, all, Bin_N1);"
    f"simd_inst::chistv2(&c0, {ld('a', U8)}, all, Bin_N0); simd_inst::chistv2(&c1, {ld('a', U8)}, all, Bin_N1);"
    + "".join(st(v, torch.uint16, "all16", offset=128 * i) for i, v in enumerate(("d0", "d1", "c0", "c1"))),
    [u8],
    torch.cat([counts, counts.cumsum(0)]).to(I16),
)


@pytest.fixture(scope="module")
def program(kit):
    return kit.build([kit.vector_kernel(c.name, c.body) for c in CASES])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_intrinsic(kit, program, case):
    out = kit.run_vector(program, case.name, case.inputs, case.before)
    expected = case.expected.contiguous()
    got = out[: expected.numel() * expected.element_size()].view(expected.dtype)
    if expected.is_floating_point() and expected.element_size() > 1:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        finite = ~expected.isnan()
        assert torch.equal(torch.signbit(got)[finite], torch.signbit(expected)[finite])
    else:
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
