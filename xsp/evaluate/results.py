"""Results: a directory for each evaluation, under the identity of its manifest.

```
STORE/4f1c2a9b03de-0001/
  manifest.yaml        the canonical form: `xsp evaluate run` takes it
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
from collections.abc import Iterator, Mapping
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

_TOLD = ("name", "kind", "started", "xsp")
_WITHIN = {"agent": ("name", "host", "python", "packages"), "environment": ("equal",), "outputs": ("digest",),
           "samples": ("checksum",)}  # fmt: skip
_OF_PART = ("batch", "requests", "scheduled", "open_loop", "stopped", "late", "p50_ms", "p90_ms", "p99_ms",
            "trimmed_mean_ms", "inputs_per_s")  # fmt: skip
"""Fields that a result is not read without."""


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
        found: Mapping[str, Any] = self.content["manifest"]
        return found

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """Figures, one mapping per batch size."""
        return list(self.content["parts"])

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """Top-1 and top-5 as `xsp.evaluate.labelled.of` returns them; None for samples without classes."""
        found: Mapping[str, Any] | None = self.content.get("accuracy")
        return found

    def requests(self, batch: int | None = None) -> Requests:
        """Return the requests of a batch size; None for the first one."""
        asked = self.parts[0]["batch"] if batch is None else batch
        part = next(each for each in self.parts if each["batch"] == asked)
        con = table.connect()
        try:
            columns = con.execute(
                f"SELECT due_ns, issued_ns, start_ns, end_ns, batch FROM {_place(self.path / 'requests.parquet')} "
                "WHERE part = ? ORDER BY number",
                [asked],
            ).fetchnumpy()
        finally:
            con.close()
        due, issued, start, end, sizes = (
            np.asarray(columns[name], np.int64) for name in ("due_ns", "issued_ns", "start_ns", "end_ns", "batch")
        )
        return Requests(
            due, issued, start, end, sizes,
            open_loop=bool(part["open_loop"]), scheduled=part["scheduled"], stopped=part["stopped"],
        )  # fmt: skip

    def outputs(self) -> dict[str, Array]:
        """Return the stored outputs of the model; empty if there are none.

        Raises:
            ManifestError: their file is damaged.
        """
        place = self.path / OUTPUTS
        if not place.is_file():
            return {}
        try:
            with np.load(place, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise ManifestError(f"{place}: damaged ({type(error).__name__}: {error})") from error


def digest(outputs: Mapping[str, Array]) -> str:
    """Return the SHA-256 of arrays: equal if and only if names, types, shapes and bits are equal."""
    made = hashlib.sha256()
    for name in sorted(outputs):
        value = np.ascontiguousarray(outputs[name])
        made.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        made.update(value.tobytes())
    return made.hexdigest()


@contextlib.contextmanager
def written(store: Path, identity: str) -> Iterator[tuple[Path, list[Path]]]:
    """Yield a folder for the files of a result, and publish it at the end; after an error nothing is left.

    Yields:
        The folder, and a list that contains the path of the result once the block has ended.

    Raises:
        ManifestError: the folder cannot be written.
    """
    done: list[Path] = []
    with staging(store, identity) as beside:
        yield beside, done
        done.append(publish(store, identity, beside))


@contextlib.contextmanager
def staging(store: Path, identity: str) -> Iterator[Path]:
    """Yield a folder beside the results; it is removed at the end unless `publish` has renamed it.

    Raises:
        ManifestError: the folder cannot be created.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        atomic.remove_stale(store)
        beside = store / f".{identity[:DIGITS]}.{os.getpid()}-{time.monotonic_ns()}.part"
        beside.mkdir()
    except OSError as error:
        raise ManifestError(f"{store}: results cannot be written there ({error.strerror})") from error
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def publish(store: Path, identity: str, beside: Path) -> Path:
    """Rename a complete folder to the next free name of its identity, and return its path.

    If another process takes that name meanwhile, the next name is tried.

    Raises:
        ManifestError: the folder cannot be renamed.
    """
    taken = [int(each.name[DIGITS + 1 :]) for each in store.glob(f"{identity[:DIGITS]}-*") if NAME.fullmatch(each.name)]
    number = max(taken, default=0)
    while True:
        number += 1
        place = store / f"{identity[:DIGITS]}-{number:04d}"
        if place.exists():
            continue
        try:
            os.rename(beside, place)
        except OSError as error:
            if place.exists():
                continue
            raise ManifestError(f"{place}: cannot be written ({error.strerror})") from error
        return place


def write(folder: Path, manifest: Manifest, content: Mapping[str, Any], parts: Mapping[int, Requests]) -> None:
    """Write everything except outputs, trace and bound into the folder of a result."""
    (folder / MANIFEST).write_text(yamltext.write(manifest.plain()), encoding="utf-8")
    whole = {"format": FORMAT, "identity": manifest.identity, "manifest": manifest.plain(), **content}
    (folder / RESULT).write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    con = table.connect()
    try:
        columns = {
            "part": np.concatenate([np.full(len(each), batch, np.int64) for batch, each in parts.items()]),
            "number": np.concatenate([np.arange(len(each), dtype=np.int64) for each in parts.values()]),
            **{
                name: np.concatenate([getattr(each, name) for each in parts.values()])
                for name in ("batch", "due_ns", "issued_ns", "start_ns", "end_ns")
            },
        }
        con.register("requests", columns)
        con.execute(f"COPY (SELECT * FROM requests) TO {_place(folder / 'requests.parquet')} (FORMAT parquet)")
        con.execute("CREATE TABLE evaluation (identity VARCHAR, name VARCHAR, model VARCHAR, task VARCHAR, "
                    "kind VARCHAR, "
                    "batch BIGINT, agent VARCHAR, environment VARCHAR, outputs VARCHAR, requests BIGINT, "
                    "p50_ms DOUBLE, p90_ms DOUBLE, p99_ms DOUBLE, trimmed_mean_ms DOUBLE, inputs_per_s DOUBLE, "
                    "started VARCHAR, rate_low DOUBLE, rate_high DOUBLE, top1 DOUBLE, top5 DOUBLE)")  # fmt: skip
        con.executemany(
            "INSERT INTO evaluation VALUES (" + ", ".join("?" * 20) + ")", [list(each) for each in _rows(whole)]
        )
        con.execute(f"COPY evaluation TO {_place(folder / 'evaluation.parquet')} (FORMAT parquet)")
    finally:
        con.close()


def _rows(whole: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    manifest = whole["manifest"]
    model = manifest["model"]
    for part in whole["parts"]:
        yield (
            whole["identity"], whole["name"], model["name"], model.get("task"), whole["kind"], part["batch"],
            whole["agent"]["name"], whole["environment"]["hash"], whole["outputs"]["digest"], part["requests"],
            part["p50_ms"], part["p90_ms"], part["p99_ms"], part["trimmed_mean_ms"], part["inputs_per_s"],
            whole["started"], part.get("rate_low"), part.get("rate_high"),
            (whole.get("accuracy") or {}).get("top1"), (whole.get("accuracy") or {}).get("top5"),
        )  # fmt: skip


def plain(facts: Facts) -> dict[str, Any]:
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
        found = Result(path, content)
        if int(content["format"]) > FORMAT:
            raise ManifestError(f"{path}: written by a newer xsp, in format {content['format']}")
        _ = found.identity, found.manifest["model"]["name"], found.parts[0], [content[name] for name in _TOLD]
        _ = [content[name][each] for name, inner in _WITHIN.items() for each in inner]
        _ = [part[name] for part in found.parts for name in _OF_PART]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{file}: damaged ({type(error).__name__}: {error})") from error
    return found


def named(name: str, store: Path) -> Result:
    """Return a result by its path, its name, or the first digits of its manifest's identity, then the newest one.

    Raises:
        ManifestError: there is no such result, or the digits are those of several manifests.
    """
    if (Path(name) / RESULT).is_file():
        return read(Path(name))
    if (store / name / RESULT).is_file():
        return read(store / name)
    found = sorted(each for each in _places(store) if each.name.startswith(name)) if name else []
    if not found:
        raise ManifestError(f"there is no result {name!r} in {store}; list them with `xsp evaluate list`")
    manifests = sorted({each.name[:DIGITS] for each in found})
    if len(manifests) > 1:
        raise ManifestError(f"{name!r} begins {len(manifests)} manifests: {', '.join(manifests[:6])}; give more digits")
    return read(max(found, key=lambda each: (each.name[:DIGITS], int(each.name[DIGITS + 1 :]))))


def every(store: Path) -> tuple[list[Result], list[str]]:
    """Return all results of a store, oldest first, and messages on damaged ones."""
    found, wrong = [], []
    for each in _places(store):
        try:
            found.append(read(each))
        except ManifestError as error:
            wrong.append(str(error))
    return sorted(found, key=lambda each: (str(each.content["started"]), each.name)), wrong


def _places(store: Path) -> list[Path]:
    try:
        return sorted(each for each in store.iterdir() if NAME.fullmatch(each.name))
    except OSError:
        return []


def _place(path: Path) -> str:
    return table.place(path)
