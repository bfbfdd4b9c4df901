"""Revisions of a program, each checked out into a temporary work tree; the user's own work tree is not touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xsp import atomic
from xsp.errors import UsageError

_WITHOUT_HOOKS = ("-c", "core.hooksPath=/dev/null")


@dataclass(frozen=True)
class WorkTree:
    """The directory in which a side runs."""

    folder: Path
    """The working directory."""
    modules: tuple[Path, ...] = ()
    """Directories that are searched first for its modules."""

    def environment(self) -> dict[str, str]:
        """Return variables that let modules come from this tree, even if the user's tree is installed as editable."""
        if not self.modules:
            return {}
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        return {"PYTHONPATH": os.pathsep.join([*map(str, self.modules), *inherited]), "PYTHONDONTWRITEBYTECODE": "1"}


@contextlib.contextmanager
def checkout(revisions: Sequence[str]) -> Iterator[list[WorkTree]]:
    """Check out revisions of the repository around the working directory, and remove them at the end.

    Yields:
        For each revision, the place that corresponds to the working directory.

    Raises:
        UsageError: there is no repository, no git, or no such revision.
    """
    top = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
    subfolder = Path.cwd().resolve().relative_to(top.resolve())
    commits = [_commit(top, revision) for revision in revisions]
    temporary = atomic.temporary_folder()
    folder = Path(temporary.name)
    try:
        work_trees = []
        for number, (revision, commit) in enumerate(zip(revisions, commits, strict=True)):
            tree = folder / f"{'ab'[number]}"
            _git(top, *_WITHOUT_HOOKS, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            if not (tree / subfolder).is_dir():
                raise UsageError(f"revision {revision!r} has no directory {subfolder}: start in one that both have")
            roots = (tree, tree / "src")
            work_trees.append(WorkTree(tree / subfolder, tuple(root for root in roots if root.is_dir())))
        yield work_trees
    finally:
        with _interrupts_ignored():
            _remove(top, folder)
            temporary.cleanup()


def _commit(top: Path, revision: str) -> str:
    try:
        return _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except UsageError:
        raise UsageError(f"--revisions: {revision!r} is not a revision of {top}; `git log` lists them") from None


def _git(folder: Path, *args: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("--revisions: git is not installed") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        fatal = [line for line in lines if line.startswith("fatal: ")]  # a hint may follow
        reason = (fatal or lines[-1:] or [f"exit status {result.returncode}"])[0]
        raise UsageError(f"--revisions: git says: {reason}")
    return result.stdout.strip()


def _remove(top: Path, folder: Path) -> None:
    for tree in [*folder.iterdir()]:
        with contextlib.suppress(UsageError):
            _git(top, "worktree", "remove", "--force", "--force", str(tree))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(UsageError):
        _git(top, "worktree", "prune")
    if folder.exists():
        print(f"xsp: {folder} could not be removed", file=sys.stderr)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore a second Ctrl-C until everything is removed."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
