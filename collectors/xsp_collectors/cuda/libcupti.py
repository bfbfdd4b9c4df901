"""The place and version of libcupti, and whether driver and binding are compatible with it.

They are found without loading it and without importing `cupti`: the search must neither take CUPTI nor touch a device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

Version = tuple[int, ...]

_LIBRARY = "libcupti.so"
_WHEELS = ("nvidia/cu*/lib", "nvidia/cuda_cupti/lib")
_TOOLKIT = "extras/CUPTI/lib64"
_MOST_PARENTS = 6
"""Number of folders above a library in which a toolkit's `version.json` is looked for."""

_FIRST_YEAR = 2000
_PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12")


class Parts(NamedTuple):
    """The parts of CUPTI in Python; a part is None if it is absent or its version is unknown."""

    driver: Version | None
    """The newest CUDA version that the driver supports."""

    library: Path | None
    library_version: Version | None
    binding: Version | None
    """Version of cupti-python."""


def parts() -> Parts:
    """Return the parts that this process would use, without loading any of them but the driver's library."""
    path = find_library()
    return Parts(driver_version(), path, _library_version(path), _package_version("cupti-python"))


def incompatibility(components: Parts) -> str | None:
    """Return why these parts cannot work together and a remedy, or None."""
    if components.binding is None:
        return "cupti-python is not installed: pip install --no-deps cupti-python (docs/use/gpu.md says which version)"
    if components.driver is None:
        return "there is no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    if components.library is None:
        return "libcupti is not found: pip install nvidia-cuda-cupti, or put the CUDA toolkit's on LD_LIBRARY_PATH"
    version = components.library_version
    binding, library, driver = map(format_version, (components.binding, version, components.driver))
    if version is not None and version[:1] != components.binding[:1]:
        return (
            f"cupti-python {binding} and libcupti {library} are of different CUDA versions: "
            f"pip install --no-deps 'cupti-python~={version[0]}.{(*version, 0)[1]}.0'"
        )
    if version is not None and components.driver[0] < version[0]:
        return f"the driver supports CUDA {driver}, libcupti is of {library}: update the driver"
    return None


def mismatch(components: Parts) -> str | None:
    """Return a sentence if binding and library are of different minor versions: their records may differ."""
    version = components.library_version
    if version is None or components.binding is None or version[:2] == components.binding[: len(version[:2])]:
        return None
    binding, library = format_version(components.binding), format_version(version)
    return f"cupti-python {binding} reads the records of libcupti {library}; a trial decides"


def find_library() -> Path | None:
    """Return the libcupti that this process uses: the one mapped already, else torch's, else a toolkit's."""
    return _mapped_library() or _wheel_library() or _toolkit_library()


def driver_version() -> Version | None:
    """Return the newest CUDA version that the driver supports; None without a driver. It initializes nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def format_version(version: Version | None) -> str:
    """Return a version with dots, or `unknown`."""
    return ".".join(map(str, version)) if version is not None else "unknown"


def _mapped_library() -> Path | None:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in lines if _LIBRARY in line)
    return next((Path(path) for path in paths if Path(path).name.startswith(_LIBRARY)), None)


def _wheel_library() -> Path | None:
    """Return the library in NVIDIA's wheels, which torch links against."""
    for root in _wheel_roots():
        for pattern in _WHEELS:
            for path in sorted(root.glob(f"{pattern}/{_LIBRARY}.*"), reverse=True):
                return path
    return None


def _wheel_roots() -> list[Path]:
    """Return the folders in which NVIDIA's wheels are installed."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(root).parent for root in (spec.submodule_search_locations or ())] if spec is not None else []


def _toolkit_library() -> Path | None:
    folders = [Path(os.environ[name]) / _TOOLKIT for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    folders.append(Path("/usr/local/cuda") / _TOOLKIT)
    for folder in folders:
        for path in sorted(folder.glob(f"{_LIBRARY}.*"), reverse=True):
            return path
    return None


def _library_version(path: Path | None) -> Version | None:
    """Return the version of the CUDA release that the library is part of; None if nothing states it.

    A wheel has it in its metadata, a toolkit in `version.json`. The name of a toolkit's file has the year of CUPTI's
    own version (`libcupti.so.2025.1.1` of CUDA 12.8); links to it, such as `libcupti.so.12`, have the major version.
    """
    if path is None:
        return None
    resolved = path.resolve()
    if any(resolved.is_relative_to((root / "nvidia").resolve()) for root in _wheel_roots()):
        for package in _PACKAGES:
            if (version := _package_version(package)) is not None:
                return version
    for folder in list(resolved.parents)[:_MOST_PARENTS]:
        if (version := _toolkit_version(folder / "version.json")) is not None:
            return version
    names = [resolved, path, *(link for link in path.parent.glob(f"{_LIBRARY}.*") if link.resolve() == resolved)]
    versions = (_numbers(name.name.removeprefix(f"{_LIBRARY}.")) for name in names)
    return next((version for version in versions if version is not None and version[0] < _FIRST_YEAR), None)


def _toolkit_version(path: Path) -> Version | None:
    """Return the version of CUPTI that a toolkit states; None if it states none, or the file is not readable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _numbers(str(content["cuda_cupti"]["version"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _package_version(package: str) -> Version | None:
    try:
        return _numbers(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> Version | None:
    numbers = [part for part in text.split(".") if part.isdigit()]
    return tuple(int(part) for part in numbers) or None
