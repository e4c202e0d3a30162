# ruff: noqa: E501  (lines of AscendC)
"""DMA, flags, cores and the matrix unit, with hand-written kernels."""

from __future__ import annotations

import pytest
import torch

from tk_ascend import emulator

HEADER = 'extern "C" __global__'
WAIT = "static_cast<event_t>(0)"
CACHE = "static_cast<asc_load_l2_cache_mode>(0)"
STORE = "static_cast<asc_store_l2_cache_mode>(0)"


def vector(name, body, parameters="__gm__ float* x, __gm__ float* y"):
    return f"{HEADER} __vector__ void {name}({parameters}) {{\n  asc_init();\n  {body}\n}}\n"


def cube(name, body, parameters):
    return f"{HEADER} __cube__ void {name}({parameters}) {{\n  asc_init();\n  {body}\n}}\n"


def mixed(name, matrix, vectors, parameters="__gm__ float* x, __gm__ float* y", helpers=""):
    return (
        f"{helpers}{HEADER} __mix__(1, 2) void {name}({parameters}) {{\n  asc_init();\n"
        f"  __ubuf__ float *u = (__ubuf__ float *)0;\n"
        f"  if ASC_IS_AIC {{\n    {matrix}\n  }}\n  if ASC_IS_AIV {{\n    {vectors}\n  }}\n}}\n"
    )


def kernels(kit):
    ub = "__ubuf__ float *u = (__ubuf__ float *)0;"
    through = kit.flag("MTE2", "MTE3")
    out = kit.store("y", "u")
    yield vector(
        "pad",  # rows of 5 elements, 8 apart in GM; 2 left, 1 right filled with the pad value
        f"{ub} float p = 7.0f; asc_set_copy_pad_val(*reinterpret_cast<uint32_t*>(&p));"
        f"asc_copy_gm2ub_align((__ubuf__ uint32_t*)u, (__gm__ uint32_t*)x, 4, 20, 2, 1, 1, {CACHE}, 32, 64);"
        f"{through} asc_copy_ub2gm_align((__gm__ uint8_t*)y, (__ubuf__ uint8_t*)u, 4, 32, {STORE}, 32, 64);",
    )
    yield vector(
        "compact",  # rows of 12 bytes packed in UB
        f"{ub} asc_copy_gm2ub_align((__ubuf__ uint8_t*)u, (__gm__ uint8_t*)x, 4, 12, 0, 0, 0, {CACHE}, 32, 12);"
        f"{through} asc_copy_ub2gm_align((__gm__ uint8_t*)y, (__ubuf__ uint8_t*)u, 1, 48, {STORE}, 48, 48);",
    )
    yield vector(
        "strided_store",
        f"{ub} {kit.load('u', 'x')} {through}"
        f"asc_copy_ub2gm_align((__gm__ uint8_t*)y, (__ubuf__ uint8_t*)u, 4, 12, {STORE}, 40, 32);",
    )
    for op in ("add", "max", "min"):
        yield vector(
            f"atomic_{op}",
            f"{ub} {kit.load('u', 'x + 256 * block_idx')} {through} asc_set_atomic_{op}_float(); {out} asc_set_atomic_none();",
        )
    yield vector(
        "atomic_half",
        f"{ub} {kit.load('u', 'x')} {through} asc_set_atomic_add_float16(); {out} asc_set_atomic_none();",
    )
    yield vector(
        "scalar_memory",
        "float v = tl::read_gm_bypass_dcache((__gm__ float*)x + block_idx);"
        "tl::write_gm_bypass_dcache((__gm__ float*)y + block_idx, 2.0f * v);",
    )
    yield vector(
        "all_blocks",  # every block reads what the next one wrote, after a barrier of all
        f"{ub} {kit.load('u', 'x + 256 * block_idx')} {through} {kit.store('y + 256 * block_idx', 'u')}"
        f"asc_sync_inter_arrive(PIPE_MTE3, 3); asc_sync_inter_wait(PIPE_MTE2, 3); {kit.flag('MTE3', 'MTE2')}"
        f"{kit.load('u', 'y + 256 * ((block_idx + 1) % block_num)')} {through}"
        f"asc_sync_inter_arrive(PIPE_MTE2, 4); asc_sync_inter_wait(PIPE_MTE3, 4); {kit.store('y + 256 * block_idx', 'u')}",
    )
    yield vector(
        "locks",  # two halves of UB, handed over by buffer locks instead of events
        f"{ub} for (int i = 0; i < 4; ++i) {{ int s = i & 1; asc_lock(PIPE_MTE2, s, ASC_LOCK_BLOCK);"
        f"{kit.load('u + 256 * s', 'x + 256 * i')} asc_unlock(PIPE_MTE2, s, ASC_LOCK_BLOCK);"
        f"asc_lock(PIPE_MTE3, s, ASC_LOCK_BLOCK); {kit.store('y + 256 * i', 'u + 256 * s')}"
        "asc_unlock(PIPE_MTE3, s, ASC_LOCK_BLOCK); }",
    )
    yield vector(
        "barrier_of_pipes",
        f"{ub} {kit.load('u', 'x')} asc_sync(); {kit.store('y', 'u')} asc_sync();"
        f"{kit.load('u', 'x + 256')} asc_sync(); {kit.store('y + 256', 'u')}",
    )
    yield mixed(
        "sub_blocks",  # both vector cores write, meet, and read the other's half
        ";",
        f"int s = asc_get_sub_block_id(); {kit.load('u', 'x + 256 * s')} {through} {kit.store('y + 256 * s', 'u')}"
        f"asc_sync_subblock_arrive(PIPE_MTE3, 1); asc_sync_subblock_wait(PIPE_MTE2, 1); {kit.flag('MTE3', 'MTE2')}"
        f"{kit.load('u', 'y + 256 * (1 - s)')} {through} {kit.store('y + 512 + 256 * s', 'u')}",
    )
    yield mixed(
        "block_flags",  # the cube core waits for both vector cores, then they for it
        "asc_sync_block_wait(PIPE_MTE2, 2); asc_sync_block_arrive(PIPE_MTE2, 3);",
        f"int s = asc_get_sub_block_id(); {kit.load('u', 'x + 256 * s')} {through} {kit.store('y + 256 * s', 'u')}"
        f"asc_sync_block_arrive(PIPE_MTE3, 2); asc_sync_block_wait(PIPE_MTE2, 3); {kit.flag('MTE3', 'MTE2')}"
        f"{kit.load('u', 'y + 256 * (1 - s)')} {through} {kit.store('y + 512 + 256 * s', 'u')}",
    )


@pytest.fixture(scope="module")
def program(kit):
    return kit.build(list(kernels(kit)))


@pytest.fixture
def x():
    return torch.randn(2048, generator=torch.Generator().manual_seed(5))


def run(program, name, x, y, **options):
    for mode in ("checked", "adversarial", "fast"):
        result = y.clone()
        emulator.run(program, x, result, kernel=name, mode=mode, **options)
        yield result


def test_padded_rows(program, x):
    rows = x[:32].reshape(4, 8)[:, :5]
    want = torch.cat([torch.full((4, 2), 7.0), rows, torch.full((4, 1), 7.0)], 1)
    for y in run(program, "pad", x, torch.zeros(32)):
        assert torch.equal(y.reshape(4, 8), want)


def test_compact_rows(program, x):
    for y in run(program, "compact", x, torch.zeros(12)):
        assert torch.equal(y, x[:32].reshape(4, 8)[:, :3].flatten())


def test_strided_store_leaves_the_gaps(program, x):
    want = torch.zeros(4, 10)
    want[:, :3] = x[:32].reshape(4, 8)[:, :3]
    for y in run(program, "strided_store", x, torch.zeros(40)):
        assert torch.equal(y, want.flatten())


def test_atomic_stores(program, x):
    rows = x[:1024].reshape(4, 256)
    y0 = torch.randn(256)
    added = y0
    for row in rows:
        added = added + row
    for y in run(program, "atomic_add", x, y0, blocks=4):
        torch.testing.assert_close(y, added, rtol=0, atol=1e-5)
    for y in run(program, "atomic_max", x, y0, blocks=4):
        assert torch.equal(y, torch.maximum(y0, rows.amax(0)))
    for y in run(program, "atomic_min", x, y0, blocks=4):
        assert torch.equal(y, torch.minimum(y0, rows.amin(0)))
    h, k = x[:512].half(), x[512:1024].half()
    for y in run(program, "atomic_half", h.view(torch.float32), k.view(torch.float32)):
        assert torch.equal(y.view(torch.float16), h + k)


def test_scalar_access_to_global_memory(program, x):
    for y in run(program, "scalar_memory", x, torch.zeros(8), blocks=8):
        assert torch.equal(y, 2 * x[:8])


def test_blocks_wait_for_each_other(program, x):
    want = x[:1024].reshape(4, 256).roll(-1, 0).flatten()
    for y in run(program, "all_blocks", x, torch.zeros(1024), blocks=4):
        assert torch.equal(y, want)


@pytest.mark.parametrize(("name", "count"), [("locks", 1024), ("barrier_of_pipes", 512)])
def test_locks_and_barriers(program, x, name, count):
    for y in run(program, name, x, torch.zeros(count)):
        assert torch.equal(y, x[:count])


@pytest.mark.parametrize("name", ["sub_blocks", "block_flags"])
def test_cores_of_a_block(program, x, name):
    want = torch.cat([x[:512], x[256:512], x[:256]])
    for y in run(program, name, x, torch.zeros(1024)):
        assert torch.equal(y, want)


def test_views_and_shared_storage(program, x):
    data = x[:1024].clone()
    emulator.run(program, data[:512], data[512:], kernel="barrier_of_pipes")
    assert torch.equal(data, torch.cat([x[:512], x[:512]]))


# ---- the matrix unit ----------------------------------------------------------------------------------------------

TYPES = {
    "bfloat16_t": (torch.bfloat16, 16),
    "half": (torch.float16, 16),
    "float": (torch.float32, 8),
    "float8_e4m3_t": (torch.float8_e4m3fn, 32),
    "float8_e5m2_t": (torch.float8_e5m2, 32),
    "int8_t": (torch.int8, 32),
}
M, K, NC = 32, 64, 48


def event(source, to, number=0):
    return (
        f"asc_sync_notify(PIPE_{source}, PIPE_{to}, static_cast<event_t>({number}));"
        f"asc_sync_wait(PIPE_{source}, PIPE_{to}, static_cast<event_t>({number}));"
    )


def gm_to_l1(kind, to, source, rows, columns, pitch, transposed=False):
    name, stride = ("dn2nz", rows) if transposed else ("nd2nz", columns)
    return (
        f"asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>({pitch}), 0);"
        f"asc_copy_gm2l1_{name}((__cbuf__ {kind}*){to}, {source}, {stride} * sizeof({kind}), {CACHE}, {rows}, {columns}, 0, 0);"
    )


def drain(to="y", conversion=0, relu=0):
    return (
        f"asc_set_l0c_copy_nz_para(1, 0, 0); asc_copy_l0c2gm({to}, l0c, {NC}, {M}, {NC}, {M}, {STORE},"
        f"static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>({conversion}),"
        f"static_cast<asc_relu_pre_mode>({relu}), 0, 1, 0, 0);"
    )


def matmul_body(kind, accumulator, right="plain", conversion=0, relu=0, fill=False):
    """Left (M, K) times right (NC, K), or (K, NC) when it is transposed on the way."""
    c0 = TYPES[kind][1]
    frac_m, frac_n, groups = M // 16, NC // 16, K // c0
    body = f"__cc__ {accumulator} *l0c = (__cc__ {accumulator} *)0; __ca__ {kind} *l0a = (__ca__ {kind} *)0;"
    body += f"__cb__ {kind} *l0b = (__cb__ {kind} *)0;" + gm_to_l1(kind, 0, "a", M, K, M)
    if right == "plain":
        body += gm_to_l1(kind, 32768, "b", NC, K, NC)
        copy_b = f"asc_copy_l12l0b(l0b, (__cbuf__ {kind}*)32768, 0, 0, {frac_n}, {groups}, {frac_n}, {frac_n});"
    elif right == "dn2nz":
        body += gm_to_l1(kind, 32768, "b", NC, K, NC, transposed=True)
        copy_b = f"asc_copy_l12l0b(l0b, (__cbuf__ {kind}*)32768, 0, 0, {frac_n}, {groups}, {frac_n}, {frac_n});"
    else:  # K rows of NC in L1, transposed on the way to L0B
        body += gm_to_l1(kind, 32768, "b", K, NC, K)
        copy_b = f"asc_copy_l12l0b_transpose(l0b, (__cbuf__ {kind}*)32768, 0, 0, {K // 16}, {NC // c0}, {K // 16}, {frac_n});"
    body += event("MTE2", "MTE1")
    body += f"asc_copy_l12l0a(l0a, (__cbuf__ {kind}*)0, 0, 0, {frac_m}, {groups}, {frac_m}, {frac_m});" + copy_b
    body += event("MTE1", "M") + f"asc_mmad(l0c, l0a, l0b, {M}, {K}, {NC}, 0, true, false, true);"
    body += f"asc_mmad(l0c, l0a, l0b, {M}, {K}, {NC}, 0, true, false, false);"  # once more, on top
    return body + event("M", "FIX") + drain(conversion=conversion, relu=relu)


def cube_kernels():
    for kind in TYPES:
        accumulator = "int32_t" if kind == "int8_t" else "float"
        parameters = f"__gm__ {kind}* a, __gm__ {kind}* b, __gm__ {accumulator}* y"
        yield cube(f"mm_{kind}", matmul_body(kind, accumulator), parameters)
        yield cube(f"mm_dn_{kind}", matmul_body(kind, accumulator, "dn2nz"), parameters)
    for kind in ("bfloat16_t", "half"):
        parameters = f"__gm__ {kind}* a, __gm__ {kind}* b, __gm__ float* y"
        yield cube(f"mm_t_{kind}", matmul_body(kind, "float", "transpose"), parameters)
    parameters = "__gm__ bfloat16_t* a, __gm__ bfloat16_t* b, __gm__ {}* y"
    yield cube("to_bf16_relu", matmul_body("bfloat16_t", "float", "plain", 16, 1), parameters.format("bfloat16_t"))
    yield cube("to_half", matmul_body("bfloat16_t", "float", "plain", 1), parameters.format("half"))
    yield cube(
        "scaled",  # MXFP8: one E8M0 scale for 32 elements, pairs of them in rows of 16
        "__cc__ float *l0c = (__cc__ float *)0; __ca__ float8_e4m3_t *l0a = (__ca__ float8_e4m3_t *)0;"
        "__cb__ float8_e4m3_t *l0b = (__cb__ float8_e4m3_t *)0;"
        + gm_to_l1("float8_e4m3_t", 0, "a", M, K, M)
        + gm_to_l1("float8_e4m3_t", 32768, "b", NC, K, NC)
        + gm_to_l1("uint16_t", 65536, "sa", 1, M, 1)
        + gm_to_l1("uint16_t", 66560, "sb", 1, NC, 1)
        + event("MTE2", "MTE1")
        + f"asc_copy_l12l0a(l0a, (__cbuf__ float8_e4m3_t*)0, 0, 0, {M // 16}, 2, {M // 16}, {M // 16});"
        f"asc_copy_l12l0b(l0b, (__cbuf__ float8_e4m3_t*)32768, 0, 0, {NC // 16}, 2, {NC // 16}, {NC // 16});"
        f"asc_copy_l12l0a_mx(0, (__cbuf__ fp8_e8m0_t*)65536, 0, 0, {M // 16}, 1, 1, 1);"
        f"asc_copy_l12l0b_mx(0, (__cbuf__ fp8_e8m0_t*)66560, 0, 0, {NC // 16}, 1, 1, 1);"
        + event("MTE1", "M")
        + f"asc_mmad_mx(l0c, l0a, l0b, {M}, {K}, {NC}, 0, true, false, true);"
        + event("M", "FIX")
        + drain(),
        "__gm__ float8_e4m3_t* a, __gm__ float8_e4m3_t* b, __gm__ uint16_t* sa, __gm__ uint16_t* sb, __gm__ float* y",
    )


@pytest.fixture(scope="module")
def cube_program(kit):
    return kit.build(list(cube_kernels()))


def operands(dtype):
    g = torch.Generator().manual_seed(6)
    a, b = (torch.randint(-4, 5, shape, generator=g).float() for shape in ((M, K), (NC, K)))
    return a, b, a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("kind", TYPES)
def test_matrix_products(cube_program, kind):
    a, b, left, right = operands(TYPES[kind][0])
    want = 2 * a @ b.t()
    y = torch.zeros(M, NC, dtype=torch.int32 if kind == "int8_t" else torch.float32)
    emulator.run(cube_program, left, right, y, kernel=f"mm_{kind}")
    assert torch.equal(y.float(), want)
    y.zero_()
    emulator.run(cube_program, left, right.float().t().contiguous().to(right.dtype), y, kernel=f"mm_dn_{kind}")
    assert torch.equal(y.float(), want)
    if f"mm_t_{kind}" in [k.name for k in cube_program.kernels]:
        y.zero_()
        emulator.run(cube_program, left, right.t().contiguous(), y, kernel=f"mm_t_{kind}", mode="adversarial", seed=1)
        assert torch.equal(y.float(), want)


def test_conversions_out_of_the_accumulator(cube_program):
    a, b, left, right = operands(torch.bfloat16)
    want = 2 * a @ b.t()
    y = torch.zeros(M, NC, dtype=torch.bfloat16)
    emulator.run(cube_program, left, right, y, kernel="to_bf16_relu")
    assert torch.equal(y, want.relu().bfloat16())
    y = torch.zeros(M, NC, dtype=torch.float16)
    emulator.run(cube_program, left, right, y, kernel="to_half")
    assert torch.equal(y, want.half())


def test_block_scaled_products(cube_program):
    a, b, left, right = operands(torch.float8_e4m3fn)
    g = torch.Generator().manual_seed(7)
    exponents = [torch.randint(-3, 4, (rows, 2), generator=g) for rows in (M, NC)]
    scales = [(e + 127).to(torch.uint8) for e in exponents]
    packed = [s.contiguous().view(torch.uint16).flatten() for s in scales]
    y = torch.zeros(M, NC)
    emulator.run(cube_program, left, right, *packed, y, kernel="scaled")
    sa, sb = (torch.exp2(e.float()).repeat_interleave(32, 1) for e in exponents)
    assert torch.equal(y, (a * sa) @ (b * sb).t())
