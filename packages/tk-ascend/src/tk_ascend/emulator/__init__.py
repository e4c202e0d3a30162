"""Run AscendC kernels on x86, to test them without an NPU.

The emulator compiles the AscendC source that TileLang generates with g++, against headers that implement the vector,
SIMT, DMA and matrix intrinsics of Ascend 950 in C++, and runs it on CPU tensors::

    from tk_ascend import emulator
    from tk_ascend.lowering import lower

    lowered = lower(make_prim_func, key="my kernel, version 3")
    x, y = torch.randn(8192), torch.empty(8192)
    emulator.run(lowered, x, y)                               # fills y; raises EmulatorError when a check fails
    emulator.run(lowered, x, y, mode="adversarial", seed=7)   # pipes, blocks and threads in a random order

Hand-written source works as well::

    program = emulator.build(source)
    emulator.run(program, x, y, blocks=4)

It finds accesses that no flag or barrier orders (in UB, L1, L0 and global memory, within a block and between
blocks), data races between SIMT threads, reads of undefined memory that reach a result, accesses out of range,
misaligned vector and DMA addresses, deadlocks and unbalanced flags.

It cannot show speed, what CANN's own compiler rejects, register pressure, bank conflicts, coherence of the scalar
data cache, completion out of order inside one pipe, or the launch ABI. Transcendental functions are rounded
correctly, reductions add neighbours first and nothing is flushed to zero: the device may differ in the last bits.
"""

from __future__ import annotations

from tk_ascend.emulator.compiler import BuildError, Program, build
from tk_ascend.emulator.launch import EmulatorError, run

__all__ = ["BuildError", "EmulatorError", "Program", "build", "run"]
