"""The version of the distribution, in the one place that the build and the runs read it from, and its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__version__ = "0.1.0"

COMMIT_FILE = "commit.txt"
"""File of the package with the commit that a wheel or an sdist was built from; `setup.py` writes it, none is in git."""


def with_commit() -> str:
    """Return the version and, where it is known, the commit: `0.1.0 (7c088b6b)`."""
    from pathlib import Path

    commit = commit_of_package(Path(__file__).resolve().parent)
    return f"{__version__} ({commit})" if commit else __version__


def commit_of_package(package: Path) -> str | None:
    """Return the commit that a folder `xsp` is of, or None if that is not known.

    A checkout asks git, and marks changes to tracked files by `-dirty`. What was built has a file with the commit.
    """
    import subprocess

    checkout = package.parent
    # an environment inside another repository is no checkout of xsp
    if (checkout / ".git").exists() and (checkout / "pyproject.toml").is_file():
        command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.SubprocessError):  # there is no git, or it hangs
            return None
        return (result.stdout.strip() or None) if result.returncode == 0 else None
    try:
        return (package / COMMIT_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):  # built outside git, or damaged
        return None
