"""Make a checkout importable as if it were installed, entry points included, without pip, a network, or a build.

    python entry_points.py SITE [WHEELS]

SITE, a folder for PYTHONPATH, gets a `.dist-info` of xsp made of pyproject.toml, and the contents of those wheels
whose package is not installed.
"""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]


def unpack(wheels: Path, site: Path) -> None:
    """Unpack what is missing."""
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            print(f"{name}: {metadata.version(name)} is installed, {wheel.name} is left alone")
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)
            print(f"{name}: unpacked {wheel.name}")


def register(site: Path) -> None:
    """Write the `.dist-info` of xsp, so that its plugins are found."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version: dict[str, str] = {}
    exec((REPOSITORY / "xsp" / "version.py").read_text(encoding="utf-8"), version)
    info = site / f"xsp-{version['__version__']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: xsp\nVersion: {version['__version__']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for folder in sys.argv[2:]:
        unpack(Path(folder), place)
    register(place)
