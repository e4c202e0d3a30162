"""Run compiled kernels on CPU tensors, and report what the emulator found."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tk_ascend.emulator.compiler import Program, build, load, runtime
from tk_ascend.emulator.source import Kernel, Parameter

if TYPE_CHECKING:
    from tk_ascend.lowering import Launch, Lowered, Param

Mode = Literal["checked", "adversarial", "fast"]
Argument = torch.Tensor | int | float | bool | None

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")

_one_at_a_time = threading.Lock()  # the runtime has one machine

_SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int32,
    "int8_t": ctypes.c_int8,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_POINTERS = {
    "float": (torch.float32,),
    "half": (torch.float16,),
    "bfloat16_t": (torch.bfloat16,),
    "int8_t": (torch.int8,),
    "int16_t": (torch.int16,),
    "int32_t": (torch.int32, torch.uint32),
    "int64_t": (torch.int64, torch.uint64),
    "uint16_t": (torch.uint16, torch.int16),
    "uint32_t": (torch.uint32, torch.int32),
    "uint64_t": (torch.uint64, torch.int64),
    "float8_e4m3_t": (torch.float8_e4m3fn,),
    "float8_e5m2_t": (torch.float8_e5m2,),
}
_DTYPES = {
    "float8_e4m3": (torch.float8_e4m3fn,),
    "float8_e4m3fn": (torch.float8_e4m3fn,),
    "float8_e5m2": (torch.float8_e5m2,),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, torch.uint8),
    "float4_e2m1fn": (torch.int8, torch.uint8),
    "float4_e2m1fnx2": (torch.int8, torch.uint8),
    "bool": (torch.bool,),
}


class EmulatorError(RuntimeError):
    """The kernel did something that the device forbids or leaves undefined.

    Each of ``reports`` names the kernel, the block and pipe, the instruction and the bytes.
    """

    def __init__(self, reports: Sequence[str]) -> None:
        super().__init__("\n".join(reports))
        self.reports = tuple(reports)


class _Request(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("blocks", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("concurrent", ctypes.c_int32),
        ("ub_bytes", ctypes.c_int64),
        ("mode", ctypes.c_int32),
        ("check_vector_order", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Options:
    """How to run a kernel; see ``run``."""

    mode: Mode = "checked"
    seed: int = 0
    check_vector_order: bool = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode must be one of {tuple(_MODES)}, got {self.mode!r}")


_MODES = {"checked": 0, "adversarial": 1, "fast": 2}


def run(
    program: Program | Lowered,
    *arguments: Argument,
    blocks: int = 1,
    kernel: str | None = None,
    mode: Mode = "checked",
    seed: int = 0,
    check_vector_order: bool = True,
) -> tuple[str, ...]:
    """Run a kernel on CPU tensors, in place.

    Args:
        program: a lowered function, whose arguments are those of the TileLang function; or a built program, whose
            arguments are those of its kernel.
        arguments: CPU tensors of any stride, and numbers. None passes a null pointer.
        blocks: blocks to launch. For a program only; a lowered function knows.
        kernel: which kernel of a program, when it has several.
        mode: ``"checked"`` runs pipes in program order and reports every unordered, undefined, misaligned or
            out-of-range access, deadlocks and unbalanced flags. ``"adversarial"`` checks the same and lets pipes,
            blocks and threads run in an order drawn from ``seed``, so that missing synchronization changes results.
            ``"fast"`` only computes; it checks bounds of DMA and vector accesses alone.
        seed: of the adversarial order.
        check_vector_order: report loads of bytes that the same vector function stored before, without
            ``asc_mem_bar`` between. CANN's manual asks for the barrier, unless both use one register, which the
            emulator cannot see.

    Returns:
        Notes: accesses that may be meant, such as SIMT code reading the undefined tail of a tile.

    Raises:
        EmulatorError: the checks found something.
        BuildError: the source does not compile.
        ValueError, TypeError: the arguments do not fit the kernel.
    """
    options = Options(mode, seed, check_vector_order)
    if isinstance(program, Program):
        chosen = program.kernel(kernel)
        _check_pointers(chosen, arguments)
        counts = _run_kernel(program, chosen, arguments, blocks, options)
        return counts.notes if counts is not None else ()
    return _run_lowered(program, arguments, options)


def _check_pointers(kernel: Kernel, arguments: Sequence[Argument]) -> None:
    """Tensors of hand-written kernels must have the dtype of their pointer; bytes take any."""
    for parameter, argument in zip(kernel.parameters, arguments):
        wanted = _POINTERS.get(parameter.type.rstrip("* "))
        if parameter.pointer and isinstance(argument, torch.Tensor) and wanted and argument.dtype not in wanted:
            names = " or ".join(map(str, wanted))
            raise TypeError(f"{kernel.name}: {parameter.name} must be {names}, got {argument.dtype}")


def _run_lowered(lowered: Lowered, arguments: Sequence[Argument], options: Options) -> tuple[str, ...]:
    notes = [note for counts in run_counted(lowered, arguments, options) for note in counts.notes]
    return tuple(dict.fromkeys(notes))


@dataclass(frozen=True)
class Counts:
    """What one launch did: bytes by ``(pipe, memory, direction)``, memory being "global" or "local", and direction
    "read" or "written"; vector instructions; products of the matrix unit; accesses of SIMT threads by
    ``(memory, direction)``, an atomic update being one written, with the threads and the barriers they passed."""

    kernel: Kernel
    blocks: int
    traffic: dict[tuple[str, str, str], int]
    vector_instructions: int
    multiplications: int
    simt_accesses: dict[tuple[str, str], int]
    simt_threads: int
    simt_barriers: int
    notes: tuple[str, ...]


def run_counted(lowered: Lowered, arguments: Sequence[Argument], options: Options) -> Iterator[Counts]:
    """Run the launches of a lowered function one after the other, as ``run`` does."""
    program = build(lowered.source, checked=options.mode != "fast")
    values = _bind(lowered, arguments)
    for launch in lowered.launches:
        if not _evaluate(launch.condition, values):
            continue
        blocks = _evaluate(launch.grid, values)
        passed = [_evaluate(a, values) for a in launch.arguments]
        kernel = program.kernel(launch.kernel)
        _check_capacity(launch, kernel)
        counts = _run_kernel(program, kernel, passed, blocks, options)
        if counts is not None:
            yield counts


def _check_capacity(launch: Launch, kernel: Kernel) -> None:
    if launch.ub_bytes > kernel.ub_bytes:
        raise EmulatorError(
            [f"{kernel.name}: capacity: allocates {launch.ub_bytes} bytes of UB, of {kernel.ub_bytes} available"]
        )


class _Names(dict):  # type: ignore[type-arg]
    """Names of launch expressions, with the two functions that they may call."""

    def __missing__(self, name: str) -> object:
        return {"min": min, "max": max}[name]


def _evaluate(expression: str, values: dict[str, Argument]) -> Argument:
    if expression in values:
        return values[expression]
    try:
        return eval(expression, {"__builtins__": {}}, _Names(values))  # written by lowering, not by users
    except NameError as error:
        raise ValueError(f"cannot evaluate {expression}: no argument has {error.name} as a size or stride") from None


def _bind(lowered: Lowered, arguments: Sequence[Argument]) -> dict[str, Argument]:
    """Values of parameters and symbolic sizes by name, checked against each other."""
    if len(arguments) != len(lowered.params):
        names = [p.name for p in lowered.params]
        raise TypeError(f"{lowered.name} takes {len(names)} arguments {names}, got {len(arguments)}")
    values: dict[str, Argument] = {}
    for param, argument in zip(lowered.params, arguments, strict=True):
        values[param.name] = argument
        if param.shape is None:
            if isinstance(argument, torch.Tensor) or argument is None:
                raise TypeError(f"{lowered.name}: {param.name} must be a number, got {type(argument).__name__}")
            continue
        if argument is None:
            continue
        tensor = _tensor(lowered.name, param, argument)
        _bind_sizes(values, param.shape, tensor.shape)
        _bind_sizes(values, param.strides or (), tensor.stride())
    for param, argument in zip(lowered.params, arguments, strict=True):
        if isinstance(argument, torch.Tensor) and param.shape is not None:
            _check_sizes(lowered.name, param, argument, values)
    return values


def _tensor(function: str, param: Param, argument: Argument) -> torch.Tensor:
    if not isinstance(argument, torch.Tensor):
        raise TypeError(f"{function}: {param.name} must be a tensor, got {type(argument).__name__}")
    if argument.device.type != "cpu":
        raise ValueError(f"{function}: {param.name} must be on the CPU, got {argument.device}")
    allowed = _DTYPES.get(param.dtype) or (getattr(torch, param.dtype),)
    if argument.dtype not in allowed:
        raise TypeError(f"{function}: {param.name} must be {' or '.join(map(str, allowed))}, got {argument.dtype}")
    if argument.dim() != len(param.shape or ()):
        raise ValueError(f"{function}: {param.name} must have shape {param.shape}, got {tuple(argument.shape)}")
    return argument


def _bind_sizes(values: dict[str, Argument], names: Sequence[int | str], sizes: Sequence[int]) -> None:
    for name, size in zip(names, sizes, strict=True) if names else ():
        if isinstance(name, str) and name.isidentifier():
            values.setdefault(name, size)


def _check_sizes(function: str, param: Param, tensor: torch.Tensor, values: dict[str, Argument]) -> None:
    expected = tuple(_evaluate(str(s), values) for s in param.shape or ())
    if tuple(tensor.shape) != _packed(param, expected):
        raise ValueError(
            f"{function}: {param.name} must have shape {param.shape} = {expected}, got {tuple(tensor.shape)}"
        )
    if param.strides is None:
        if not tensor.is_contiguous():
            raise ValueError(f"{function}: {param.name} must be contiguous, got strides {tensor.stride()}")
        return
    strides = tuple(_evaluate(str(s), values) for s in param.strides)
    for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True):
        if size > 1 and stride != wanted:
            raise ValueError(
                f"{function}: {param.name} must have strides {param.strides} = {strides}, got {tensor.stride()}"
            )


def _packed(param: Param, shape: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Two 4-bit elements share a byte of the tensor."""
    if param.dtype != "float4_e2m1fn" or not shape:
        return shape
    last = shape[-1]
    return (*shape[:-1], (last + 1) // 2 if isinstance(last, int) else last)


def _run_kernel(
    program: Program, kernel: Kernel, arguments: Sequence[Argument], blocks: Argument, options: Options
) -> Counts | None:
    """None when there is nothing to launch."""
    if not isinstance(blocks, int) or blocks < 0:
        raise ValueError(f"{kernel.name}: blocks must be a number of at least 0, got {blocks!r}")
    if len(arguments) != len(kernel.parameters):
        names = [p.name for p in kernel.parameters]
        raise TypeError(f"{kernel.name} takes {len(names)} arguments {names}, got {len(arguments)}")
    if blocks == 0:
        return None
    library = load(program.library)
    native = runtime()
    with _one_at_a_time, _global_memory(native, kernel, arguments) as addresses:
        cells = [_cell(kernel, p, a, addresses) for p, a in zip(kernel.parameters, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        entry = ctypes.cast(getattr(library, f"emu_entry_{kernel.name}"), ctypes.c_void_p)
        request = _Request(
            kernel.name.encode(),
            entry,
            ctypes.cast(pointers, ctypes.c_void_p),
            blocks,
            kernel.kind,
            int(kernel.concurrent),
            kernel.ub_bytes,
            _MODES[options.mode],
            int(options.check_vector_order),
            options.seed,
        )
        native.emu_launch(ctypes.byref(request))
        reports = [native.emu_report(i).decode() for i in range(native.emu_report_count())]
        if reports:
            raise EmulatorError(reports)
        traffic = {
            (pipe, memory, direction): native.emu_traffic(number, is_global, written)
            for number, pipe in enumerate(PIPES)
            for is_global, memory in enumerate(("local", "global"))
            for written, direction in enumerate(("read", "written"))
        }
        notes = tuple(native.emu_note(i).decode() for i in range(native.emu_note_count()))
        return Counts(
            kernel,
            blocks,
            traffic,
            native.emu_vector_instructions(),
            native.emu_multiplications(),
            {
                (memory, direction): native.emu_simt_accesses(is_global, written)
                for is_global, memory in enumerate(("local", "global"))
                for written, direction in enumerate(("read", "written"))
            },
            native.emu_simt_threads(),
            native.emu_simt_barriers(),
            notes,
        )


def _cell(kernel: Kernel, parameter: Parameter, argument: Argument, addresses: dict[int, int]) -> Any:
    """One argument in the memory that the entry function reads it from."""
    where = f"{kernel.name}: {parameter.name}"
    if parameter.pointer:
        if argument is None:
            return ctypes.c_void_p(0)
        if not isinstance(argument, torch.Tensor):
            raise TypeError(f"{where} must be a tensor, got {type(argument).__name__}")
        return ctypes.c_void_p(addresses.get(argument.data_ptr(), 0))
    if isinstance(argument, torch.Tensor) or argument is None:
        raise TypeError(f"{where} must be a number, got {type(argument).__name__}")
    if parameter.type not in _SCALARS:
        raise TypeError(f"{where}: parameters of type {parameter.type} are not supported")
    return _SCALARS[parameter.type](argument)


@contextmanager
def _global_memory(native: ctypes.CDLL, kernel: Kernel, arguments: Sequence[Argument]) -> Iterator[dict[int, int]]:
    """Copies of the tensors in the emulator's memory; their contents come back at the end.

    Tensors that overlap share memory. Each range is guarded, and starts as far from a 512-byte boundary as the
    tensor does from its storage's start, which devices align.
    """
    ranges = []
    for parameter, argument in zip(kernel.parameters, arguments, strict=True):
        if isinstance(argument, torch.Tensor) and argument.numel():
            if argument.device.type != "cpu":
                raise ValueError(f"{kernel.name}: {parameter.name} must be on the CPU, got {argument.device}")
            last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
            begin = argument.data_ptr()
            end = begin + (last + 1) * argument.element_size()
            offset = int(argument.storage_offset()) * argument.element_size() % 512
            ranges.append((begin, end, parameter.name, offset))
    merged: list[tuple[int, int, str, int]] = []
    for begin, end, name, offset in sorted(ranges):
        if merged and begin < merged[-1][1]:
            first, last, names, kept = merged[-1]
            merged[-1] = (first, max(last, end), f"{names}/{name}", kept)
        else:
            merged.append((begin, end, name, offset))
    addresses: dict[int, int] = {}
    bound: list[tuple[int, int]] = []
    try:
        for begin, end, name, offset in merged:
            address = native.emu_bind(name.encode(), ctypes.c_void_p(begin), end - begin, offset)
            bound.append((address, begin))
            for start, *_ in ranges:
                if begin <= start < end:
                    addresses[start] = address + start - begin
        yield addresses
    finally:
        for address, begin in bound:
            native.emu_unbind(ctypes.c_void_p(address), ctypes.c_void_p(begin))
