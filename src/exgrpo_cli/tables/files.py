"""Atomic writing: a file that exists is complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write for which there is no room."""
_ABANDONED_SECONDS = 3600.0


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in ``path``'s folder that becomes ``path`` when the block succeeds.

    The file is fsynced before the rename and its folder after it (so a power cut leaves the old
    file or the new one). When the block fails, nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:  # from its first moment on: an interrupt may come with it
        with _faults_named(path):
            temporary.touch(exist_ok=False)
            yield temporary
            fsync(temporary)
            temporary.replace(path)
        fsync(path.parent)
        _remove_abandoned(path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _remove_abandoned(path: Path) -> None:
    """What killed writers of the same file have left beside it; others may be at work on it now."""
    pattern = f".{glob.escape(path.name)}.*.tmp"
    # tmp_: DuckDB's own, of earlier versions
    for stale in (*path.parent.glob(pattern), *path.parent.glob(f"tmp_{pattern}")):
        with contextlib.suppress(OSError):
            if time.time() - stale.stat().st_mtime > _ABANDONED_SECONDS:
                stale.unlink()


def remove_abandoned(root: Path) -> None:
    """What killed writers have left anywhere below a folder, where it is an hour old."""
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            if name.startswith(".") and name.endswith((".tmp", ".rows", ".parts")):
                stale = Path(folder) / name
                with contextlib.suppress(OSError):  # perhaps it has just been finished
                    if time.time() - stale.stat().st_mtime > _ABANDONED_SECONDS:
                        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that becomes ``path`` when the block succeeds.

    All files in it are fsynced first. What lay at ``path`` is replaced, and is never there in part.
    What an earlier, killed writer of the same folder left behind is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = _temporary(path)
    try:
        temporary.mkdir(0o700)
        temporary.chmod(path.parent.stat().st_mode & 0o777)
        with _faults_named(path):
            yield temporary
        mask = umask()
        for folder, _, files in os.walk(temporary):
            for file in [Path(folder) / name for name in files]:
                if file.stat().st_nlink == 1:  # a linked one is another folder's too
                    # safetensors writes for its owner alone; others on a cluster read policies too.
                    file.chmod(0o666 & ~mask)
                    fsync(file)
            fsync(Path(folder))
        replaced = _put_aside(path) if path.exists() else None
        temporary.replace(path)
        fsync(path.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def link_file(source: Path, target: Path) -> bool:
    """Put a file into another place too: a hard link (then True), or a copy where there can be
    none."""
    if target.exists():
        linked = target.samefile(source)
        if not linked and target.read_bytes() != source.read_bytes():
            raise InputError(f"{target}: is there already and differs from {source}")
        return linked
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        with atomic_path(target) as temporary:
            shutil.copyfile(source, temporary)
        return False
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill never leaves a part of it under its name."""
    shutil.rmtree(_put_aside(path), ignore_errors=True)


def _put_aside(path: Path) -> Path:
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    path.replace(aside)  # an empty folder gives way
    fsync(path.parent)
    return aside


@contextlib.contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """A full disk, quota or file size limit as an OSError that names the file, and so what else
    cannot be written, which Python says of the temporary file.

    Of a full disk Python's own has no name, and polars and safetensors raise errors of their own.
    """
    try:
        yield
    except Exception as error:
        for number in FULL:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        if isinstance(error, OSError) and str(error.filename).endswith(".tmp"):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def umask() -> int:
    """The process's umask (reading it means setting it for a moment)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def fsync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (UTF-8)."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """A JSON file that holds an object; ``mend`` says what to do where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path}: damaged; {mend}")
    return found


def finite_or_none(value: Any) -> Any:
    """A value as JSON can have it: a float that is not finite becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
