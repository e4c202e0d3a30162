"""Where lowered sources and emulator builds are kept between processes."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder ``<cache>/<kind>``, made if need be.

    ``<cache>`` is ``TK_CACHE_DIR``, else ``tk`` in ``XDG_CACHE_HOME``, else ``~/.cache/tk``.

    Raises:
        PermissionError: the folder belongs to another user, or others can write to it.
    """
    root = os.environ.get("TK_CACHE_DIR")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tk"
    folder = base / kind
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # What is in there is run as code.
        raise PermissionError(f"{folder}: others can write to this cache; set TK_CACHE_DIR to a folder of your own")
    return folder


def digest(*parts: str | bytes) -> str:
    """A name for content: equal parts, equal name."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:24]


def write_atomically(path: Path, text: str) -> None:
    """Write a file that other processes see complete or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
