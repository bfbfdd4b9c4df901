"""The files of xsp and of its collectors, whose syntax trees are parsed once for a file of tests; see conftest.py."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources(*packages: str) -> list[Path]:
    """Return the files of packages beside the tests: `xsp`, `collectors`."""
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    """Return the path of a file from the folder of the repository."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree; collections of garbage leave it out, since all trees are a million objects."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gc.freeze()
    return tree


def forget_trees() -> None:
    tree_of.cache_clear()
    gc.unfreeze()
