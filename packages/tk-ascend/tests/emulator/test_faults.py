# ruff: noqa: E501  (lines of AscendC)
"""Planted faults are found, and each report names the kernel, the instruction and the bytes."""

from __future__ import annotations

import pytest
import torch

from tk_ascend import emulator
from tk_ascend.lowering import Launch, Lowered, Param

CACHE = "static_cast<asc_load_l2_cache_mode>(0)"
STORE = "static_cast<asc_store_l2_cache_mode>(0)"
IN_TO_V = ("MTE2", "V")
V_TO_OUT = ("V", "MTE3")
TEMPLATE = """
__simd_vf__ inline void NAME_vf(__ubuf__ float* u) {
  SIMD
}
__simt_vf__ __launch_bounds__(256) inline void NAME_simt(__ubuf__ float* u, __gm__ float* y) {
  int t = (int32_t)threadIdx.x;
  SIMT
}
extern "C" __global__ __vector__ void NAME(__gm__ float* x, __gm__ float* y) {
  asc_init();
  __ubuf__ float *u = (__ubuf__ float *)0;
  BODY
}
"""
COPY = "simd_inst::vsts_norm<float>(simd_inst::vlds_norm<float>(u, 0), u + 64, 0, asc_create_mask_b32(PAT_ALL));"
DOUBLE = "u[t] = u[t] * 2;"


def kernel(name, body, simd=COPY, simt=DOUBLE):
    text = TEMPLATE.replace("BODY", body).replace("SIMD", simd).replace("SIMT", simt)
    return text.replace("NAME", name)


def faults(kit):
    """Name, kernel, launch options, and what the report says."""
    load, store = kit.load("u", "x"), kit.store("y", "u")
    simt, simd = "asc_vf_call<NAME_simt>(cce::dim3(256), u, y);", "NAME_vf(u);"
    wait_in, wait_out = kit.flag(*IN_TO_V), kit.flag(*V_TO_OUT)
    through = kit.flag("MTE2", "MTE3")

    def plant(name, body, pattern, simd=COPY, simt=DOUBLE, **options):
        return name, kernel(name, body, simd, simt), options, pattern

    yield plant(
        "wait_before_simd",
        f"{load} {simd} {wait_out} {store}",
        r"asc_loadalign in wait_before_simd_vf on pipe V: race: reads UB bytes \[0, 256\), not ordered after "
        r"asc_copy_gm2ub_align on pipe MTE2, which wrote them",
    )
    yield plant(
        "wait_before_simt",
        f"{load} {simt} {wait_out} {store}",
        r"wait_before_simt_simt on pipe V, thread 0: race: reads UB bytes \[0, 4\), not ordered after "
        r"asc_copy_gm2ub_align on pipe MTE2",
    )
    yield plant(
        "wait_before_store",
        f"{load} {wait_in} {simt} {store}",
        r"asc_copy_ub2gm_align on pipe MTE3: race: reads UB bytes \[0, 1024\), not ordered after "
        r"wait_before_store_simt on pipe V, which wrote them",
    )
    yield plant(
        "reuse_while_read",
        f"{load} {through} {store} {kit.load('u', 'x + 256')}",
        r"asc_copy_gm2ub_align on pipe MTE2: race: writes UB bytes \[0, 1024\), not ordered after "
        r"asc_copy_ub2gm_align on pipe MTE3, which read them",
    )
    yield plant(
        "scalar_write",
        f"{load} {through} u[3] = 1.0f; {store}",
        r"scalar code on pipe S: race: writes UB bytes \[12, 16\), not ordered after asc_copy_gm2ub_align on pipe MTE2",
    )
    yield plant(
        "barrier_between_threads",
        f"{load} {wait_in} {simt} {wait_out} {store}",
        r"race between threads: reads UB bytes \[0, 4\), which thread 0 wrote with no barrier between",
        simt="float v = u[t]; asc_syncthreads(); u[t] = v + 1; v = u[(t + 255) % 256]; asc_syncthreads(); u[t] = v;",
    )
    yield plant(
        "threads_write_alike",
        f"{load} {wait_in} {simt} {wait_out} {store}",
        r"thread 1: race between threads: writes UB bytes \[1020, 1024\), which thread 0 wrote",
        simt="u[255] = t;",
    )
    yield plant(
        "ub_overflow_simd",
        simd,
        r"asc_storealign in ub_overflow_simd_vf on pipe V: out of range: writes UB bytes \[253952, 254208\), of 253952",
        simd="simd_inst::vsts_norm<float>(simd_inst::vdup<float>(1.0f, asc_create_mask_b32(PAT_ALL), MODE_ZEROING), "
        "u + 63488, 0, asc_create_mask_b32(PAT_ALL));",
    )
    yield plant(
        "ub_overflow_simt",
        f"{load} {wait_in} {simt}",
        r"ub_overflow_simt_simt on pipe V, thread 250: out of range: writes UB bytes \[221184, 221188\), of 221184",
        simt="u[55046 + t] = 0;",
    )
    yield plant(
        "ub_overflow_dma",
        kit.load("u + 63480", "x"),
        r"asc_copy_gm2ub_align on pipe MTE2: out of range: writes UB bytes \[253920, 254944\), of 253952",
    )
    yield plant(
        "misaligned_load",
        f"{load} {wait_in} {simd}",
        r"asc_loadalign in misaligned_load_vf on pipe V: misaligned: reads UB bytes \[16, 272\), which must start at a "
        r"multiple of 32",
        simd=COPY.replace("(u, 0)", "(u + 4, 0)"),
    )
    yield plant(
        "misaligned_store",
        f"{load} {wait_in} {simd}",
        r"asc_storealign in misaligned_store_vf on pipe V: address 0x104 of UB is not aligned to 32 bytes",
        simd=COPY.replace("u + 64", "u + 65"),
    )
    yield plant(
        "misaligned_dma",
        f"{load} {through} {kit.store('y', 'u + 1', 512)}",
        r"asc_copy_ub2gm_align on pipe MTE3: misaligned: reads UB bytes \[4, 516\)",
    )
    yield plant(
        "unbalanced_flag",
        f"{load} asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(5));",
        r"asc_sync_notify.*unbalanced flag: MTE2 to V, event 5, has 1 notifications that nothing waits for",
    )
    yield plant(
        "event_number",
        "asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(8));",
        r"asc_sync_notify.*event 8; a pair of pipes has events 0 to 7",
    )
    yield plant(
        "deadlock",
        f"asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(2)); {load}",
        r"asc_sync_wait on pipe MTE2: deadlock: waits for ever for V to MTE2, event 2",
    )
    yield plant(
        "deadlock_of_blocks",
        "if (block_idx == 0) asc_sync_inter_arrive(PIPE_MTE3, 1); asc_sync_inter_wait(PIPE_MTE2, 1);",
        r"block 1, asc_sync_inter_wait on pipe MTE2: deadlock: waits for ever for flag 1",
        blocks=2,
    )
    yield plant(
        "load_past_the_end",
        f"{kit.load('u', 'x + 800')} {through} {store}",
        r"asc_copy_gm2ub_align on pipe MTE2: out of range: reads x bytes \[3200, 4224\), of 4096",
    )
    yield plant(
        "store_past_the_end",
        f"{load} {through} {kit.store('y + 1000', 'u')}",
        r"asc_copy_ub2gm_align on pipe MTE3: out of range: writes y bytes \[4000, 5024\), of 4096",
    )
    yield plant(
        "simt_past_the_end",
        simt,
        r"simt_past_the_end_simt on pipe V, thread 24: out of range: writes y bytes \[4096, 4100\), of 4096",
        simt="y[1000 + t] = 0;",
    )
    yield plant(
        "wild_address",
        simt,
        r"wild_address: block 0, memory access .*: segmentation fault",
        simt="*(__gm__ float*)(uint64_t)(16 + t) = 0;",
    )
    yield plant(
        "stack_overflow",
        simt,
        r"stack_overflow: block 0, memory access .*: segmentation fault: .* local arrays beyond the stack",
        simt="volatile float big[100000]; for (int i = 99999; i >= 0; --i) big[i] = 1; u[t] = big[5];",
    )
    yield plant(
        "never_written",
        f"{kit.load('u', 'x', 512)} {through} {store}",
        r"asc_copy_ub2gm_align on pipe MTE3: uninitialised: stores UB bytes \[512, 1024\)",
    )
    yield plant(
        "undefined_through_registers",
        f"{kit.load('u', 'x', 128)} {wait_in} {simd} {wait_out} {kit.store('y', 'u + 64', 256)}",
        r"uninitialised: stores UB bytes \[384, 512\), to which nothing defined was written",
        simd="auto all = asc_create_mask_b32(PAT_ALL); auto v = simd_inst::vlds_norm<float>(u, 0);"
        "simd_inst::vsts_norm<float>(simd_inst::vadds(v, 1.0f, all, MODE_ZEROING), u + 64, 0, all);",
    )
    yield plant(
        "blocks_write_alike",
        f"{load} {through} {kit.store('y + 128 * block_idx', 'u')}",
        r"block 1, asc_copy_ub2gm_align on pipe MTE3: race: writes y bytes \[512, 1024\), not ordered after "
        r"asc_copy_ub2gm_align on pipe MTE3 of block 0, which wrote them",
        blocks=2,
    )
    yield plant(
        "block_reads_another",
        f"{kit.load('u', 'y')} {through} {kit.store('y + 256 * block_idx', 'u')}",
        r"block 1, asc_copy_gm2ub_align on pipe MTE2: race: reads y bytes \[0, 1024\), not ordered after .* block 0",
        blocks=2,
    )
    yield plant(
        "atomic_and_plain",
        f"{load} {through} if (block_idx) asc_set_atomic_add_float(); {store}",
        r"block 1, asc_copy_ub2gm_align on pipe MTE3: race: updates y bytes \[0, 1024\), not ordered after .* block 0",
        blocks=2,
    )
    yield plant(
        "read_back_too_early",
        f"{load} {through} {store} {kit.load('u + 256', 'y')}",
        r"asc_copy_gm2ub_align on pipe MTE2: race: reads y bytes \[0, 1024\), not ordered after asc_copy_ub2gm_align "
        r"on pipe MTE3, which wrote them",
    )
    yield plant(
        "vector_order",
        f"{load} {wait_in} {simd}",
        r"asc_loadalign in vector_order_vf on pipe V: reads UB bytes \[256, 512\), stored in the same vector function",
        simd=COPY + COPY.replace("(u, 0)", "(u + 64, 0)").replace("u + 64, 0, asc", "u + 128, 0, asc"),
    )


L1 = (
    "asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(16), 0); asc_copy_gm2l1_nd2nz((__cbuf__ half*)0, (__gm__ half*)x, "
    f"32, {CACHE}, 16, 16, 0, 0);"
)
L0 = "asc_copy_l12l0a(l0a, (__cbuf__ half*)0, 0, 0, 1, 1, 1, 1); asc_copy_l12l0b(l0b, (__cbuf__ half*)0, 0, 0, 1, 1, 1, 1);"
MAD = "asc_mmad(l0c, l0a, l0b, 16, 16, 16, 0, true, false, true);"
OUT = (
    f"asc_copy_l0c2gm(y, l0c, 16, 16, 16, 16, {STORE}, static_cast<asc_unit_flag_mode>(0), "
    "static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);"
)


def matrix_faults(kit):
    """The chain GM, L1, L0, L0C, GM with one synchronization left out."""
    steps = [
        ("l1", L1, ("MTE2", "MTE1"), r"asc_copy_l12l0a on pipe MTE1: race: reads L1 bytes \[0, 512\)"),
        ("l0", L0, ("MTE1", "M"), r"asc_mmad on pipe M: race: reads L0A bytes \[0, 512\)"),
        ("l0c", MAD, ("M", "FIX"), r"asc_copy_l0c2gm on pipe FIX: race: reads L0C bytes \[0, 1024\)"),
    ]
    for dropped, _, _, pattern in steps:
        body = "".join(code + ("" if name == dropped else kit.flag(*pipes)) for name, code, pipes, _ in steps) + OUT
        pointers = "__ca__ half *l0a = (__ca__ half *)0; __cb__ half *l0b = (__cb__ half *)0;"
        pointers += "__cc__ float *l0c = (__cc__ float *)0;"
        name = f"matrix_{dropped}"
        yield (
            name,
            f'extern "C" __global__ __cube__ void {name}(__gm__ float* x, __gm__ float* y) {{ \n{pointers} {body}\n}}\n',
            pattern,
        )


@pytest.fixture(scope="module")
def planted(kit):
    return {name: (options, pattern) for name, _, options, pattern in faults(kit)}


@pytest.fixture(scope="module")
def program(kit):
    sources = [text for _, text, _, _ in faults(kit)] + [text for _, text, _ in matrix_faults(kit)]
    sources.append(kernel("correct", CORRECT(kit)))
    sources.append(kernel("tail", CORRECT(kit).replace(kit.load("u", "x"), kit.load("u", "x", 512))))
    return kit.build(sources)


def CORRECT(kit):
    call = "asc_vf_call<NAME_simt>(cce::dim3(256), u, y);"
    return f"{kit.load('u', 'x')} {kit.flag(*IN_TO_V)} {call} {kit.flag(*V_TO_OUT)} {kit.store('y', 'u')}"


NAMES = [
    "wait_before_simd", "wait_before_simt", "wait_before_store", "reuse_while_read", "scalar_write",
    "barrier_between_threads", "threads_write_alike", "ub_overflow_simd", "ub_overflow_simt", "ub_overflow_dma",
    "misaligned_load", "misaligned_store", "misaligned_dma", "unbalanced_flag", "event_number", "deadlock",
    "deadlock_of_blocks", "load_past_the_end", "store_past_the_end", "simt_past_the_end", "wild_address", "stack_overflow",
    "never_written", "undefined_through_registers", "blocks_write_alike", "block_reads_another", "atomic_and_plain",
    "read_back_too_early", "vector_order",
]  # fmt: skip


def run(program, name, **options):
    x, y = torch.randn(1024), torch.zeros(1024)
    notes = emulator.run(program, x, y, kernel=name, **options)
    return x, y, notes


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_is_reported(program, planted, name):
    options, pattern = planted[name]
    with pytest.raises(emulator.EmulatorError, match=pattern) as error:
        run(program, name, **options)
    assert all(report.startswith(f"{name}: ") for report in error.value.reports)


def test_every_planted_fault_is_tested(planted):
    assert sorted(planted) == sorted(NAMES)


@pytest.mark.parametrize("dropped", ["l1", "l0", "l0c"])
def test_matrix_memories_are_watched(kit, program, dropped):
    pattern = {name: pattern for name, _, pattern in matrix_faults(kit)}[f"matrix_{dropped}"]
    with pytest.raises(emulator.EmulatorError, match=pattern):
        run(program, f"matrix_{dropped}")


def test_the_correct_kernel_passes(program):
    for options in ({}, {"mode": "adversarial", "seed": 3}, {"mode": "fast"}):
        x, y, notes = run(program, "correct", **options)
        assert torch.equal(y[:256], 2 * x[:256])
        assert notes == ()


def test_vector_order_is_optional(program):
    _, y, _ = run(program, "vector_order", check_vector_order=False)
    assert torch.equal(y, torch.zeros(1024))


def test_undefined_tail_read_by_threads_is_noted(program):
    _, _, notes = run(program, "tail")
    assert any("tail_simt" in note and "UB bytes [512, 516)" in note for note in notes)


def test_faults_do_not_disturb_the_next_launch(program, planted):
    for name in ("deadlock", "wild_address", "unbalanced_flag"):
        with pytest.raises(emulator.EmulatorError):
            run(program, name, **planted[name][0])
        x, y, _ = run(program, "correct")
        assert torch.equal(y[:256], 2 * x[:256])


def test_adversarial_order_shows_what_a_missing_wait_does(program):
    """Races are reported in every mode; the seed decides which order the pipes take."""
    for seed in range(4):
        with pytest.raises(emulator.EmulatorError, match="race"):
            run(program, "wait_before_store", mode="adversarial", seed=seed)


def test_stores_around_a_tensor_are_found_without_checks(kit):
    fast = kit.build(
        [kernel("outside", "asc_vf_call<NAME_simt>(cce::dim3(256), u, y);", simt="y[1000 + t] = 0;")], False
    )
    with pytest.raises(
        emulator.EmulatorError, match="outside: out of range: a store hit memory around y, of 4096 bytes"
    ):
        run(fast, "outside", mode="fast")


def test_capacity_of_ub():
    source = kernel("big", "asc_vf_call<NAME_simt>(cce::dim3(256), u, y);")
    params = tuple(Param(name, "float32", (1024,)) for name in ("x", "y"))
    lowered = Lowered(
        "big",
        "#include <tl_templates/ascend/common.h>\n" + source,
        params,
        (Launch("big", ("x", "y"), "1", 217 * 1024),),
    )
    with pytest.raises(
        emulator.EmulatorError, match="big: capacity: allocates 222208 bytes of UB, of 221184 available"
    ):
        emulator.run(lowered, torch.zeros(1024), torch.zeros(1024))


def test_unknown_intrinsics_do_not_compile(kit):
    with pytest.raises(emulator.BuildError, match="asc_no_such_thing"):
        kit.build([kernel("unknown", "asc_no_such_thing(u);")])
    with pytest.raises(emulator.BuildError, match="interleaves two registers"):
        kit.build([kernel("interleave", "NAME_vf(u);", simd=COPY.replace("vsts_norm", "vsts_intlv"))])


def test_arguments_are_checked(program):
    x = torch.zeros(1024)
    with pytest.raises(TypeError, match=r"correct takes 2 arguments \['x', 'y'\], got 1"):
        emulator.run(program, x, kernel="correct")
    with pytest.raises(TypeError, match="correct: y must be a tensor, got float"):
        emulator.run(program, x, 1.0, kernel="correct")
    with pytest.raises(TypeError, match=r"correct: y must be torch\.float32, got torch\.int32"):
        emulator.run(program, x, x.int(), kernel="correct")
    with pytest.raises(ValueError, match="kernel: got 'absent'"):
        emulator.run(program, x, x, kernel="absent")
    with pytest.raises(ValueError, match="mode must be one of"):
        emulator.run(program, x, x, kernel="correct", mode="careful")
    with pytest.raises(ValueError, match="blocks must be a number of at least 0, got -1"):
        emulator.run(program, x, x, kernel="correct", blocks=-1)
    with pytest.raises(ValueError, match="no kernel found"):
        emulator.build("int main() {}")
