"""Results: a directory for each evaluation, under the identity of its manifest.

```
STORE/4f1c2a9b03de-0001/
  manifest.yaml        the canonical form, a file for `xsp evaluate run`
  result.json          identity, agent, environment, figures of each batch size, digest of the outputs
  evaluation.parquet   the same as one row for each batch size
  requests.parquet     a row for each request: batch, due, issued, start, end, in nanoseconds
  outputs.npz          outputs of the model for the first samples
  run/                 the trace, if requested: a run directory
  advice.json          advice from the trace, best first
  bound.json           the bound, if requested
```

A directory is written under a temporary name and renamed, so a directory with a result's name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsp import atomic, table
from xsp.errors import ManifestError
from xsp.evaluate import yamltext
from xsp.evaluate.agents import Facts
from xsp.evaluate.load import Requests
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array

FORMAT = 1
RESULT = "result.json"
MANIFEST = "manifest.yaml"
OUTPUTS = "outputs.npz"
RUN = "run"
BOUND = "bound.json"
ADVICE = "advice.json"

NAME = re.compile(r"[0-9a-f]{12}-\d{4,}")
DIGITS = 12
MOST_BYTES = 16 << 20

_REQUIRED = ("name", "kind", "started", "xsp")
_REQUIRED_IN_SECTIONS = {
    "agent": ("name", "host", "python", "packages"), "environment": ("equal",), "outputs": ("digest",),
    "samples": ("checksum",),
}  # fmt: skip
_REQUIRED_IN_PARTS = (
    "batch", "requests", "scheduled", "open_loop", "stopped", "late", "p50_ms", "p90_ms", "p99_ms", "trimmed_mean_ms",
    "inputs_per_s",
)  # fmt: skip
"""Fields without which a result is refused as damaged."""


@dataclass(frozen=True)
class Result:
    """A stored result."""

    path: Path
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of its directory, which identifies it."""
        return self.path.name

    @property
    def identity(self) -> str:
        """Identity of its manifest."""
        return str(self.content["identity"])

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Its manifest as plain data."""
        content: Mapping[str, Any] = self.content["manifest"]
        return content

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """Figures, one mapping per batch size."""
        return list(self.content["parts"])

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """Top-1 and top-5 as `xsp.evaluate.labelled.of` returns them; None for samples without classes."""
        figures: Mapping[str, Any] | None = self.content.get("accuracy")
        return figures

    def requests(self, batch: int | None = None) -> Requests:
        """Return the requests of a batch size; None for the first one."""
        size = self.parts[0]["batch"] if batch is None else batch
        part = next(part for part in self.parts if part["batch"] == size)
        path = table.path_literal(self.path / "requests.parquet")
        con = table.connect()
        try:
            columns = con.execute(
                f"SELECT due_ns, issued_ns, start_ns, end_ns, batch FROM {path} WHERE part = ? ORDER BY number",
                [size],
            ).fetchnumpy()
        finally:
            con.close()
        due, issued, start, end, sizes = (
            np.asarray(columns[name], np.int64) for name in ("due_ns", "issued_ns", "start_ns", "end_ns", "batch")
        )
        return Requests(
            due, issued, start, end, sizes,
            is_open_loop=bool(part["open_loop"]), schedule_length=part["scheduled"], stop_reason=part["stopped"],
        )  # fmt: skip

    def outputs(self) -> dict[str, Array]:
        """Return the stored outputs of the model; empty if there are none.

        Raises:
            ManifestError: their file is damaged.
        """
        path = self.path / OUTPUTS
        if not path.is_file():
            return {}
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise ManifestError(f"{path}: damaged ({type(error).__name__}: {error})") from error


def digest(outputs: Mapping[str, Array]) -> str:
    """Return the SHA-256 of arrays: equal if and only if names, types, shapes and bits are equal."""
    hasher = hashlib.sha256()
    for name in sorted(outputs):
        value = np.ascontiguousarray(outputs[name])
        hasher.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        hasher.update(value.tobytes())
    return hasher.hexdigest()


@contextlib.contextmanager
def new_result(store: Path, identity: str) -> Iterator[tuple[Path, list[Path]]]:
    """Yield a folder for the files of a result, and publish it at the end; after an error nothing is left.

    Yields:
        The folder, and a list that contains the path of the result once the block has ended.

    Raises:
        ManifestError: the folder cannot be written.
    """
    paths: list[Path] = []
    with staging(store, identity) as folder:
        yield folder, paths
        paths.append(publish(store, identity, folder))


@contextlib.contextmanager
def staging(store: Path, identity: str) -> Iterator[Path]:
    """Yield a folder beside the results; it is removed at the end unless `publish` has renamed it.

    Raises:
        ManifestError: the folder cannot be created.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        atomic.remove_stale(store)
        folder = store / f".{identity[:DIGITS]}.{os.getpid()}-{time.monotonic_ns()}.part"
        folder.mkdir()
    except OSError as error:
        raise ManifestError(f"{store}: results cannot be written there ({error.strerror})") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(store: Path, identity: str, folder: Path) -> Path:
    """Rename a complete folder to the next free name of its identity, and return its path.

    If another process takes that name meanwhile, the next name is tried.

    Raises:
        ManifestError: the folder cannot be renamed.
    """
    numbers = [
        int(path.name[DIGITS + 1 :]) for path in store.glob(f"{identity[:DIGITS]}-*") if NAME.fullmatch(path.name)
    ]
    number = max(numbers, default=0)
    while True:
        number += 1
        target = store / f"{identity[:DIGITS]}-{number:04d}"
        if target.exists():
            continue
        try:
            os.rename(folder, target)
        except OSError as error:
            if target.exists():
                continue
            raise ManifestError(f"{target}: cannot be written ({error.strerror})") from error
        return target


def write(folder: Path, manifest: Manifest, content: Mapping[str, Any], parts: Mapping[int, Requests]) -> None:
    """Write everything except outputs, trace and bound into the folder of a result."""
    (folder / MANIFEST).write_text(yamltext.write(manifest.plain()), encoding="utf-8")
    document = {"format": FORMAT, "identity": manifest.identity, "manifest": manifest.plain(), **content}
    (folder / RESULT).write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    con = table.connect()
    try:
        columns = {
            "part": np.concatenate([np.full(len(part), batch, np.int64) for batch, part in parts.items()]),
            "number": np.concatenate([np.arange(len(part), dtype=np.int64) for part in parts.values()]),
            **{
                name: np.concatenate([getattr(part, name) for part in parts.values()])
                for name in ("batch", "due_ns", "issued_ns", "start_ns", "end_ns")
            },
        }
        con.register("requests", columns)
        path = table.path_literal(folder / "requests.parquet")
        con.execute(f"COPY (SELECT * FROM requests) TO {path} (FORMAT parquet)")
        con.execute("CREATE TABLE evaluation (identity VARCHAR, name VARCHAR, model VARCHAR, task VARCHAR, "
                    "kind VARCHAR, "
                    "batch BIGINT, agent VARCHAR, environment VARCHAR, outputs VARCHAR, requests BIGINT, "
                    "p50_ms DOUBLE, p90_ms DOUBLE, p99_ms DOUBLE, trimmed_mean_ms DOUBLE, inputs_per_s DOUBLE, "
                    "started VARCHAR, rate_low DOUBLE, rate_high DOUBLE, top1 DOUBLE, top5 DOUBLE)")  # fmt: skip
        con.executemany(
            "INSERT INTO evaluation VALUES (" + ", ".join("?" * 20) + ")", [list(row) for row in _rows(document)]
        )
        con.execute(f"COPY evaluation TO {table.path_literal(folder / 'evaluation.parquet')} (FORMAT parquet)")
    finally:
        con.close()


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    manifest = document["manifest"]
    model = manifest["model"]
    for part in document["parts"]:
        yield (
            document["identity"], document["name"], model["name"], model.get("task"), document["kind"], part["batch"],
            document["agent"]["name"], document["environment"]["hash"], document["outputs"]["digest"], part["requests"],
            part["p50_ms"], part["p90_ms"], part["p99_ms"], part["trimmed_mean_ms"], part["inputs_per_s"],
            document["started"], part.get("rate_low"), part.get("rate_high"),
            (document.get("accuracy") or {}).get("top1"), (document.get("accuracy") or {}).get("top5"),
        )  # fmt: skip


def plain_facts(facts: Facts) -> dict[str, Any]:
    """Return the facts of an agent as plain data."""
    return {**asdict(facts), "packages": dict(facts.packages), "labels": dict(facts.labels)}


def read(path: Path) -> Result:
    """Read a result.

    Raises:
        ManifestError: there is no result, or it is damaged.
    """
    file = path / RESULT
    if not file.is_file():
        raise ManifestError(f"{path}: not a result of xsp evaluate; list them with `xsp evaluate list`")
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError("too large")
        content = json.loads(file.read_text(encoding="utf-8"))
        result = Result(path, content)
        if int(content["format"]) > FORMAT:
            raise ManifestError(f"{path}: written by a newer xsp, in format {content['format']}")
        _ = result.identity, result.manifest["model"]["name"], result.parts[0], [content[name] for name in _REQUIRED]
        _ = [content[name][key] for name, keys in _REQUIRED_IN_SECTIONS.items() for key in keys]
        _ = [part[name] for part in result.parts for name in _REQUIRED_IN_PARTS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{file}: damaged ({type(error).__name__}: {error})") from error
    return result


def find(name: str, store: Path) -> Result:
    """Return a result by its path, its name, or the first digits of its manifest's identity (then the newest result).

    Raises:
        ManifestError: there is no such result, or the digits are those of several manifests.
    """
    if (Path(name) / RESULT).is_file():
        return read(Path(name))
    if (store / name / RESULT).is_file():
        return read(store / name)
    matches = sorted(path for path in _result_dirs(store) if path.name.startswith(name)) if name else []
    if not matches:
        raise ManifestError(f"there is no result {name!r} in {store}; list them with `xsp evaluate list`")
    manifests = sorted({path.name[:DIGITS] for path in matches})
    if len(manifests) > 1:
        raise ManifestError(f"{name!r} begins {len(manifests)} manifests: {', '.join(manifests[:6])}; give more digits")
    return read(max(matches, key=lambda path: (path.name[:DIGITS], int(path.name[DIGITS + 1 :]))))


def read_all(store: Path) -> tuple[list[Result], list[str]]:
    """Return all results of a store, oldest first, and messages on damaged ones."""
    results, errors = [], []
    for path in _result_dirs(store):
        try:
            results.append(read(path))
        except ManifestError as error:
            errors.append(str(error))
    return oldest_first(results), errors


def oldest_first(results: Iterable[Result]) -> list[Result]:
    """Return results in the order of their start."""
    return sorted(results, key=lambda result: (str(result.content["started"]), result.name))


def _result_dirs(store: Path) -> list[Path]:
    try:
        return sorted(path for path in store.iterdir() if NAME.fullmatch(path.name))
    except OSError:
        return []
