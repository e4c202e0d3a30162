"""Turn AscendC source into C++ that g++ accepts, split so that each half gets the checks it needs.

Vector functions (``__simd_vf__``) check their own memory accesses in the intrinsics. Scalar and SIMT code accesses
memory with plain C++, so it is compiled with ``-fsanitize=thread``, whose hooks the runtime implements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KINDS = {"vector": 0, "cube": 1, "mix": 2}
_UB_BYTES = 248 * 1024
_SIMT_BYTES = 32 * 1024  # of UB, for the context of threads

_KERNEL = re.compile(
    r'^extern "C" __global__ __(?P<kind>vector|cube|mix)__(?:\([^)]*\))? void '
    r"(?:__launch_bounds__\(\d+\) )?(?P<name>\w+)\((?P<parameters>[^\n]*)\) \{[ \t]*$",
    re.MULTILINE,
)
_VECTOR_FUNCTION = re.compile(
    r"^__simd_vf__ inline void (?P<name>\w+)\((?P<parameters>[^\n]*)\) \{$.*?^\}$", re.MULTILINE | re.DOTALL
)
_UB_POINTER = re.compile(r"\(__ubuf__ ([\w ]+?) ?\*\)(\d+);")
_SCATTER = re.compile(r"\bascend_nd2nz_scatter<(\d+), (\d+), (\w+), (\w+)>\((.*?)\);")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its C++ type without address space, and whether it is a pointer."""

    name: str
    type: str
    pointer: bool


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function of the source."""

    name: str
    parameters: tuple[Parameter, ...]
    kind: int
    concurrent: bool
    ub_bytes: int


@dataclass(frozen=True)
class Translation:
    """C++ of the vector functions (None: there are none), of everything else, and the kernels in it."""

    vector: str | None
    scalar: str
    kernels: tuple[Kernel, ...]


def translate(source: str) -> Translation:
    """Translate AscendC source as TileLang generates it. Raises ValueError when it has no kernel."""
    kernels = _kernels(source)
    text = _UB_POINTER.sub(r"(\1 *)(emu::ub() + \2);", source)
    text, functions, prototypes = _extract_vector_functions(text)
    includes = "\n".join(dict.fromkeys(re.findall(r"^#include .*$", text, re.MULTILINE)))
    scalar = _declare(text, prototypes) + "\n" + "\n".join(_entry(k) for k in kernels)
    vector = f"{includes}\n" + "\n\n".join(functions) + "\n" if functions else None
    return Translation(vector, scalar, kernels)


def _kernels(source: str) -> tuple[Kernel, ...]:
    found = list(_KERNEL.finditer(source))
    if not found:
        raise ValueError('source: no kernel found; expected functions declared extern "C" __global__ ...')
    ends = [match.start() for match in found[1:]] + [len(source)]
    kernels = []
    for match, end in zip(found, ends, strict=True):
        body = source[match.end() : end]
        parameters = tuple(_parameter(p) for p in match["parameters"].split(",") if p.strip())
        ub_bytes = _UB_BYTES - (_SIMT_BYTES if "asc_vf_call<" in body else 0)
        kernels.append(Kernel(match["name"], parameters, _KINDS[match["kind"]], "asc_sync_inter_" in body, ub_bytes))
    return tuple(kernels)


def _parameter(text: str) -> Parameter:
    declaration, name = text.strip().rsplit(" ", 1)
    declaration += "*" * name.count("*")
    kept = [word for word in declaration.split() if word not in ("__gm__", "__restrict__", "__grid_constant__")]
    return Parameter(name.lstrip("*"), " ".join(kept), "*" in declaration)


def _extract_vector_functions(text: str) -> tuple[str, list[str], list[str]]:
    """Take the vector functions out; their calls become work for the vector pipe."""
    functions, prototypes, names = [], [], []
    for match in _VECTOR_FUNCTION.finditer(text):
        names.append(match["name"])
        functions.append(match[0].replace("__simd_vf__ inline void", "void", 1))
        prototypes.append(f"void {match['name']}({match['parameters']});")
    text = _VECTOR_FUNCTION.sub("", text)

    def scatter(match: re.Match[str]) -> str:
        rows, columns, source, target, arguments = match.groups()
        name = f"emu_nd2nz_{rows}_{columns}_{source}_{target}"
        parameters = f"{source} *from, {target} *to"
        if name not in names:
            names.append(name)
            call = f"ascend_nd2nz_scatter<{rows}, {columns}, {source}, {target}>(from, to);"
            functions.append(f"void {name}({parameters}) {{ {call} }}")
            prototypes.append(f"void {name}({parameters});")
        return f"{name}({arguments});"

    text = _SCATTER.sub(scatter, text)
    for name in names:
        call = rf"\b{name}\((.*?)\);"
        text = re.sub(call, rf'emu::issue(PIPE_V, "{name}", [=] {{ {name}(\1); }});', text)
    return text, functions, prototypes


def _declare(text: str, prototypes: list[str]) -> str:
    """Put prototypes after the last include."""
    if not prototypes:
        return text
    includes = list(re.finditer(r"^#include .*$", text, re.MULTILINE))
    at = includes[-1].end() if includes else 0
    return text[:at] + "\n" + "\n".join(prototypes) + "\n" + text[at:]


def _entry(kernel: Kernel) -> str:
    """A function with one signature for all kernels."""
    arguments = ", ".join(f"*static_cast<{p.type} *>(a[{i}])" for i, p in enumerate(kernel.parameters))
    return f'extern "C" void emu_entry_{kernel.name}(void **a) {{ {kernel.name}({arguments}); }}'
