"""What limits a lowered kernel: bytes by pipe, vector instructions, UB and buffering, against the device's peaks.

The counts come from one run in the emulator at the sizes given, so they are exact for these; the times are bounds
that no schedule can beat, not predictions: those of SIMT regions under the assumption that ``PEAKS`` states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tk_ascend.emulator.launch import PIPES, Counts, Options, run_counted
from tk_ascend.lowering import Launch, Lowered, Param


@dataclass(frozen=True)
class Peak:
    """A documented limit of the device."""

    value: float
    unit: str
    source: str


PEAKS = {
    "memory": Peak(1.6e12, "bytes/s", "Ascend 950PR memory bandwidth, Huawei Connect, 18 September 2025"),
    "vector cores": Peak(64, "cores", "vector_core_cnt in CANN's platform_config Ascend950PR_958x.ini"),
    "cube cores": Peak(32, "cores", "cube_core_cnt in CANN's platform_config Ascend950PR_958x.ini"),
    "clock": Peak(1.65e9, "1/s", "vec_freq and cube_freq in CANN's platform_config Ascend950PR_958x.ini"),
    "vector issue": Peak(1, "instructions/cycle", "one vector instruction per cycle and vector core"),
    "SIMT accesses": Peak(32, "accesses/cycle", "assumed: one warp's load or store per cycle and vector core"),
    "UB": Peak(248 * 1024, "bytes", "TileLang's capacity check; 216 KiB with SIMT regions"),
}


def report(lowered: Lowered, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Count what a lowered function does and which peak bounds it.

    Args:
        lowered: the function.
        shapes: for each tensor parameter its shape, or a CPU tensor where values matter (such as indices); for each
            scalar parameter its number. Tensors given by shape are zeros.

    Returns:
        A JSON-like dict. ``launches``: for each kernel ``bytes`` by pipe, ``vector_instructions`` and their number
        ``per_byte`` of global memory, ``simt``: loads and stores of the threads of its ``simt_regions`` (as compiled
        for the CPU; arithmetic is not counted) and their number per byte, threads and barriers, ``ub`` bytes used and
        available, ``buffering`` (how many tiles can be in flight on the way in) and ``seconds`` by limit.
        ``bound``: what it ``assumes`` beside documented peaks, the limit, the time, and the GB/s of useful traffic,
        that is of the bytes of all tensor parameters, that it allows. ``peaks``: the constants and their sources.

    Raises:
        ValueError: a parameter has no shape or value.
        EmulatorError: the kernel is faulty.
    """
    arguments = [_argument(lowered, p, shapes) for p in lowered.params]
    useful = sum(a.numel() * a.element_size() for a in arguments if isinstance(a, torch.Tensor))
    by_name = {launch.kernel: launch for launch in lowered.launches}
    counts = list(run_counted(lowered, arguments, Options()))
    launches = [_launch_report(lowered, by_name[c.kernel.name], c) for c in counts]
    totals = {
        limit: sum(launch["seconds"][limit] for launch in launches) for limit in ("memory", "vector", "simt", "cube")
    }
    # Launches follow each other; within one, the limits overlap when there are at least two buffers.
    seconds = sum(launch["seconds"]["bound"] for launch in launches)
    return {
        "name": lowered.name,
        "launches": launches,
        "bound": {
            "assumes": PEAKS["SIMT accesses"].source if totals["simt"] else None,
            "limit": max(totals, key=totals.__getitem__),
            "seconds": seconds,
            "useful_bytes": useful,
            "useful_gb_per_s": useful / seconds / 1e9 if seconds else None,
            "share_of_memory_peak": useful / seconds / PEAKS["memory"].value if seconds else None,
        },
        "peaks": {name: asdict(peak) for name, peak in PEAKS.items()},
    }


def _argument(lowered: Lowered, param: Param, shapes: Mapping[str, Any]) -> Any:
    if param.name not in shapes:
        kind = "value" if param.shape is None else f"shape like {param.shape}"
        raise ValueError(f"{lowered.name}: shapes has no {kind} for {param.name}; it has {sorted(shapes)}")
    given = shapes[param.name]
    if param.shape is None or isinstance(given, torch.Tensor):
        return given
    names = {"float8_e4m3": "float8_e4m3fn", "float4_e2m1fn": "uint8", "float4_e2m1fnx2": "uint8"}
    return torch.zeros(tuple(given), dtype=getattr(torch, names.get(param.dtype, param.dtype)))


def _launch_report(lowered: Lowered, launch: Launch, counts: Counts) -> dict[str, Any]:
    moved = {
        pipe: {
            f"{memory}_{direction}": counts.traffic[pipe, memory, direction]
            for memory in ("global", "local")
            for direction in ("read", "written")
            if counts.traffic[pipe, memory, direction]
        }
        for pipe in PIPES
    }
    global_bytes = sum(counts.traffic[pipe, "global", way] for pipe in PIPES for way in ("read", "written"))
    body = _body(lowered.source, launch.kernel)
    buffering = _buffering(body)
    return {
        "kernel": launch.kernel,
        "blocks": counts.blocks,
        "bytes": {pipe: entry for pipe, entry in moved.items() if entry},
        "global_bytes": global_bytes,
        "simt_regions": len(re.findall(r"\basc_vf_call<", body)),
        "vector_instructions": counts.vector_instructions,
        "vector_instructions_per_byte": counts.vector_instructions / global_bytes if global_bytes else None,
        "simt": {
            **{f"{memory}_{direction}": number for (memory, direction), number in counts.simt_accesses.items()},
            "accesses_per_byte": sum(counts.simt_accesses.values()) / global_bytes if global_bytes else None,
            "threads": counts.simt_threads,
            "barriers": counts.simt_barriers,
        },
        "multiplications": counts.multiplications,
        "ub": {"used": launch.ub_bytes, "available": counts.kernel.ub_bytes},
        "buffering": buffering,
        "seconds": _seconds(counts, global_bytes, buffering),
    }


def _seconds(counts: Counts, global_bytes: int, buffering: int) -> dict[str, float]:
    """Least times by limit; that of SIMT covers loads and stores alone, at the assumed rate of ``PEAKS``."""
    mixed = counts.kernel.kind == 2
    vector_cores = min(counts.blocks * (2 if mixed else 1), PEAKS["vector cores"].value)
    cube_cores = min(counts.blocks, PEAKS["cube cores"].value)
    clock = PEAKS["clock"].value
    memory = global_bytes / PEAKS["memory"].value
    vector = counts.vector_instructions / (vector_cores * clock * PEAKS["vector issue"].value)
    simt = sum(counts.simt_accesses.values()) / (vector_cores * clock * PEAKS["SIMT accesses"].value)
    # The unit multiplies 16 by 16 by 16 numbers of 16 bits in a cycle.
    cube = counts.multiplications / (cube_cores * clock * 16**3)
    bound = max(memory, vector, simt, cube) if buffering > 1 else memory + max(vector, simt, cube)
    return {"memory": memory, "vector": vector, "simt": simt, "cube": cube, "bound": bound}


def _body(source: str, kernel: str) -> str:
    start = re.search(rf"^extern \"C\" __global__ [^\n]* {re.escape(kernel)}\(", source, re.MULTILINE)
    if start is None:
        raise ValueError(f"the source has no kernel {kernel}")
    end = re.search(r"^}", source[start.start() :], re.MULTILINE)
    return source[start.start() : start.start() + end.end()] if end else source[start.start() :]


def _buffering(body: str) -> int:
    """Buffers of the way in: copies into the core that may start before anything else has happened.

    Before its first loop a kernel notifies the copying pipe once for each free buffer; without a loop, or with buffer
    locks instead, it has as many as there are events or locks.
    """
    prologue = body.split("for (", 1)[0]
    free: dict[str, set[str]] = {}
    for source, event in re.findall(
        r"asc_sync_notify\((PIPE_\w+), PIPE_MTE2, static_cast<event_t>\((\w+)\)\)", prologue
    ):
        free.setdefault(source, set()).add(event)
    locks = set(re.findall(r"asc_lock\(PIPE_MTE2, ([^,]+),", body))
    return max([len(events) for events in free.values()] + [len(locks), 1])
