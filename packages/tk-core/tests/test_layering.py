"""Who may import whom, read off the source (docs/architecture.md)."""

from __future__ import annotations

import ast
import pathlib

import pytest

PACKAGES = pathlib.Path(__file__).parents[2]
CORE = PACKAGES / "tk-core" / "src" / "tk_core"
ROOMS = {"reference", "cases", "layers", "conformance", "bench", "cli"}


def imports(path: pathlib.Path) -> list[tuple[str, bool]]:
    """Absolute names of the modules that a file imports, and whether at module level."""
    tree = ast.parse(path.read_text())
    source = next(p for p in path.parents if p.name == "src")
    package = path.relative_to(source).with_suffix("").parts[:-1]
    top = {id(n) for n in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.name, id(node) in top) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            found.append((module, id(node) in top))
            found += [(f"{module}.{a.name}", id(node) in top) for a in node.names]
    return found


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*.py"))


def names(paths):
    return [str(p.relative_to(PACKAGES)) for p in paths]


INTERFACES = [
    p for p in files(CORE) if p.relative_to(CORE).parts[0] not in ROOMS and len(p.relative_to(CORE).parts) > 1
]
REFERENCES = files(CORE / "reference")
CASES = files(CORE / "cases")
BACKENDS = [p for name in ("tk-cuda", "tk-ascend") for p in files(PACKAGES / name / "src")]


@pytest.mark.parametrize("path", INTERFACES, ids=names(INTERFACES))
def test_interfaces_know_no_reference_and_no_backend(path):
    for name, _ in imports(path):
        assert not name.startswith(("tk_core.reference", "tk_core.cases", "tk_cuda", "tk_ascend", "tilelang")), name


@pytest.mark.parametrize("path", REFERENCES, ids=names(REFERENCES))
def test_references_are_plain_pytorch(path):
    for name, _ in imports(path):
        if name.startswith("tk_"):
            assert name.startswith(("tk_core.formats", "tk_core.reference")), name
        assert not name.startswith(("tilelang", "triton", "numpy")), name


@pytest.mark.parametrize("path", CASES, ids=names(CASES))
def test_cases_know_no_backend(path):
    for name, _ in imports(path):
        if name.startswith("tk_"):
            allowed = ("tk_core.formats", "tk_core.reference", "tk_core.cases", "tk_core.backend", "tk_core.errors")
            assert name.startswith(allowed), name


@pytest.mark.parametrize("path", BACKENDS, ids=names(BACKENDS))
def test_a_kernel_cannot_be_the_reference_in_disguise(path):
    for name, top in imports(path):
        if name.startswith("tk_core"):
            allowed = ("tk_core.backend", "tk_core.config", "tk_core.errors", "tk_core.formats")
            tools = {"ci.py", "precompile.py", "inspect.py"}  # commands for developers, not kernels
            assert name == "tk_core" or name.startswith(allowed) or path.name in tools, name
            assert not name.startswith("tk_core.reference"), name
        assert not (top and name.split(".")[0] in ("tilelang", "tvm")), f"{name} at module level"


@pytest.mark.parametrize("path", files(CORE), ids=names(files(CORE)))
def test_nobody_in_core_imports_a_compiler_or_a_backend(path):
    for name, _ in imports(path):
        assert name.split(".")[0] not in ("tilelang", "tvm", "tk_cuda", "tk_ascend"), name


@pytest.mark.parametrize("path", BACKENDS + files(CORE), ids=names(BACKENDS + files(CORE)))
def test_no_assert_in_packages(path):
    """``python -O`` drops asserts, and they name no argument: user input gets errors."""
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert not lines or path.name.startswith("test_"), lines


def test_every_operator_has_reference_and_cases():
    from tk_core.backend import locate
    from tk_core.cases import cases_of
    from tk_core.conformance.engine import public_function
    from tk_core.op import OPERATORS

    for name in OPERATORS:
        assert locate("tk_core.reference", name, "REFERENCES") is not None, f"{name} has no reference"
        assert cases_of(name) is not None, f"{name} has no cases"
        assert callable(public_function(name))
