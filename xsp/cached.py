"""What takes seconds to find out and stays the same, such as the graph of a named model: kept in the user's cache.

An entry is a file that is named by a hash of all that it depends on, and begins with that hash and one of its text. An
entry that is damaged, or of something else, counts as none: what it held is found out anew, and replaces it. What
depends on the state of a process that has imported PyTorch, which any program may change, is neither kept nor read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xsp import atomic, processes

VARIABLE = "XSP_CACHE"
"""Names the folder of the entries; nothing is kept if it is set and empty."""

MOST_BYTES = 256 << 20
"""Of all entries: those that were not used for longest are removed."""

VARIABLES = re.compile(
    r"(AT|ATEN|CUDA|CUDNN|CUBLAS|DNNL|GOMP|HIP|KINETO|KMP|MKL|NVIDIA|OMP|ONEDNN|PYTORCH|TIMM|TORCH|TORCHVISION|"
    r"TRANSFORMERS|USE)_\w+|LD_PRELOAD|LD_LIBRARY_PATH"
)
"""Variables that change what those libraries do."""

DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""In `/dev`: where there is one of them, only PyTorch can tell which devices there are."""

_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".pth")

_before_torch: dict[str, Any] | None = None
"""What `software` last found in this process."""


def user_folder() -> Path:
    """Return the folder for xsp in the user's cache; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "xsp"


def default_folder() -> Path | None:
    """Return where entries are kept; None where they are not."""
    named = os.environ.get(VARIABLE)
    if named is None:
        with contextlib.suppress(RuntimeError):  # no home
            return user_folder() / "cached"
        return None
    return Path(named).expanduser() if named else None


def software(*packages: str) -> dict[str, Any] | None:
    """Return what decides how these packages behave in a fresh process; no package is imported.

    Args:
        packages: of those beside PyTorch and xsp.

    Returns:
        Versions of Python and of all installed distributions, the files of the packages, the processor, variables;
        None where PyTorch is imported already or a package cannot be found.
    """
    if "torch" in sys.modules:
        return None
    global _before_torch
    try:
        origins = {name: _origin(name) for name in ("torch", "xsp", *packages)}
        found: dict[str, Any] = {
            "python": [sys.version, platform.machine(), platform.system(), platform.release()],
            "processor": _processor(),
            "installed": sorted(_installed()),
            "packages": {
                name: [str(origin), _files(origin, whole=name != "torch")] for name, origin in origins.items()
            },
            "variables": _variables(),
        }
    except (OSError, ValueError, ImportError):
        return None
    _before_torch = {**found, "packages": {name: found["packages"][name] for name in ("torch", "xsp")}}
    return found


def software_before_torch() -> dict[str, Any] | None:
    """Return what `software()` found, or would have, when this process had not imported PyTorch yet.

    For what no program changes once PyTorch is imported, as its version.

    Returns:
        As `software()`; None where `software` was not asked in time, or variables have changed since.
    """
    if "torch" not in sys.modules:
        return software()
    return _before_torch if _before_torch is not None and _before_torch["variables"] == _variables() else None


def has_devices() -> bool:
    """Return whether this machine has a device that PyTorch may use."""
    return any(True for pattern in DEVICES for _ in Path("/dev").glob(pattern))


def read(kind: str, of: Mapping[str, Any] | None) -> str | None:
    """Return the text of an entry; None where there is none that is whole.

    Args:
        kind: of which there are entries: "graph".
        of: all that the text depends on, as plain values; None has no entry.
    """
    place = _place(kind, of)
    if place is None:
        return None
    try:
        head, _, text = place.read_text(encoding="ascii").partition("\n")
        if head != _head(place, text):
            return None
        os.utime(place)
    except (OSError, ValueError):
        return None
    return text


def keep(kind: str, of: Mapping[str, Any] | None, text: str) -> None:
    """Keep a text of ASCII letters as `read` finds it; where the folder cannot be written, nothing happens."""
    place = _place(kind, of)
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic.written(place, flush=False) as beside:
            beside.write_text(f"{_head(place, text)}\n{text}", encoding="ascii")
        _prune(place.parent)


def _place(kind: str, of: Mapping[str, Any] | None) -> Path | None:
    folder = default_folder()
    if of is None or folder is None:
        return None
    return folder / f"{kind}-{_hash(json.dumps([kind, of], sort_keys=True))}.json"


def _head(place: Path, text: str) -> str:
    return json.dumps({"xsp_cached": place.stem, "hash": _hash(text)})


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _prune(folder: Path) -> None:
    """Remove the entries that were not used for longest, until the others fit."""
    found = sorted(((each.stat(), each) for each in folder.glob("*-*.json")), key=lambda each: -each[0].st_mtime)
    total = 0
    for status, each in found:
        total += status.st_size
        if total > MOST_BYTES:
            each.unlink(missing_ok=True)


def _variables() -> list[tuple[str, str]]:
    return sorted(each for each in os.environ.items() if VARIABLES.fullmatch(each[0]))


def _origin(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(package)
    return Path(found.origin).parent


def _installed() -> Iterator[str]:
    """Yield the names of distributions, with their versions, and what else changes the path of modules."""
    for place in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith(_INSTALLED):
                    yield f"{place}/{name}"


def _files(folder: Path, whole: bool) -> str:
    """Return a hash of the source files of a package: names, sizes, times of change; of its version alone if large."""
    paths = sorted(_sources(str(folder))) if whole else [str(folder / "version.py"), str(folder / "__init__.py")]
    told = []
    for path in paths:
        status = os.stat(path)
        told.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return _hash("\n".join(told))


def _sources(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                yield from _sources(entry.path)
            elif entry.name.endswith((".py", ".so")):
                yield entry.path


def _processor() -> list[Any]:
    """Return name and instructions of the processor, and how many cores this process may use."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor(), processes.cores()]
    return [
        *(line for line in first if line.startswith(("model name", "flags", "Features", "CPU part"))),
        processes.cores(),
    ]
