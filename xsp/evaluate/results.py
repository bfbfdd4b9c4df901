"""Results: a directory for each evaluation, under the identity of its manifest.

```
STORE/4f1c2a9b03de-0001/
  manifest.yaml        the canonical form, a file for `xsp evaluate run`
  result.json          identity, agent, environment, figures of each batch size, digest of the outputs
  evaluation.parquet   the same as one row for each batch size
  requests.parquet     a row for each request: batch, due, issued, start, end, in nanoseconds
  tokens.parquet       a row for each arrival of generated tokens, in nanoseconds
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
import math
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import numpy as np

from xsp import atomic, inside, table
from xsp.errors import ManifestError, first_line
from xsp.evaluate import resultform, yamltext
from xsp.evaluate.agents import Facts
from xsp.evaluate.load import Requests
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array

FORMAT = 1
RESULT = "result.json"
MANIFEST = "manifest.yaml"
OUTPUTS = "outputs.npz"
REQUESTS = "requests.parquet"
RUN = "run"
BOUND = "bound.json"
ADVICE = "advice.json"

GENERATION_FIGURES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "output_tokens_per_s")
"""Figures of generated text that tables and comparisons have, see `xsp.evaluate.generation.timing`."""

NAME = re.compile(r"[0-9a-f]{12}-\d{4,}")
DIGITS = 12
MOST_BYTES = 16 << 20
"""Limit of each file of JSON."""

MOST_TABLE_BYTES = 1 << 30
MOST_STORED_REQUESTS = 10_000_000
"""Limits of the table of requests: a small file may contain any number of equal rows."""

MOST_ARCHIVE_BYTES = 256 << 20
"""Limit of the outputs, also when they are decompressed; `xsp.evaluate.running` stores up to 64 MB."""


@dataclass(frozen=True)
class Result:
    """A stored result."""

    path: Path
    content: Mapping[str, Any]
    """As `xsp.evaluate.resultform` checked it."""

    root: Path
    """The directory that none of its files may lie outside of: the result's own, or the folder of all results."""

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
        """Return the requests of a batch size; None for the first one.

        Raises:
            ManifestError: their file is missing or damaged.
        """
        size = self.parts[0]["batch"] if batch is None else batch
        part = next(part for part in self.parts if part["batch"] == size)
        path = self.path / REQUESTS
        try:
            with inside.engine_path(self.root, path, MOST_TABLE_BYTES) as file:
                columns = _request_columns(file, size)
        except (OSError, ValueError, duckdb.Error) as error:
            raise damaged(path, error) from error
        due, issued, start, end, sizes = (columns[name] for name in _REQUEST_COLUMNS)
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
        if not os.path.lexists(path):
            return {}
        try:
            with inside.open_file(self.root, path, MOST_ARCHIVE_BYTES) as file:
                return _arrays(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise damaged(path, error) from error

    def read_json(self, name: str) -> Any:
        """Return the content of `BOUND` or `ADVICE`; None if the result does not have it.

        Raises:
            ManifestError: the file is damaged.
        """
        path = self.path / name
        if not os.path.lexists(path):
            return None
        try:
            return inside.read_json(self.root, path, MOST_BYTES)
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error

    def has(self, name: str) -> bool:
        """Return whether it has a file."""
        return inside.is_file(self.root, self.path / name)

    @property
    def run(self) -> Path | None:
        """The run directory of its trace; None if it has none."""
        path = self.path / RUN
        return path if inside.is_folder(self.root, path) else None


_REQUEST_COLUMNS = ("due_ns", "issued_ns", "start_ns", "end_ns", "batch")


def _request_columns(file: Path, batch: int) -> dict[str, Array]:
    """Return the columns of the requests of a batch size.

    Raises:
        ValueError: there are none or too many, or values are missing.
        duckdb.Error: it is not such a table.
    """
    source = table.parquet(file)
    con = table.connect()
    try:
        ((count,),) = con.execute(f"SELECT count(*) FROM {source} WHERE part = ?", [batch]).fetchall()
        if not 0 < count <= MOST_STORED_REQUESTS:
            raise ValueError(f"{count:,} requests of this batch size")
        columns = ", ".join(f"{name}::BIGINT AS {name}" for name in _REQUEST_COLUMNS)
        result = con.execute(f"SELECT {columns} FROM {source} WHERE part = ? ORDER BY number", [batch]).fetchnumpy()
    finally:
        con.close()
    if any(np.ma.isMaskedArray(column) for column in result.values()):
        raise ValueError("times are missing")
    return {name: np.asarray(column, np.int64) for name, column in result.items()}


def _arrays(file: BinaryIO) -> dict[str, Array]:
    """Return the arrays of an archive of NumPy.

    Raises:
        ValueError: it is no such archive, or larger than `MOST_ARCHIVE_BYTES` when it is decompressed.
    """
    result: dict[str, Array] = {}
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_ARCHIVE_BYTES:
            raise ValueError("too large")
        for entry in archive.infolist():
            with archive.open(entry) as member:
                version = np.lib.format.read_magic(member)
                reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if version not in reader:
                    raise ValueError(f"version {version} of the format")
                shape, _, dtype = reader[version](member)
                # the reader allocates what the header states before it reads; the archive limits what it reads
                if math.prod(shape) * dtype.itemsize > entry.file_size or dtype.kind not in "biufcSU":
                    raise ValueError(f"an array of shape {shape} and type {dtype}")
            with archive.open(entry) as member:
                result[entry.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    return result


def damaged(path: Path, error: Exception) -> ManifestError:
    """Return the error for a damaged file of a result."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return ManifestError(f"{path}: damaged ({reason})")


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
        folder = atomic.temporary_path(store / identity[:DIGITS])
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
        path = table.path_literal(folder / REQUESTS)
        con.execute(f"COPY (SELECT * FROM requests) TO {path} (FORMAT parquet)")
        con.execute("CREATE TABLE evaluation (identity VARCHAR, name VARCHAR, model VARCHAR, task VARCHAR, "
                    "kind VARCHAR, "
                    "batch BIGINT, agent VARCHAR, environment VARCHAR, outputs VARCHAR, requests BIGINT, "
                    "p50_ms DOUBLE, p90_ms DOUBLE, p99_ms DOUBLE, trimmed_mean_ms DOUBLE, inputs_per_s DOUBLE, "
                    "started VARCHAR, rate_low DOUBLE, rate_high DOUBLE, top1 DOUBLE, top5 DOUBLE"
                    + "".join(f", {name} DOUBLE" for name in GENERATION_FIGURES) + ")")  # fmt: skip
        rows = [list(row) for row in _rows(document)]
        con.executemany("INSERT INTO evaluation VALUES (" + ", ".join("?" * len(rows[0])) + ")", rows)
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
            *((part.get("generation") or {}).get(name) for name in GENERATION_FIGURES),
        )  # fmt: skip


def plain_facts(facts: Facts) -> dict[str, Any]:
    """Return the facts of an agent as plain data."""
    return {**asdict(facts), "packages": dict(facts.packages), "labels": dict(facts.labels)}


def read(path: Path, root: Path | None = None) -> Result:
    """Read a result.

    Args:
        path: its directory.
        root: directory that its files may not lie outside of; None for its own.

    Raises:
        ManifestError: there is no result, or it is damaged.
    """
    file = path / RESULT
    if not os.path.lexists(file):
        raise ManifestError(f"{path}: not a result of xsp evaluate; list them with `xsp evaluate list`")
    try:
        content = inside.read_json(root or path, file, MOST_BYTES)
        version = content.get("format") if isinstance(content, dict) else None
        if isinstance(version, int) and FORMAT < version < 1 << 31:
            raise ManifestError(f"{path}: written by a newer xsp, in format {version}")
        return Result(path, resultform.check(content), root or path)
    except (OSError, ValueError) as error:
        raise damaged(file, error) from error


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
