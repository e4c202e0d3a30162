"""The top-k of a warp, built by the host compiler: 32 threads stand for the lanes, a barrier for their exchanges."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess

import pytest
import torch

from tk_core.backend import Layout
from tk_core.cases import Maker, cases_of
from tk_core.moe import topk_gate
from tk_cuda.moe._topk import SOURCE, topk_refusal
from tk_cuda.tile.access import access_width

LANES = r"""
#include <pthread.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
template <class T> T __ldg(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) abort();
  return *p;
}
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float fmaxf(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }

static pthread_barrier_t barrier;
static unsigned slots[32];
thread_local int current;
template <class Merge> unsigned exchange(unsigned value, unsigned start, Merge merge) {
  slots[current] = value;
  pthread_barrier_wait(&barrier);
  unsigned result = start;
  for (int i = 0; i < 32; ++i) result = merge(result, slots[i], i);
  pthread_barrier_wait(&barrier);
  return result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return exchange(v, 0u, [](unsigned a, unsigned b, int) { return a > b ? a : b; });
}
inline int __reduce_min_sync(unsigned, int v) {
  return exchange(v, 0x7fffffffu, [](unsigned a, unsigned b, int) { return int(a) < int(b) ? a : b; });
}
inline unsigned __ballot_sync(unsigned, bool p) {
  return exchange(p, 0u, [](unsigned a, unsigned b, int i) { return a | b << i; });
}
"""
RUN = r"""
template <int E, int K, int Width> void run(const float* scores, long stride, long long* ids, long rows) {
  pthread_barrier_init(&barrier, nullptr, 32);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) lanes.emplace_back([=] {
    current = lane;
    for (long r = 0; r < rows; ++r) tk::write_topk_row<E, K, Width>(ids + r * K, scores + r * stride, lane);
  });
  for (auto& lane : lanes) lane.join();
}
"""


def calls() -> dict[str, tuple[torch.Tensor, int]]:
    """The quick samples of moe.topk_gate that a kernel sees: at least one row, few enough for threads."""
    samples = [s for s in cases_of("moe.topk_gate").samples if s.level == "quick"]
    made = {s.why: s.make(Maker("cpu", Layout())).args for s in samples}
    return {why: (scores[:12], k) for why, (scores, k) in made.items() if len(scores)}


CALLS = calls()


def key(scores: torch.Tensor, k: int) -> tuple[int, int, int]:
    return scores.shape[1], k, access_width(scores)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: pathlib.Path = tmp_path_factory.mktemp("topk")
    entries = [
        f'extern "C" void topk_{e}_{k}_{w}(const float* x, long stride, long long* ids, long rows) '
        f"{{ run<{e}, {k}, {w}>(x, stride, ids, rows); }}"
        for e, k, w in sorted({key(*args) for args in CALLS.values()})
    ]
    (folder / "topk.cpp").write_text("\n".join([LANES, SOURCE, RUN, *entries]))
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-pthread", "topk.cpp", "-o", "topk.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "topk.so"))


@pytest.mark.parametrize("why", CALLS)
def test_ids_equal_the_reference(library: ctypes.CDLL, why: str):
    scores, k = CALLS[why]
    guard = -7
    ids = torch.full((len(scores) + 2, k), guard)
    function = getattr(library, "topk_{}_{}_{}".format(*key(scores, k)))
    pointers = ctypes.c_void_p(scores.data_ptr()), ctypes.c_long(scores.stride(0)), ctypes.c_void_p(ids[1].data_ptr())
    function(*pointers, ctypes.c_long(len(scores)))
    assert ids[0].eq(guard).all()
    assert ids[-1].eq(guard).all()
    assert torch.equal(ids[1:-1], topk_gate(scores, k))


def test_limits_are_stated():
    assert topk_refusal(32, 4096) is None
    assert "at most 32 experts" in topk_refusal(33, 64)
    assert "at most 4096 experts, got 4097" in topk_refusal(8, 4097)
