"""Builds programs of many small hand-written kernels, so that g++ runs once per test file."""

from __future__ import annotations

import pytest
import torch

from tk_ascend import emulator

INCLUDES = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/simd_inst.h>
#include <tl_templates/ascend/dcache_bypass.h>
#include <tl_templates/ascend/philox_rng.h>
#include <simt_api/cooperative_groups.h>
"""

SLOT = 1024  # bytes of each input and output of a vector kernel


def raw(tensor, size=SLOT):
    """The bytes of a tensor, padded with zeros."""
    data = tensor.contiguous().view(torch.uint8).flatten()
    assert data.numel() <= size
    return torch.cat([data, torch.zeros(size - data.numel(), dtype=torch.uint8)])


def vector_kernel(name, body):
    """A kernel around one vector function of three inputs ``a b c`` and an output ``o``, all of SLOT bytes."""
    pointers = ", ".join(f"__ubuf__ uint8_t* {p}" for p in "abco")
    lines = [
        f"__simd_vf__ inline void {name}_vf({pointers}) {{",
        f"  {body}",
        "}",
        f'extern "C" __global__ __vector__ void {name}({", ".join(f"__gm__ uint8_t* {p}g" for p in "abco")}) {{',
        "  asc_init();",
    ]
    lines += [f"  __ubuf__ uint8_t *{p} = (__ubuf__ uint8_t *){SLOT * i};" for i, p in enumerate("abco")]
    lines += [f"  {load(f'{p}', f'{p}g')}" for p in "abco"]
    lines += [
        "  asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));",
        "  asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));",
        f"  {name}_vf(a, b, c, o);",
        "  asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));",
        "  asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));",
        f"  {store('og', 'o')}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def load(to, source, size=SLOT):
    return (
        f"asc_copy_gm2ub_align((__ubuf__ uint8_t*)({to}), (__gm__ uint8_t*)({source}), 1, {size}, 0, 0, 0, "
        f"static_cast<asc_load_l2_cache_mode>(0), {size}, {size});"
    )


def store(to, source, size=SLOT):
    return (
        f"asc_copy_ub2gm_align((__gm__ uint8_t*)({to}), (__ubuf__ uint8_t*)({source}), 1, {size}, "
        f"static_cast<asc_store_l2_cache_mode>(0), {size}, {size});"
    )


class Kit:
    """What the test files need to write kernels; a fixture, because test folders are not packages."""

    includes = INCLUDES
    slot = SLOT
    raw = staticmethod(raw)
    vector_kernel = staticmethod(vector_kernel)
    load = staticmethod(load)
    store = staticmethod(store)

    @staticmethod
    def build(kernels, checked=True):
        return emulator.build(INCLUDES + "\n".join(kernels), checked)

    @staticmethod
    def run_vector(program, name, inputs, before=None):
        """Run a vector kernel; returns the SLOT bytes of its output, which ``before`` fills."""
        data = [raw(t) for t in inputs] + [torch.zeros(SLOT, dtype=torch.uint8)] * (3 - len(inputs))
        out = torch.zeros(SLOT, dtype=torch.uint8) if before is None else raw(before)
        emulator.run(program, *data, out, kernel=name)
        return out


@pytest.fixture(scope="session")
def kit():
    return Kit


def flag(source, to, event=0):
    return (
        f"asc_sync_notify(PIPE_{source}, PIPE_{to}, static_cast<event_t>({event})); "
        f"asc_sync_wait(PIPE_{source}, PIPE_{to}, static_cast<event_t>({event}));"
    )


Kit.flag = staticmethod(flag)
