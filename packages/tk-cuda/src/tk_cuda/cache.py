"""Kernels on disk: entries that heal, that only their owner can have written, and that name what they were made from.

An entry is one shared library followed by a record (JSON), a checksum of both, and a mark; the dynamic linker ignores
what follows the library. Its name holds the builder, the architecture and a digest of everything that decides the
machine code except the CUDA toolkit, whose version follows: a machine without nvcc takes what it finds, one with nvcc
takes from its own folder only what its nvcc would make.

Folders, in the order of search:

- ``TK_CACHE_DIR``, else ``$XDG_CACHE_HOME/tk``, else ``~/.cache/tk``: read and written;
- the folders of ``TK_CACHE_PATH``, separated by colons: read only;
- the installed package ``tk_cuda_cubins``, if it was made for this version of tk-cuda: read only.

A cached kernel is code, so a folder or entry is read only if it belongs to this user or root and nobody else can
write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import stat
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
"""Raised when entries of older versions must not be read any more."""

CUBINS = "tk_cuda_cubins"
"""Import name of the wheel that ships a filled cache."""

_RUNTIME = {"tilelang": "tilelang", "tvm_ffi": "apache-tvm-ffi"}
_MARK = b"tk-cuda\x01"
_TAIL = struct.Struct("<Q32s8s")
_VERSION = re.compile(r"-cuda([0-9.]+)\.(?:so|cubin)$")


class Record(NamedTuple):
    """A readable entry: where it is, and what it says of itself."""

    path: Path
    facts: dict[str, Any]
    payload: bytes


class Folder(NamedTuple):
    """A place of entries. ``reason`` says why it is not read."""

    path: Path
    writable: bool
    reason: str | None = None


# ---------------------------------------------------------------------- folders


def own_folder() -> Path:
    """The folder that new kernels are written to."""
    chosen = os.environ.get("TK_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "cuda"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tk" / "cuda"
    except RuntimeError:  # no home folder at all
        return Path("/nonexistent/tk/cuda")


def folders() -> list[Folder]:
    """Every folder, in the order of search."""
    own = own_folder()
    found = [Folder(own, True, untrusted(own) if own.exists() else None)]
    for text in os.environ.get("TK_CACHE_PATH", "").split(":"):
        if text:
            path = Path(text).expanduser()
            path = path / "cuda" if (path / "cuda").is_dir() else path
            found.append(Folder(path, False, untrusted(path) if path.is_dir() else "it does not exist"))
    shipped = _shipped()
    if shipped is not None:
        found.append(shipped)
    return found


def _shipped() -> Folder | None:
    spec = importlib.util.find_spec(CUBINS)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "cuda"
    reason = untrusted(path) if path.is_dir() else "it holds no kernels"
    ours = importlib.metadata.version("tk-cuda")
    try:
        theirs = importlib.metadata.version(CUBINS.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return Folder(path, False, "it has no version; install tk-cuda-cubins as a wheel")
    if theirs != ours:
        reason = f"tk-cuda-cubins {theirs} was made for tk-cuda {theirs}, installed is {ours}"
    return Folder(path, False, reason)


def untrusted(path: Path, status: os.stat_result | None = None) -> str | None:
    """Why code at a path must not be loaded, or None: another owner than this user or root, or writable by others."""
    if status is None:
        status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}, not to you or root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w makes it usable"
    return None


_warned: set[tuple[Path, str]] = set()


def _warn(path: Path, what: str) -> None:
    if (path, what) not in _warned:
        _warned.add((path, what))
        warnings.warn(f"tk_cuda kernel cache: {path} {what}", RuntimeWarning, stacklevel=3)


# ---------------------------------------------------------------------- identity


def source_digest(module_file: Path) -> str:
    """A digest of a kernel's source and of the tk_cuda sources that it imports, wherever they are installed."""
    digest = hashlib.sha256()
    for name, text in sorted(_sources(module_file).items()):
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


_IMPORT = re.compile(rb"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+)", re.MULTILINE)
_PACKAGE = Path(__file__).parent


def _sources(module_file: Path) -> dict[str, bytes]:
    """The text of a module and of what it imports from below tk_cuda, and of tk_core.formats, by a path-free name."""
    inside = module_file.is_relative_to(_PACKAGE)
    first = module_file.relative_to(_PACKAGE).as_posix() if inside else module_file.name
    texts: dict[str, bytes] = {}
    waiting = [(first, module_file)]
    while waiting:
        name, path = waiting.pop()
        if name in texts:
            continue
        texts[name] = _read_source(path)
        for dots, dotted, names in _IMPORT.findall(texts[name]):
            waiting += _imported(path, len(dots), dotted.decode(), names.decode())
    return texts


@functools.cache
def _read_source(path: Path) -> bytes:
    return path.read_bytes()


def _imported(importer: Path, level: int, dotted: str, names: str) -> list[tuple[str, Path]]:
    """Files of one import statement. Modules directly in tk_cuda launch and cache kernels, but do not shape them."""
    parts = dotted.split(".") if dotted else []
    if level == 0 and dotted == "tk_core.formats":
        spec = importlib.util.find_spec(dotted)
        return [("tk_core/formats.py", Path(spec.origin))] if spec is not None and spec.origin else []
    if level == 0:
        if parts[:1] != ["tk_cuda"]:
            return []
        base = _PACKAGE.joinpath(*parts[1:])
    else:
        base = importer.parents[level - 1].joinpath(*parts)
    if not base.is_relative_to(_PACKAGE):
        return []
    words = re.findall(r"\w+", re.sub(r"\bas\s+\w+|#[^\n]*", "", names))
    candidates = [base.with_suffix(".py"), base / "__init__.py", *((base / word).with_suffix(".py") for word in words)]
    return [
        (path.relative_to(_PACKAGE).as_posix(), path)
        for path in candidates
        if path.parent != _PACKAGE and path.is_file()
    ]


@functools.cache
def environment() -> dict[str, str]:
    """What besides source and key decides the machine code of a library; known without importing any compiler.

    Raises:
        NoBackendError: TileLang is not installed.
    """
    try:
        versions = {name: importlib.metadata.version(package) for name, package in _RUNTIME.items()}
    except importlib.metadata.PackageNotFoundError as missing:
        from tk_core.errors import NoBackendError  # here, so that reading a cache does not import torch

        raise NoBackendError(f"tk-cuda needs the package {missing.name}: pip install 'tilelang>=0.1.15,<0.2'") from None
    return {"format": str(FORMAT), **versions, "host": platform.machine()}


def digest_of(facts: dict[str, Any]) -> str:
    """A digest of plain facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def stem_of(identity: dict[str, Any]) -> str:
    """The name of an entry, without the toolkit's version."""
    return f"{identity['builder']}-{identity['arch']}-{digest_of(identity)[:40]}"


# ---------------------------------------------------------------------- entries


def pack(payload: bytes, facts: dict[str, Any]) -> bytes:
    """An entry as bytes."""
    body = payload + json.dumps(facts, sort_keys=True).encode()
    return body + _TAIL.pack(len(body) - len(payload), hashlib.sha256(body).digest(), _MARK)


def read(path: Path, identity: dict[str, Any] | None = None) -> Record | str:
    """Read and verify an entry; a string says what is wrong with it.

    Raises:
        FileNotFoundError: there is none.
    """
    with open(path, "rb") as file:
        reason = untrusted(path, os.fstat(file.fileno()))
        if reason is not None:
            return reason
        data = file.read()
    if len(data) < _TAIL.size:
        return "it is truncated"
    body, tail = data[: -_TAIL.size], data[-_TAIL.size :]
    length, checksum, mark = _TAIL.unpack(tail)
    if mark != _MARK:
        return "it is truncated or no kernel of tk_cuda"
    if length > len(body) or hashlib.sha256(body).digest() != checksum:
        return "its checksum is wrong"
    facts = json.loads(body[len(body) - length :])
    if identity is not None and facts.get("identity") != identity:
        return "it was made from something else than its name says"
    return Record(path, facts, body[: len(body) - length])


def find(stem: str, identity: dict[str, Any], toolkit: str | None, suffix: str = "so") -> Record | None:
    """The first sound entry of a name, in the order of folders.

    Args:
        toolkit: version of the nvcc here, or None without one. With one, the own folder serves only its entries.
    """
    for folder in folders():
        if folder.reason is not None:
            _warn(folder.path, f"is not read: {folder.reason}")
            continue
        for path in _candidates(folder, stem, toolkit, suffix):
            try:
                found = read(path, identity)
            except FileNotFoundError:
                continue
            except OSError as error:
                found = f"it cannot be read: {error}"
            if isinstance(found, Record):
                return found
            discard(path, folder.writable, found)
    return None


def _candidates(folder: Folder, stem: str, toolkit: str | None, suffix: str) -> list[Path]:
    if toolkit is not None and folder.writable:
        return [folder.path / f"{stem}-cuda{toolkit}.{suffix}"]
    paths = list(folder.path.glob(f"{stem}-cuda*.{suffix}"))
    return sorted(paths, key=lambda path: (_toolkit_of(path) == toolkit, _numbers(_toolkit_of(path))), reverse=True)


def _toolkit_of(path: Path) -> str:
    found = _VERSION.search(path.name)
    return found.group(1) if found else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def discard(path: Path, writable: bool, reason: str) -> None:
    """Do not use an entry: say why, and remove it where it can be made anew."""
    removed = False
    if writable:
        with contextlib.suppress(OSError):
            path.unlink()
            removed = True
    _warn(path, f"is {'removed' if removed else 'not read'}: {reason}")


def store(stem: str, toolkit: str, payload: bytes, facts: dict[str, Any], suffix: str = "so") -> Path | None:
    """Publish an entry in the own folder, whole or not at all. None where the folder cannot be written."""
    folder = own_folder()
    if not _prepare(folder):
        return None
    path = folder / f"{stem}-cuda{toolkit}.{suffix}"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(pack(payload, {**facts, "toolkit": toolkit}))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _warn(folder, f"cannot be written: {error}")
        return None
    return path


def _prepare(folder: Path) -> bool:
    """Make the own folder; False where that is impossible or where others could write it."""
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        return untrusted(folder) is None and os.access(folder, os.W_OK)
    except OSError:
        return False


@contextlib.contextmanager
def locked(stem: str) -> Iterator[None]:
    """Hold the lock of an entry's name, so that processes that start together compile it once.

    It is a byte of one file, locked by the operating system: a killed process leaves no lock behind. What it left half
    written is removed here. A process holds one such lock at a time.
    """
    folder = own_folder()
    if not _prepare(folder):
        yield
        return
    place = int(hashlib.sha256(stem.encode()).hexdigest()[:12], 16)
    with contextlib.ExitStack() as stack:
        # On a file system without locks two processes may compile the same kernel, which is harmless.
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(folder / ".lock", "ab"))
            fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
            for leftover in folder.glob(f".{stem}-*.tmp"):
                leftover.unlink()
        yield


# ---------------------------------------------------------------------- reports


def contents(folder: Path) -> list[dict[str, Any]]:
    """The libraries in a folder: file, builder, architecture, toolkit, bytes, and what is wrong, if anything."""
    rows = []
    for path in sorted(folder.glob("*.so")):
        try:
            found = read(path)
        except OSError as error:
            found = f"it cannot be read: {error}"
        sound = isinstance(found, Record)
        identity = found.facts.get("identity", {}) if isinstance(found, Record) else {}
        rows.append(
            {
                "file": path.name,
                "builder": identity.get("builder", ""),
                "arch": identity.get("arch", ""),
                "key": identity.get("key", ""),
                "toolkit": found.facts.get("toolkit", "") if isinstance(found, Record) else "",
                "bytes": path.stat().st_size if path.exists() else 0,
                "problem": None if sound else found,
            }
        )
    return rows


def report() -> list[dict[str, Any]]:
    """Every folder: its path, whether new kernels go there, why it is not read (or None), entries and bytes."""
    rows = []
    for folder in folders():
        entries = contents(folder.path) if folder.reason is None and folder.path.is_dir() else []
        rows.append(
            {
                "path": str(folder.path),
                "writable": folder.writable and os.access(_existing(folder.path), os.W_OK),
                "reason": folder.reason,
                "entries": len(entries),
                "bytes": sum(row["bytes"] for row in entries),
                "damaged": sum(row["problem"] is not None for row in entries),
                "builders": sorted({row["builder"] for row in entries} - {""}),
                "archs": sorted({row["arch"] for row in entries} - {""}),
            }
        )
    return rows


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
