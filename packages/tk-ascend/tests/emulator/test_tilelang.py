"""Kernels that TileLang lowers run as they are, and each of their waits is needed."""

# Annotations of TileLang functions are values, so they are not postponed here.

import dataclasses
import json

import pytest
import torch

from tk_ascend import emulator, inspect, lowering

N, BLOCK, CORES = 8192, 1024, 4


def simt_scale():
    from tilelang.ascend import language as T

    @T.prim_func
    def scale(x: T.Tensor[(N,), T.float32], y: T.Tensor[(N,), T.float32]):
        with T.Kernel(CORES) as core:
            buf = T.alloc_shared((BLOCK,), T.float32)
            for b in T.Persistent([N // BLOCK], CORES, core, group_size=1):
                T.copy(x[b * BLOCK], buf)
                with T.SimtVF(threads=256):
                    for i in T.Parallel(BLOCK):
                        buf[i] = buf[i] * 3.0 + 1.0
                T.copy(buf, y[b * BLOCK])

    return scale


def simd_scale():
    from tilelang.ascend import language as T
    from tilelang.ascend.language import simd as S

    @T.prim_func
    def scale(x: T.Tensor[(N,), T.float32], y: T.Tensor[(N,), T.float32]):
        with T.Kernel(CORES) as core:
            buf = T.alloc_shared((BLOCK,), T.float32)
            for b in T.Persistent([N // BLOCK], CORES, core, group_size=1):
                T.copy(x[b * BLOCK], buf)
                with T.SimdVF():
                    for c in T.serial(BLOCK // 64):
                        S.vsts(buf[c * 64], S.vadds(S.vmuls(S.vld(buf[c * 64]), 3.0), 1.0))
                T.copy(buf, y[b * BLOCK])

    return scale


def two_kernels():
    """Symbolic sizes and strides, a scalar, and two launches of which the second reads what the first wrote."""
    from tilelang.ascend import language as T

    n, s = T.dynamic("n"), T.dynamic("s")

    @T.prim_func
    def two(
        x: T.StridedTensor[(n, BLOCK), (s, 1), T.float32],
        factor: T.float32,
        w: T.Tensor[(n, BLOCK), T.float32],
        y: T.Tensor[(n, BLOCK), T.bfloat16],
    ):
        with T.Kernel(CORES) as core:
            buf = T.alloc_shared((BLOCK,), T.float32)
            for b in T.Persistent([n], CORES, core, group_size=1):
                T.copy(x[b, 0], buf)
                with T.SimtVF(threads=256):
                    for i in T.Parallel(BLOCK):
                        buf[i] = buf[i] * factor + 1.0
                T.copy(buf, w[b, 0])
        with T.Kernel(n) as core:
            source = T.alloc_shared((BLOCK,), T.float32)
            result = T.alloc_shared((BLOCK,), T.bfloat16)
            T.copy(w[core, 0], source)
            with T.SimtVF(threads=256):
                for i in T.Parallel(BLOCK):
                    result[i] = T.exp(source[i])
            T.copy(result, y[core, 0])

    return two


def matmul_relu():
    from tilelang.ascend import language as T

    @T.prim_func
    def matmul(
        a: T.Tensor[(64, 128), T.bfloat16], b: T.Tensor[(64, 128), T.bfloat16], c: T.Tensor[(64, 64), T.float32]
    ):
        with T.Kernel(2) as bx:
            a_l1 = T.alloc_l1((32, 64), T.bfloat16)
            b_l1 = T.alloc_l1((32, 64), T.bfloat16)
            c_l0 = T.alloc_l0c((32, 32), T.float32)
            c_ub = T.alloc_shared((16, 32), T.float32)
            for tile in T.Persistent([4], 2, bx):
                m, n = tile // 2 * 32, tile % 2 * 32
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(a[m, k * 64], a_l1)
                    T.copy(b[n, k * 64], b_l1)
                    T.gemm(a_l1, b_l1, c_l0, transpose_B=True, clear_accum=(k == 0))
                T.dual_copy(c_l0, c_ub)
                with T.SimtVF(threads=128):
                    for i, j in T.Parallel(16, 32):
                        c_ub[i, j] = T.max(c_ub[i, j], 0)
                T.dual_copy(c_ub, c[m : m + 32, n : n + 32])

    return matmul


@pytest.fixture(scope="module")
def lowered():
    makers = {f.__name__: f for f in (simt_scale, simd_scale, two_kernels, matmul_relu)}
    return {name: lowering.lower(make) for name, make in makers.items()}


@pytest.mark.parametrize("name", ["simt_scale", "simd_scale"])
def test_elementwise(lowered, name):
    x = torch.randn(N)
    for mode, seed in (("checked", 0), ("adversarial", 1), ("adversarial", 2), ("fast", 0)):
        y = torch.full((N,), float("nan"))
        assert emulator.run(lowered[name], x, y, mode=mode, seed=seed) == ()
        assert torch.equal(y, x * 3 + 1)


def test_two_launches_with_symbolic_sizes(lowered):
    kernel = lowered["two_kernels"]
    assert [launch.kernel for launch in kernel.launches] == ["two_kernel", "two_kernel_1"]
    for rows in (1, 7):
        x = torch.randn(rows, 3 * BLOCK)[:, BLOCK : 2 * BLOCK]
        w, y = torch.zeros(rows, BLOCK), torch.zeros(rows, BLOCK, dtype=torch.bfloat16)
        emulator.run(kernel, x, -0.5, w, y)
        assert torch.equal(w, x * -0.5 + 1)
        assert torch.equal(y, w.double().exp().float().bfloat16())
    empty = torch.zeros(0, BLOCK)
    emulator.run(kernel, empty, 1.0, empty, empty.bfloat16())


def test_mixed_kernel(lowered):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (64, 128), generator=g).bfloat16() for _ in range(2))
    for mode, seed in (("checked", 0), ("adversarial", 1), ("adversarial", 2)):
        c = torch.full((64, 64), float("nan"))
        emulator.run(lowered["matmul_relu"], a, b, c, mode=mode, seed=seed)
        assert torch.equal(c, (a.float() @ b.float().t()).relu())


def without(lowered, call, number):
    """The source without the ``number``-th ``call``, or None when there are fewer."""
    parts = lowered.source.split(call)
    if number + 1 >= len(parts):
        return None
    source = call.join(parts[: number + 1]) + "emu_dropped(" + call.join(parts[number + 1 :])
    header, include = source.split("\n", 1)
    return f"{header}\ntemplate <class... A> void emu_dropped(A...) {{}}\n{include}"


def drop_each(kernel, call):
    number = 0
    while (source := without(kernel, call, number)) is not None:
        yield number, dataclasses.replace(kernel, source=source)
        number += 1


def test_every_wait_is_needed(lowered):
    """Without any one wait, a race, an unbalanced flag or a deadlock is reported, in program order."""
    count = 0
    arguments = {"simd_scale": (torch.randn(N), torch.zeros(N))}
    arguments["simt_scale"] = arguments["simd_scale"]
    for name, tensors in arguments.items():
        for number, broken in drop_each(lowered[name], "asc_sync_wait("):
            with pytest.raises(emulator.EmulatorError, match=r"race|unbalanced") as error:
                emulator.run(broken, *tensors)
            assert "scale_kernel: " in str(error.value), number
            count += 1
    assert count == 8


def test_cores_of_a_mixed_kernel_need_their_flags(lowered):
    a, c = torch.ones(64, 128).bfloat16(), torch.zeros(64, 64)
    kernel = lowered["matmul_relu"]
    number = kernel.source[: kernel.source.index("asc_sync_intra_wait(PIPE_V")].count("asc_sync_intra_wait(")
    broken = dataclasses.replace(kernel, source=without(kernel, "asc_sync_intra_wait(", number))
    pattern = r"matmul_kernel: block 0 AIC, asc_copy_l0c2ub on pipe FIX: race: writes UB bytes .* on pipe V of core 1"
    with pytest.raises(emulator.EmulatorError, match=pattern):
        emulator.run(broken, a, a, c)


def test_arguments_of_lowered_functions_are_checked(lowered):
    kernel = lowered["two_kernels"]
    x, w, y = torch.zeros(2, BLOCK), torch.zeros(2, BLOCK), torch.zeros(2, BLOCK, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"two takes 4 arguments \['x', 'factor', 'w', 'y'\], got 3"):
        emulator.run(kernel, x, 1.0, w)
    with pytest.raises(TypeError, match=r"two: y must be torch.bfloat16, got torch.float32"):
        emulator.run(kernel, x, 1.0, w, w)
    with pytest.raises(ValueError, match=r"two: w must have shape \('n', 1024\) = \(2, 1024\), got \(3, 1024\)"):
        emulator.run(kernel, x, 1.0, torch.zeros(3, BLOCK), y)
    with pytest.raises(ValueError, match=r"two: w must be contiguous|two: w must have strides"):
        emulator.run(kernel, x, 1.0, torch.zeros(2, 2 * BLOCK)[:, :BLOCK], y)
    with pytest.raises(TypeError, match=r"two: factor must be a number, got Tensor"):
        emulator.run(kernel, x, x, w, y)


def test_lowered_sources_are_cached(tmp_path, monkeypatch, lowered):
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path))
    calls = []

    def make():
        calls.append(1)
        return simt_scale()

    first = lowering.lower(make, key="scale")
    assert lowering.lower(make, key="scale") == first == lowered["simt_scale"]
    assert len(calls) == 1
    (path,) = (tmp_path / "ascend").iterdir()
    assert json.loads(path.read_text())["name"] == "scale"
    assert lowering.lower(make, key="other") == first
    assert len(calls) == 2


def test_report(lowered):
    result = inspect.report(lowered["simd_scale"], {"x": (N,), "y": (N,)})
    (launch,) = result["launches"]
    assert launch["bytes"]["MTE2"] == {"global_read": 4 * N, "local_written": 4 * N}
    assert launch["bytes"]["MTE3"] == {"global_written": 4 * N, "local_read": 4 * N}
    # A load, a multiplication, an addition and a store for each 64 elements.
    assert launch["vector_instructions"] == 4 * N // 64
    assert launch["ub"] == {"used": 4 * BLOCK, "available": 248 * 1024}
    assert launch["buffering"] == 1
    bound = result["bound"]
    assert bound["limit"] == "vector"  # of four cores
    assert bound["useful_bytes"] == 8 * N
    seconds = 8 * N / 1.6e12 + 4 * N / 64 / (CORES * 1.65e9)
    assert bound["seconds"] == pytest.approx(seconds)
    assert bound["useful_gb_per_s"] == pytest.approx(8 * N / seconds / 1e9)
    assert all(peak["source"] for peak in result["peaks"].values())
    json.dumps(result)

    assert launch["simt"]["threads"] == 0
    assert bound["assumes"] is None

    result = inspect.report(lowered["simt_scale"], {"x": (N,), "y": (N,)})
    (launch,) = result["launches"]
    simt = launch["simt"]
    assert (simt["local_read"], simt["local_written"]) == (N, N)
    assert (simt["global_read"], simt["global_written"], simt["barriers"]) == (0, 0, 0)
    assert simt["threads"] == 256 * N // BLOCK
    assert simt["accesses_per_byte"] == 2 / 8
    assert launch["seconds"]["simt"] == pytest.approx(2 * N / 32 / (CORES * 1.65e9))
    assert result["bound"]["assumes"].startswith("assumed")

    result = inspect.report(lowered["matmul_relu"], {"a": (64, 128), "b": (64, 128), "c": (64, 64)})
    (launch,) = result["launches"]
    assert launch["multiplications"] == 64 * 64 * 128
    assert launch["buffering"] == 2
    assert launch["bytes"]["MTE3"]["global_written"] == 4 * 64 * 64

    with pytest.raises(ValueError, match=r"scale: shapes has no shape like \(8192,\) for y; it has \['x'\]"):
        inspect.report(lowered["simd_scale"], {"x": (N,)})
