"""Lower TileLang functions to AscendC source, and remember the result on disk.

``lower`` needs TileLang only on a miss: with a warm cache it reads one JSON file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tk_ascend.cache import cache_folder, digest, write_atomically
from tk_core.errors import NoBackendError

_FORMAT = "1"


@dataclass(frozen=True)
class Param:
    """A parameter of the lowered function. ``shape`` is None for a scalar; symbolic sizes are names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None = None
    strides: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch of the function. ``arguments``, ``grid`` and ``condition`` are Python expressions over the
    parameters and the symbolic sizes."""

    kernel: str
    arguments: tuple[str, ...]
    grid: str
    ub_bytes: int
    condition: str = "True"


@dataclass(frozen=True)
class Lowered:
    """AscendC source of a TileLang function, and how to call its kernels in order."""

    name: str
    source: str
    params: tuple[Param, ...]
    launches: tuple[Launch, ...]

    @property
    def grid(self) -> str:
        """Blocks of the first launch, as an expression."""
        return self.launches[0].grid

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Lowered:
        data = json.loads(text)

        def sizes(values: list[int | str] | None) -> tuple[int | str, ...] | None:
            return None if values is None else tuple(values)

        params = tuple(Param(p["name"], p["dtype"], sizes(p["shape"]), sizes(p["strides"])) for p in data["params"])
        launches = tuple(Launch(**{**entry, "arguments": tuple(entry["arguments"])}) for entry in data["launches"])
        return cls(data["name"], data["source"], params, launches)


def lower(function: Any, key: str | None = None) -> Lowered:
    """Lower a TileLang ``PrimFunc`` for Ascend 950, without CANN and on any machine.

    Args:
        function: the ``PrimFunc``, or a function without arguments that makes it (called on a miss only).
        key: identifies the kernel's source and configuration, such as a hash of its file with its parameters.
            None: lower anew, and keep nothing.

    Returns:
        The source with its parameters and launches.

    Raises:
        NoBackendError: TileLang is not installed.
    """
    try:
        compiler = version("tilelang")
    except PackageNotFoundError:
        raise NoBackendError("tk-ascend needs the package tilelang: pip install 'tilelang>=0.1.15,<0.2'") from None
    if key is None:
        return _lower(_resolve(function))
    path = cache_folder("ascend") / f"{digest(_FORMAT, compiler, key)}.json"
    if path.exists():
        return Lowered.from_json(path.read_text())
    lowered = _lower(_resolve(function))
    write_atomically(path, lowered.to_json())
    return lowered


def _resolve(function: Any) -> Any:
    is_prim_func = hasattr(function, "buffer_map")
    return function() if callable(function) and not is_prim_func else function


def _lower(function: Any) -> Lowered:
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target("ascend")
    with tvm.transform.PassContext(opt_level=3), target:
        artifact = tilelang.lower(function, target=target, enable_host_codegen=False, enable_device_compile=False)
    params = tuple(_param(function, var) for var in function.params)
    launches = tuple(_launches(artifact.host_mod, _launch_parameters(artifact.device_mod)))
    if not launches:
        raise ValueError(f"{function.attrs['global_symbol']}: the lowered function launches no kernel")
    return Lowered(str(function.attrs["global_symbol"]), artifact.kernel_source, params, launches)


def _param(function: Any, var: Any) -> Param:
    if var not in function.buffer_map:
        return Param(str(var.name), str(var.dtype))
    buffer = function.buffer_map[var]
    strides = tuple(_expression(s) for s in buffer.strides) or None
    return Param(str(buffer.data.name), str(buffer.dtype), tuple(_expression(s) for s in buffer.shape), strides)


def _launch_parameters(module: Any) -> dict[str, int]:
    """How many values follow the arguments in a call of each kernel: blocks, then bytes of UB where it uses any."""
    return {str(var.name_hint): len(f.attrs["tirx.kernel_launch_params"]) for var, f in module.functions.items()}


def _launches(module: Any, parameters: dict[str, int]) -> list[Launch]:
    """The kernel calls of the host function, in program order, with the conditions around them."""
    from tilelang import tvm

    launches: list[Launch] = []
    kernels = {str(var.name_hint) for var in module.functions}

    def visit(node: Any, conditions: tuple[str, ...], bindings: dict[str, str]) -> None:
        tirx = tvm.tirx
        if isinstance(node, tirx.SeqStmt):
            for child in node.seq:
                visit(child, conditions, bindings)
        elif isinstance(node, tirx.IfThenElse):
            condition = str(_expression(node.condition, bindings))
            visit(node.then_case, (*conditions, condition), bindings)
            if node.else_case is not None:
                visit(node.else_case, (*conditions, f"not ({condition})"), bindings)
        elif isinstance(node, tirx.Evaluate):
            call = node.value
            if isinstance(call, tirx.Call) and str(call.op.name).endswith("call_packed"):
                launches.extend(_launch(call, conditions, bindings, parameters))
        elif hasattr(node, "body"):
            visit(node.body, conditions, bindings)

    for function in module.functions.values():
        visit(function.body, (), {})
    return [launch for launch in launches if launch.kernel not in kernels]


def _launch(
    call: Any, conditions: tuple[str, ...], bindings: dict[str, str], parameters: dict[str, int]
) -> list[Launch]:
    name = str(call.args[0].value)
    if name.startswith("__tvm"):
        return []
    values = [_expression(a, bindings) for a in call.args[1:]]
    first = len(values) - parameters.get(name, 0)
    grid, ub_bytes = (*values[first:], 0)[:2]
    condition = " and ".join(f"({c})" for c in conditions) or "True"
    return [Launch(name, tuple(str(a) for a in values[:first]), str(grid), int(ub_bytes), condition)]


_BINARY = {
    "Add": "({} + {})",
    "Sub": "({} - {})",
    "Mul": "({} * {})",
    "FloorDiv": "({} // {})",
    "FloorMod": "({} % {})",
    "Min": "min({}, {})",
    "Max": "max({}, {})",
    "EQ": "({} == {})",
    "NE": "({} != {})",
    "LT": "({} < {})",
    "LE": "({} <= {})",
    "GT": "({} > {})",
    "GE": "({} >= {})",
    "And": "({} and {})",
    "Or": "({} or {})",
}
_CALLS = {"shift_right": "({} >> {})", "shift_left": "({} << {})", "bitwise_and": "({} & {})"}


def _expression(node: Any, bindings: dict[str, str] | None = None) -> int | str:
    """A scalar TIR expression as Python."""
    kind = type(node).__name__
    if kind == "IntImm":
        return int(node.value)
    if isinstance(node, int):
        return node
    if kind in ("Var", "SizeVar"):
        return (bindings or {}).get(str(node.name), str(node.name))
    if kind == "Cast":
        return _expression(node.value, bindings)
    if kind in ("Div", "Mod"):  # truncated division; sizes are not negative
        return ("({} // {})" if kind == "Div" else "({} % {})").format(
            _expression(node.a, bindings), _expression(node.b, bindings)
        )
    if kind in _BINARY:
        return _BINARY[kind].format(_expression(node.a, bindings), _expression(node.b, bindings))
    if kind == "Not":
        return f"(not {_expression(node.a, bindings)})"
    if kind in ("FloatImm", "StringImm"):
        return repr(node.value)
    if kind == "Select":
        parts = (_expression(n, bindings) for n in (node.true_value, node.condition, node.false_value))
        return "({} if {} else {})".format(*parts)
    if kind == "Call":
        name = str(node.op.name).rsplit(".", 1)[-1]
        if name in _CALLS:
            return _CALLS[name].format(*(_expression(a, bindings) for a in node.args))
        if name == "if_then_else":
            condition, yes, no = (_expression(a, bindings) for a in node.args)
            return f"({yes} if {condition} else {no})"
    raise ValueError(f"cannot evaluate {node} ({kind}) on the host")
