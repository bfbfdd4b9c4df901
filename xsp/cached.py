"""A cache in the user's folder for results that take seconds and do not change, such as the graph of a named model.

An entry is a file or a folder named by a hash of everything that it depends on. A file begins with that hash and a hash
of its text, a folder has them in a list of its files. A damaged or foreign entry counts as missing: the result is
computed again and replaces it. Results that depend on the state of a process that has imported PyTorch, which any
program may change, are neither stored nor read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xsp import atomic, processes

VARIABLE = "XSP_CACHE"
"""Environment variable with the folder of the entries; nothing is cached if it is set and empty."""

MAX_BYTES = 256 << 20
"""Limit for all entries that are files together, in bytes; beyond it the least recently used ones are removed."""

MAX_FOLDER_BYTES = 1 << 30
"""The same for entries that are folders; as many bytes must be free on the disk for one to be stored."""

FILES = "cached.json"
"""File in a folder that lists its other files."""

TORCH_VARIABLES = re.compile(
    r"(AT|ATEN|CUDA|CUDNN|CUBLAS|DNNL|GOMP|HIP|KINETO|KMP|MKL|NVIDIA|OMP|ONEDNN|PYTORCH|TIMM|TORCH|TORCHVISION|"
    r"TRANSFORMERS|USE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
"""Environment variables that change the behaviour of PyTorch and its libraries."""

_DISTRIBUTION_SUFFIXES = (".dist-info", ".egg-info", ".egg-link", ".pth")

_before_torch: dict[str, Any] | None = None
"""The last result of `software` in this process, with the packages torch and xsp only."""


def user_folder() -> Path:
    """Return xsp's folder in the user's cache; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "xsp"


def default_folder() -> Path | None:
    """Return the folder of the entries; None if nothing is cached."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        with contextlib.suppress(RuntimeError):  # the user has no home directory
            return user_folder() / "cached"
        return None
    return Path(setting).expanduser() if setting else None


def software(*packages: str) -> dict[str, Any] | None:
    """Return everything that determines how these packages behave in a fresh process, without importing any.

    Args:
        packages: names of packages besides PyTorch and xsp.

    Returns:
        Versions of Python and of all installed distributions, the files of the packages, the processor and the
        environment variables; None if PyTorch is imported already or a package cannot be found.
    """
    if "torch" in sys.modules:
        return None
    global _before_torch
    try:
        origins = {name: _origin(name) for name in ("torch", "xsp", *packages)}
        facts: dict[str, Any] = {
            "python": [sys.version, platform.machine(), platform.system(), platform.release()],
            "processor": _processor(),
            "installed": sorted(_distributions()),
            "packages": {
                name: [str(origin), _fingerprint(origin, all_sources=name != "torch")]
                for name, origin in origins.items()
            },
            "variables": _variables(),
        }
    except (OSError, ValueError, ImportError):
        return None
    _before_torch = {**facts, "packages": {name: facts["packages"][name] for name in ("torch", "xsp")}}
    return facts


def software_before_torch() -> dict[str, Any] | None:
    """Return what `software()` returned, or would have returned, before this process imported PyTorch.

    Use it for facts that no program changes after the import of PyTorch, such as its version.

    Returns:
        As `software()`; None if `software` was not called before the import, or variables have changed since.
    """
    if "torch" not in sys.modules:
        return software()
    return _before_torch if _before_torch is not None and _before_torch["variables"] == _variables() else None


def read(kind: str, key: Mapping[str, Any] | None) -> str | None:
    """Return the text of an entry; None if there is no intact entry.

    Args:
        kind: kind of the entry, such as "graph".
        key: everything that the text depends on, as plain values; None has no entry.
    """
    path = _entry_path(kind, key)
    if path is None:
        return None
    try:
        header, _, text = path.read_text(encoding="ascii").partition("\n")
        if header != _head(path, text):
            return None
        os.utime(path)
    except (OSError, ValueError):
        return None
    return text


def store(kind: str, key: Mapping[str, Any] | None, text: str) -> None:
    """Store an ASCII text for `read`; do nothing if the folder cannot be written."""
    path = _entry_path(kind, key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic.replacing(path, flush=False) as temporary:
            temporary.write_text(f"{_head(path, text)}\n{text}", encoding="ascii")
        _prune(path.parent)


class Folder(NamedTuple):
    """An entry that is a folder."""

    path: Path
    lock: int
    """Descriptor that keeps other processes from removing the folder until it is closed."""


def open_folder(kind: str, key: Mapping[str, Any] | None) -> Folder | None:
    """Return an entry that `store_folder` stored; None if there is no intact one of this user.

    Args:
        kind: kind of the entry, such as "import".
        key: everything that its content depends on, as plain values; None has no entry.
    """
    path = _entry_path(kind, key, "")
    if path is None:
        return None
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        _lock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_uid == os.geteuid() and _is_intact(path):
            os.utime(path)
            return Folder(path, lock)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    os.close(lock)
    return None


def store_folder(kind: str, key: Mapping[str, Any] | None, fill: Callable[[Path], object]) -> None:
    """Store a folder for `open_folder`; do nothing if it cannot be written, or the disk has little room.

    Only the user can read it. Processes that store the same entry at the same time do not disturb each other.

    Args:
        kind: kind of the entry.
        key: as for `open_folder`.
        fill: writes files and folders into the empty folder that it is given.
    """
    path = _entry_path(kind, key, "")
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < MAX_FOLDER_BYTES:
            return
        temporary = atomic.temporary_path(path)
        try:
            temporary.mkdir(mode=0o700)
            fill(temporary)
            files = {str(file.relative_to(temporary)): _state(file) for file in _files(temporary)}
            (temporary / FILES).write_text(json.dumps({"xsp_cached": path.name, "files": files}), encoding="ascii")
            _remove_folder(path)  # a damaged one
            atomic.move_into_place(temporary, path, flush=False)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _prune_folders(path.parent)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if not file.is_dir() and file != folder / FILES]


def _state(file: Path) -> list[Any]:
    """Return the size and the CRC-32 of a file."""
    crc = 0
    with open(file, "rb") as content:
        while chunk := content.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
        return [content.tell(), crc]


def _is_intact(folder: Path) -> bool:
    """Return whether a folder has the files that were stored, and no others."""
    listed = json.loads((folder / FILES).read_text(encoding="ascii"))
    if listed["xsp_cached"] != folder.name:
        return False
    present = _files(folder)
    return {str(file.relative_to(folder)) for file in present} == {*listed["files"]} and all(
        not file.is_symlink() and _state(file) == listed["files"][str(file.relative_to(folder))] for file in present
    )


def _lock(descriptor: int, operation: int) -> None:
    """Lock an open folder, or do nothing on a file system without locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _remove_folder(path: Path) -> None:
    """Remove an entry that is a folder, if there is one and no process has it open."""
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _lock(lock, fcntl.LOCK_EX)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _prune_folders(folder: Path) -> None:
    """Remove the least recently used folders until the others fit into `MAX_FOLDER_BYTES`."""
    entries = [entry for entry in folder.glob("*-*") if entry.is_dir() and not entry.name.startswith(".")]
    total = 0
    for path in sorted(entries, key=lambda entry: -entry.stat().st_mtime):
        total += sum(file.stat().st_size for file in _files(path))
        if total > MAX_FOLDER_BYTES:
            _remove_folder(path)


def content_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal.

    A file that is known by its place, size and times is not read again.

    Raises:
        OSError: it cannot be read.
    """
    with open(file, "rb") as content:
        status = os.fstat(content.fileno())
        times = (status.st_mtime_ns, status.st_ctime_ns)
        key = {"path": str(file.absolute()), "state": [status.st_dev, status.st_ino, status.st_size, *times]}
        known = read("content", key)
        if known is not None:
            return known
        digest = hashlib.sha256()
        while chunk := content.read(1 << 22):
            digest.update(chunk)
        text = digest.hexdigest()
    if time.time_ns() - max(times) > SETTLED_NS:
        store("content", key, text)
    return text


SETTLED_NS = 2_000_000_000
"""Nanoseconds after which another change of a file has other times than the last one, on all file systems."""


def code(package: str) -> list[str]:
    """Return the place of a package's or module's source files, and a hash of their names, sizes and change times.

    Raises:
        ImportError: it cannot be found.
        OSError: it cannot be read.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
        status = os.stat(spec.origin)
        return [spec.origin, f"{status.st_size} {status.st_mtime_ns}"]
    origin = _origin(package)
    return [str(origin), _fingerprint(origin, all_sources=True)]


def _entry_path(kind: str, key: Mapping[str, Any] | None, suffix: str = ".json") -> Path | None:
    folder = default_folder()
    if key is None or folder is None:
        return None
    return folder / f"{kind}-{hash_of(json.dumps([kind, key], sort_keys=True))}{suffix}"


def _head(path: Path, text: str) -> str:
    return json.dumps({"xsp_cached": path.stem, "hash": hash_of(text)})


def hash_of(text: str, nbytes: int = 16) -> str:
    """Return a hash of a text, as two hexadecimal digits for each of its bytes."""
    return hashlib.blake2b(text.encode(), digest_size=nbytes).hexdigest()


def _prune(folder: Path) -> None:
    """Remove the least recently used entries until the others fit into `MAX_BYTES`."""
    entries = sorted(((entry.stat(), entry) for entry in folder.glob("*-*.json")), key=lambda entry: -entry[0].st_mtime)
    total = 0
    for status, path in entries:
        total += status.st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


def _variables() -> list[tuple[str, str]]:
    return sorted(variable for variable in os.environ.items() if TORCH_VARIABLES.fullmatch(variable[0]))


def _origin(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(package)
    return Path(spec.origin).parent


def _distributions() -> Iterator[str]:
    """Yield the distributions, with their versions, and other files that change the module search path."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.endswith(_DISTRIBUTION_SUFFIXES):
                    yield f"{folder}/{name}"


def _fingerprint(folder: Path, all_sources: bool) -> str:
    """Return a hash of names, sizes and change times of a package's source files, all or only those of its version."""
    paths = sorted(_sources(str(folder))) if all_sources else [str(folder / "version.py"), str(folder / "__init__.py")]
    lines = []
    for path in paths:
        status = os.stat(path)
        lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hash_of("\n".join(lines))


def _sources(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                yield from _sources(entry.path)
            elif entry.name.endswith((".py", ".so")):
                yield entry.path


def _processor() -> list[Any]:
    """Return the processor's name and instruction sets, and the number of cores that this process may use."""
    lines = processes.system_text("/proc/cpuinfo").partition("\n\n")[0].splitlines()
    names = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return [*(names if lines else [platform.processor()]), processes.cores()]
