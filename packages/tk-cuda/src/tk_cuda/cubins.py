"""Pack a filled kernel cache as the wheel ``tk-cuda-cubins``: ``python -m tk_cuda.cubins --out dist``.

With the wheel installed, machines without nvcc run the kernels that it holds. It serves only the tk-cuda of exactly its
own version, and the architectures, TileLang and host platform that it was filled for.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import sysconfig
import zipfile
from pathlib import Path

from . import cache

NAME = cache.CUBINS.replace("_", "-")
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can hold; equal caches give equal wheels


def build_wheel(cache_dir: str | Path, out_dir: str | Path) -> Path:
    """Write the wheel.

    Args:
        cache_dir: folder of kernels, such as ``~/.cache/tk/cuda`` after ``tk precompile``.
        out_dir: where the wheel goes; made if missing.

    Returns:
        The wheel's path.

    Raises:
        ValueError: the folder holds no kernels, others can write it, or an entry is damaged.
    """
    folder, version = Path(cache_dir), importlib.metadata.version("tk-cuda")
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    info = f"{cache.CUBINS}-{version}.dist-info"
    files = {f"{cache.CUBINS}/__init__.py": f'"""Compiled kernels of tk-cuda {version}."""\n'.encode()}
    files |= {f"{cache.CUBINS}/cuda/{path.name}": path.read_bytes() for path in _entries(folder)}
    files[f"{info}/METADATA"] = _metadata(version)
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tk_cuda\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    target = Path(out_dir)
    target.mkdir(parents=True, exist_ok=True)
    wheel = target / f"{cache.CUBINS}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return wheel


def _entries(folder: Path) -> list[Path]:
    """The libraries of a folder, all sound."""
    if not folder.is_dir():
        raise ValueError(f"cache_dir: {folder} is not a folder")
    reason = cache.untrusted(folder)
    if reason is not None:
        raise ValueError(f"cache_dir: {folder} is not used: {reason}")
    rows = cache.contents(folder)
    for row in rows:
        if row["problem"] is not None:
            raise ValueError(f"cache_dir: {folder / row['file']} is not usable: {row['problem']}")
    if not rows:
        raise ValueError(f"cache_dir: {folder} holds no kernels; fill it with tk precompile")
    return [folder / row["file"] for row in rows]


def _metadata(version: str) -> bytes:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {NAME}",
        f"Version: {version}",
        f"Summary: Compiled kernels of tk-cuda {version}",
        "License: MIT",
        f"Requires-Dist: tk-cuda=={version}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _record(files: dict[str, bytes], own: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return ("\n".join([*lines, f"{own},,"]) + "\n").encode()


def main(argv: list[str] | None = None) -> None:
    """Write the wheel and print its path."""
    parser = argparse.ArgumentParser(prog="python -m tk_cuda.cubins", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=cache.own_folder(), help="folder of kernels (default: the cache)")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where the wheel goes")
    arguments = parser.parse_args(argv)
    print(build_wheel(arguments.cache, arguments.out))


if __name__ == "__main__":
    main()
