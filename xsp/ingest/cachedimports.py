"""Imported files in the user's cache, as run directories: a command on a file that was imported before opens it.

An entry depends on the content of the files, their names, and the code that imports: xsp, the installed importers, and
the table engine.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xsp import cached, plugins
from xsp.errors import XspError
from xsp.importers import contract
from xsp.ingest import ranks
from xsp.run import Run

KIND = "import"

MIN_SPANS = 2_000
"""Number of spans below which importing takes about as long as opening a run."""


def key_of(names: Sequence[str]) -> dict[str, Any] | None:
    """Return everything that the import of sources depends on; None if it is not cached.

    Args:
        names: files and folders, as for `xsp.load`; what is fetched from a URL is not cached.
    """
    from importlib.metadata import version  # its import takes as long as a third of xsp

    if cached.default_folder() is None or any(map(contract.is_url, names)):
        return None
    try:
        files = ranks.files(names)
        # folders of several files may say which host or recording they are of
        places = [list(Path(file).absolute().parts[-3:] if len(files) > 1 else [Path(file).name]) for file in files]
        importers = plugins.origins(contract.GROUP)
        packages = sorted({"xsp", *(origin.partition(".")[0].partition(":")[0] for origin in importers.values())})
        return {
            "names": [Path(name).name for name in names],
            "files": [[place, cached.content_hash(Path(file))] for place, file in zip(places, files, strict=True)],
            "importers": importers,
            "code": [cached.code(package) for package in packages],
            "engine": version("duckdb"),
        }
    except (OSError, ValueError, ImportError, XspError):  # the import itself reports what is wrong
        return None


_waiting: list[tuple[dict[str, Any] | None, Run, Callable[[Path], object]]] | None = None
"""What is stored at the end of `afterwards`; None outside it."""


@contextlib.contextmanager
def afterwards() -> Iterator[None]:
    """Store what is imported in the block when the block has ended without an error: what it prints comes first.

    The traces must live until then.
    """
    global _waiting
    _waiting = []
    try:
        yield
        imports = _waiting
    finally:
        _waiting = None
    for each in imports:
        store(*each)


def store(key: dict[str, Any] | None, run: Run, write: Callable[[Path], object]) -> None:
    """Store an imported run, unless it is small; a cache that cannot be written is no error. See also `afterwards`.

    Args:
        key: from `key_of`.
        run: the run; its ranks, if it is a job.
        write: writes the run directory into an empty folder.
    """
    import duckdb

    if _waiting is not None:
        _waiting.append((key, run, write))
        return
    imported = run.imported
    if imported is None or sum(source.spans or 0 for source in imported.sources) < MIN_SPANS:
        return
    with contextlib.suppress(OSError, duckdb.Error, XspError):
        cached.store_folder(KIND, key, write)


def copy(run_dir: Path) -> Callable[[Path], object]:
    """Return a function that copies a run directory, for `store`."""
    return lambda folder: shutil.copytree(run_dir, folder, dirs_exist_ok=True)
