# ruff: noqa: E501  (lines of AscendC)
"""SIMT regions: barriers, warp operations, atomics, short vectors, scalar functions and random numbers."""

from __future__ import annotations

import pytest
import torch

from tk_ascend import emulator

N = 256  # threads and 4-byte elements of every kernel here


def simt_kernel(kit, name, body, threads="256"):
    """A kernel whose threads see ``float *x`` (input) and ``float *y`` (output) in UB, N elements each, and GM ``g``."""
    return f"""
__simt_vf__ __launch_bounds__({N}) inline void {name}_simt(__ubuf__ float* x, __ubuf__ float* y, __gm__ float* g) {{
  int t = (int32_t)threadIdx.x;
  {body}
}}
extern "C" __global__ __vector__ void {name}(__gm__ float* xg, __gm__ float* yg, __gm__ float* g) {{
  asc_init();
  __ubuf__ float *x = (__ubuf__ float *)0;
  __ubuf__ float *y = (__ubuf__ float *)1024;
  {kit.load("x", "xg")}
  {kit.load("y", "yg + 256 * block_idx")}
  {kit.flag("MTE2", "V")}
  asc_vf_call<{name}_simt>(cce::dim3({threads}), x, y, g);
  {kit.flag("V", "MTE3")}
  {kit.store("yg + 256 * block_idx", "y")}
}}
"""


BODIES = {
    # Every thread writes, then reads what another one wrote.
    "barrier": "y[t] = x[t]; asc_syncthreads(); float v = y[255 - t]; asc_syncthreads(); y[t] = v;",
    "shuffles": (
        "y[t] = t < 64 ? asc_shfl_xor(x[t], 5) : t < 128 ? asc_shfl(x[t], 3)"
        " : t < 192 ? asc_shfl_up(x[t], 2) : asc_shfl_down(x[t], 2);"
    ),
    # Lanes of one warp that take different branches meet their own kind only.
    "divergent_ballot": "((__ubuf__ uint32_t*)y)[t] = t % 2 ? asc_ballot(t % 3 == 0) : asc_activemask();",
    "warp_reduce": (
        "float s = asc_reduce_add(x[t]), h = asc_reduce_max(x[t]), l = asc_reduce_min(x[t]);"
        "y[t] = t % 3 == 0 ? s : t % 3 == 1 ? h : l;"
    ),
    "partial_reduce": "y[t] = -1; if (t % 4 == 1) y[t] = asc_reduce_add(x[t]);",
    "block_reduce": "__ubuf__ float *red = y + 256; y[t] = tl::AscendAllReduce<tl::SumOp, 256>::run(x[t], red);",
    "strided_reduce": "__ubuf__ float *red = y + 256; y[t] = tl::AscendAllReduce<tl::MaxOp, 256, 8>::run(x[t], red);",
    "group_reduce": "y[t] = tl::AscendAllReduce<tl::SumOp, 16>::run(x[t]);",
    "butterfly": "y[t] = tl::AscendAllReduce<tl::SumOp, 8, 2>::run(x[t]);",
    "ub_atomics": (
        "if (t < 3) y[t] = 0; asc_syncthreads(); asc_atomic_add(&y[0], 1.0f); asc_atomic_max((__ubuf__ int32_t*)&y[1], t);"
        "asc_syncthreads(); if (t == 0) y[1] = (float)*(__ubuf__ int32_t*)&y[1];"
    ),
    "gm_atomics": "asc_atomic_add(&g[t % 4], 1.0f); asc_atomic_min((__gm__ int32_t*)&g[4], t - 100); y[t] = x[t];",
    "return_values": "y[t] = asc_atomic_add(&y[255], 1.0f); asc_syncthreads();",
    "short_vectors": (
        "if (t < 128) { float2 v = *(__ubuf__ float2*)(x + 2 * t); float2 w = make_float2(2.0f, 3.0f);"
        "*(__ubuf__ float2*)(y + 2 * t) = (v * w + w) / w - v; }"
    ),
    "integer_vectors": (
        "if (t < 64) { int4 v = ((__ubuf__ int4*)x)[t]; int4 k = make_int4(1, 2, 3, 4);"
        "((__ubuf__ int4*)y)[t] = ((v & make_int4(255, 255, 255, 255)) << k) + (v >> k) - (v | k) * k; }"
    ),
    "packed_halves": (
        "if (t < 128) { uint1 u; (reinterpret_cast<bfloat16x2_t*>(&u))[0] ="
        "__float22bfloat162_rn(*(__ubuf__ float2*)(x + 2 * t)); ((__ubuf__ uint1*)y)[t] = u; }"
    ),
    "fp8": (
        "((__ubuf__ uint8_t*)y)[t] = tl::float_e4m3_t(x[t] * 300).data;"
        "((__ubuf__ uint8_t*)y)[256 + t] = tl::float_e5m2_t(x[t]).data;"
        "((__ubuf__ half*)y)[256 + t] = (half)(float)tl::float_e4m3_t::from_bits((uint8_t)t);"
    ),
    "functions": (
        "float v = fabsf(x[t]) + 0.5f; switch (t % 8) {"
        "case 0: y[t] = expf(x[t]); break; case 1: y[t] = logf(v); break; case 2: y[t] = rsqrtf(v); break;"
        "case 3: y[t] = tanhf(x[t]); break; case 4: y[t] = log1pf(v); break; case 5: y[t] = exp2f(x[t]); break;"
        "case 6: y[t] = max(x[t], 0.25f); break; default: y[t] = sinf(x[t]); }"
    ),
    "philox": (
        "tl::AscendPhiloxState s; tl::philox_init(&s, 0x1234567890abcdefLL, 5 + t, 8);"
        "for (int i = 0; i < 1; ++i) ((__ubuf__ uint32_t*)y)[t] = tl::philox_rand(&s);"
    ),
    "uniform": (
        "tl::AscendPhiloxState s; tl::philox_init(&s, 7, t, 0); float2 u = tl::philox_rand_uniform2(&s);"
        "y[t] = 0.0f <= u.x && u.x <= 1.0f && u.x != u.y ? 1.0f : 0.0f;"
    ),
    "sync_warp": (
        "y[t] = x[t]; cooperative_groups::coalesced_threads().sync(); float v = y[t ^ 1];"
        "cooperative_groups::coalesced_threads().sync(); y[t] = v;"
    ),
}


@pytest.fixture(scope="module")
def program(kit):
    kernels = [simt_kernel(kit, name, body) for name, body in BODIES.items()]
    kernels.append(
        simt_kernel(
            kit, "three_dimensions", "int i = t + 8 * threadIdx.y + 32 * threadIdx.z; y[i] = 100 * t + i;", "8, 4, 2"
        )
    )
    kernels.append(simt_kernel(kit, "asserted", "device_assert(t != 7); y[t] = x[t];"))
    return kit.build(kernels)


@pytest.fixture
def x():
    return torch.randn(N, generator=torch.Generator().manual_seed(2))


def run(program, name, x, **options):
    y, g = torch.zeros(N * options.get("blocks", 1)), torch.zeros(8)
    emulator.run(program, x, y, g, kernel=name, **options)
    return y, g


def test_barrier(program, x):
    for seed in range(3):
        assert torch.equal(run(program, "barrier", x, mode="adversarial", seed=seed)[0], x.flip(0))
    assert torch.equal(run(program, "barrier", x)[0], x.flip(0))


def test_shuffles(program, x):
    lane = torch.arange(32)
    w = x.reshape(8, 32)
    up = torch.where(lane < 2, w, w[:, (lane - 2) % 32])
    down = torch.where(lane > 29, w, w[:, (lane + 2) % 32])
    want = torch.cat([w[:2, lane ^ 5], w[2:4, 3:4].expand(2, 32), up[4:6], down[6:]])
    assert torch.equal(run(program, "shuffles", x)[0], want.flatten())


def test_divergent_lanes_meet_at_their_own_site(program, x):
    votes = run(program, "divergent_ballot", x)[0].view(torch.int32).reshape(8, 32)
    for warp in range(8):
        odd = sum(1 << i for i in range(1, 32, 2) if (32 * warp + i) % 3 == 0)
        want = [odd if i % 2 else 0x55555555 for i in range(32)]
        assert [v & 0xFFFFFFFF for v in votes[warp].tolist()] == want


def test_warp_reductions(program):
    x = torch.randint(-50, 50, (N,), generator=torch.Generator().manual_seed(3)).float()
    w = x.reshape(8, 32)
    index = torch.arange(N)
    reduced = [v.repeat_interleave(32) for v in (w.sum(1), w.amax(1), w.amin(1))]
    want = torch.where(index % 3 == 0, reduced[0], torch.where(index % 3 == 1, reduced[1], reduced[2]))
    assert torch.equal(run(program, "warp_reduce", x)[0], want)
    some = torch.full((8, 32), -1.0)
    some[:, 1::4] = w[:, 1::4].sum(1, keepdim=True)
    assert torch.equal(run(program, "partial_reduce", x)[0], some.flatten())


def test_template_reductions(program):
    x = torch.randint(-50, 50, (N,), generator=torch.Generator().manual_seed(4)).float()
    assert torch.equal(run(program, "block_reduce", x)[0], x.sum().repeat(N))
    assert torch.equal(run(program, "strided_reduce", x)[0], x.reshape(-1, 8).amax(0).repeat(N // 8))
    assert torch.equal(run(program, "group_reduce", x)[0], x.reshape(-1, 16).sum(1).repeat_interleave(16))
    want = x.reshape(-1, 4, 2).sum(1, keepdim=True).expand(-1, 4, 2)
    assert torch.equal(run(program, "butterfly", x)[0], want.flatten())


def test_atomics(program, x):
    y, _ = run(program, "ub_atomics", x)
    assert y[:2].tolist() == [256.0, 255.0]
    _, g = run(program, "gm_atomics", x, blocks=3)
    assert g[:4].tolist() == [192.0] * 4
    assert g[4:5].view(torch.int32).item() == -100
    y, _ = run(program, "return_values", x)
    assert sorted(y[:255].tolist()) == sorted(set(y[:255].tolist()))


def test_short_vectors(program, x):
    w = torch.tensor([2.0, 3.0]).repeat(N // 2)
    assert torch.equal(run(program, "short_vectors", x)[0], (x * w + w) / w - x)
    i = torch.randint(-(2**31), 2**31 - 1, (N,), dtype=torch.int32)
    k = torch.tensor([1, 2, 3, 4], dtype=torch.int32).repeat(N // 4)
    want = ((i & 255) << k) + (i >> k) - (i | k) * k
    assert torch.equal(run(program, "integer_vectors", i.view(torch.float32))[0].view(torch.int32), want)
    assert torch.equal(run(program, "packed_halves", x)[0].view(torch.bfloat16)[:N], x.bfloat16())


def test_fp8(program, x):
    out = run(program, "fp8", x)[0].view(torch.uint8)
    assert torch.equal(out[:N], (x * 300).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(out[N : 2 * N], x.to(torch.float8_e5m2).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(out[2 * N :].view(torch.float16), codes.half(), rtol=0, atol=0, equal_nan=True)


def test_functions_round_once(program, x):
    d = x.double()
    v = (x.abs() + 0.5).double()
    results = [d.exp(), v.log(), v.rsqrt(), d.tanh(), v.log1p(), d.exp2(), d.clamp(min=0.25), d.sin()]
    want = torch.stack(results)[torch.arange(N) % 8, torch.arange(N)].float()
    got = run(program, "functions", x)[0]
    assert ((got.view(torch.int32) - want.view(torch.int32)).abs() <= 1).all()
    assert (got == want).float().mean() > 0.99


def philox(key, counter):
    """Philox4x32-10 (Salmon et al. 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_random_numbers(program, x):
    assert philox([0, 0], [0, 0, 0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = run(program, "philox", x)[0].view(torch.int32)
    for t in (0, 1, 100, 255):
        want = philox([0x90ABCDEF, 0x12345678], [2, 0, 5 + t, 0])[0]
        assert words[t].item() & 0xFFFFFFFF == want
    assert run(program, "uniform", x)[0].min() == 1


def test_a_warp_orders_its_own_lanes(program, x):
    assert torch.equal(run(program, "sync_warp", x)[0], x.reshape(-1, 2).flip(1).flatten())


def test_three_dimensions(program, x):
    y, _ = run(program, "three_dimensions", x)
    i = torch.arange(64)
    assert torch.equal(y[:64], (100 * (i % 8) + i).float())


def test_assertions_of_the_kernel_are_reported(program, x):
    with pytest.raises(emulator.EmulatorError, match=r"asserted: block 0, device_assert .*thread 7: condition"):
        run(program, "asserted", x)
