"""Stored timings: a folder of Parquet files by environment, or one file that carries them to another machine.

```
DIR/environment=<hash>/part-<id>.parquet     rows as `COLUMNS`; a later row of a spec replaces an earlier one
DIR/environments/<hash>.json                 the properties behind the hash, and the noted circumstances
```

Parts appear atomically, so several processes may write. The `seal` of a row is a hash of all its values, which detects
changes; rows with a wrong seal and damaged parts are left out, counted and named: their timings are missing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import duckdb

from xsp import atomic, cached, table
from xsp.bench.environment import Environment, current_environment
from xsp.bench.spec import CacheState, Loss, Spec, Status, Timing, spec_of, untimed
from xsp.errors import BenchError, OutputError, first_line
from xsp.schema import Column

VARIABLE = "XSP_TIMINGS"
"""Environment variable that names the folder of timings."""

MARK = "xsp_timings"
VERSION = 1

_TYPES = {
    "threads": "INTEGER", "samples": "INTEGER", "taken_ns": "BIGINT", "workspace_bytes": "BIGINT",
    **dict.fromkeys(
        "trimmed_ns low_ns high_ns least_ns host_ns device_ns error_max canary_ratio cold_ns joules".split(), "DOUBLE"
    ),
}  # fmt: skip

_LATER = ("cold_ns", "workspace_bytes", "joules")
"""Columns that files of an earlier version lack; the seal of their rows is of the others."""

COLUMNS = (
    *(Column(field.name, _TYPES.get(field.name, "VARCHAR"), "") for field in fields(Timing)),
    Column("seal", "VARCHAR", "hash of the other values"),
)

_HASH = re.compile(r"[0-9a-f]{16}")


def default_folder() -> Path:
    """Return the default folder of timings: the one that `XSP_TIMINGS` names, or a folder in the user's cache."""
    folder = os.environ.get(VARIABLE)
    return Path(folder).expanduser() if folder else cached.user_folder() / "timings"


REPEATED_RUNTIMES = ("collectives",)
"""Runtimes whose earlier timings are kept, because the differences between repetitions are used."""


class Timings:
    """Timings of one environment, in memory and on the disk."""

    def __init__(self, folder: Path, environment: Environment, like: str | None = None) -> None:
        self.folder = folder
        self.environment = environment
        self.like = like
        """Hash of another environment, whose timings replace missing ones."""

        self.problems: list[str] = []
        """Rows, parts and descriptions that were left out, with the reasons."""

        self.untimed: list[str] = []
        """What was not timed although it was asked for, with the reasons: a device was lost or could not be had."""

        self.loss: Loss | None = None
        """The device, if it was lost while timings were taken."""

        self._by_key: dict[str, Timing] = {}
        self._borrowed: dict[str, Timing] = {}

    @property
    def remarks(self) -> list[str]:
        """What was not timed, then what was left out, with the reasons."""
        return [*self.untimed, *self.problems]

    @classmethod
    def open(
        cls, folder: Path | str | None = None, environment: Environment | None = None, like: str | None = None
    ) -> Timings:
        """Return the timings of a folder, which need not exist yet.

        Args:
            folder: folder of timings; default: `default_folder`.
            environment: environment of the timings; default: that of this process.
            like: hash of another environment, or a prefix of it, whose timings replace missing ones. The
                field `environment` of each timing names its origin.

        Raises:
            BenchError: the path is a file, or there is not exactly one environment `like`.
        """
        path = default_folder() if folder is None else Path(folder)
        if os.path.exists(path) and not os.path.isdir(path):  # `Path.exists` raises where a folder above is locked
            raise BenchError(f"{path}: not a folder of timings; read a file of them with `xsp bench --import FILE`")
        timings = cls(path, environment or current_environment())
        timings._by_key = timings._read(timings.environment.hash)
        if like is not None:
            available = timings.environments()
            matches = [hash_ for hash_ in available if hash_.startswith(like)]
            if len(matches) != 1:
                names = ", ".join(available) or "none"
                raise BenchError(f"{path}: {like!r} is not one environment; there are {names}: see `xsp bench --list`")
            theirs, ours = available[matches[0]], timings.environment
            if (theirs.device, ours.device) != (None, None) and theirs.device_name != ours.device_name:
                raise BenchError(
                    f"the timings of environment {matches[0]} are of {theirs.device_name}, not of {ours.device_name}: "
                    "they cannot replace its own"
                )
            timings.like = matches[0]
            timings._borrowed = timings._read(matches[0])
        return timings

    @property
    def cores(self) -> int | None:
        """Number of cores of the machine; None if unknown."""
        count = self.environment.properties.get("cores")
        return count if isinstance(count, int) and count > 0 else None

    def of(self, specs: Iterable[Spec]) -> dict[str, Timing]:
        """Return the timing of each spec by its key; its status is `missing` if there is none."""
        by_key: dict[str, Timing] = {}
        for spec in specs:
            timing = self.get(spec.key)
            by_key[spec.key] = untimed(spec) if timing is None else timing
        return by_key

    def get(self, key: str) -> Timing | None:
        """Return the timing of a spec by its key: of this environment, else of `like`, else None."""
        return self._by_key.get(key) or self._borrowed.get(key)

    def __iter__(self) -> Iterator[Timing]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, timings: Iterable[Timing]) -> None:
        """Add timings in memory and as one part on disk; if there are none, nothing is written.

        Timings without an environment get this one; timings with status `missing` are not stored.

        Raises:
            BenchError: a timing is of another environment, or the folder cannot be written.
        """
        current = self.environment.hash
        stored = [replace(timing, environment=timing.environment or current) for timing in timings]
        stored = [timing for timing in stored if timing.status is not Status.MISSING]
        foreign = next((timing.environment for timing in stored if timing.environment != current), None)
        if foreign is not None:
            raise BenchError(f"a timing of environment {foreign} does not belong to {current}")
        if not stored:
            return
        self._write(self.environment, stored)
        self._by_key.update((timing.key, timing) for timing in stored)

    def check_writable(self) -> None:
        """Check that timings could be stored, without writing anything.

        Raises:
            BenchError: the folder, or the nearest one above it, is not writable.
        """
        nearest = next(path for path in (self.folder, *self.folder.absolute().parents) if os.path.exists(path))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise BenchError(f"{self.folder}: timings cannot be written there; name another folder: --timings DIR")

    def environments(self) -> dict[str, Environment]:
        """Return the environments whose timings the folder has, by hash, if their descriptions match the hash."""
        names = [folder.name.partition("=")[2] for folder in sorted(self.folder.glob("environment=*"))]
        by_hash = {hash_: self._read_environment(hash_) for hash_ in names if _HASH.fullmatch(hash_)}
        return {hash_: environment for hash_, environment in by_hash.items() if environment is not None}

    def all_of(self, environment: str) -> list[Timing]:
        """Return the timings of the environment with a hash."""
        return list(self._by_key.values() if environment == self.environment.hash else self._read(environment).values())

    def history(self) -> dict[str, list[Timing]]:
        """Return all timings of this environment by key, also those that newer ones replace, the oldest first."""
        by_key: dict[str, dict[int, Timing]] = {}
        for part in self._parts(self.environment.hash):
            for timing in self._timings(part, self.environment.hash)[0]:
                by_key.setdefault(timing.key, {})[timing.taken_ns] = timing
        return {key: [taken[ns] for ns in sorted(taken)] for key, taken in by_key.items()}

    def compact(self) -> int:
        """Merge the parts of this environment into one, and return how many parts there were.

        Timings that newer ones replace are left out, except those of `REPEATED_RUNTIMES`. Parts that are damaged, or in
        which a row was changed, stay where they are.

        Raises:
            BenchError: the folder cannot be written.
        """
        parts = self._parts(self.environment.hash)
        intact = [part for part in parts if self._timings(part, self.environment.hash)[1]]
        if len(intact) > 1 and (rows := self._read(self.environment.hash)):
            replaced = [
                timing
                for taken in self.history().values()
                for timing in taken[:-1]
                if timing.runtime in REPEATED_RUNTIMES
            ]
            self._write(self.environment, [*rows.values(), *replaced])
            for part in intact:
                part.unlink(missing_ok=True)
        return len(parts)

    # --- one file ---------------------------------------------------------------------------------------

    def export(self, path: Path) -> int:
        """Write all environments with their timings into one Parquet file, and return the number of timings.

        Raises:
            BenchError: the file cannot be written, or there are no timings.
        """
        environments = self.environments()
        rows = [(row, environments[hash_]) for hash_ in environments for row in self.all_of(hash_)]
        if not rows:
            raise BenchError(f"{self.folder}: there are no timings to export; take some with `xsp bench SOURCE`")
        described = Column("described", "VARCHAR", "the environment, as JSON")
        texts = {hash_: json.dumps(_plain(environment), sort_keys=True) for hash_, environment in environments.items()}
        values = [(*_row(row), texts[environment.hash]) for row, environment in rows]
        _write_rows(path, values, (*COLUMNS, described))
        return len(rows)

    def import_file(self, path: Path) -> tuple[int, int]:
        """Add the timings of a file that `export` wrote.

        An existing timing that is newer stays. Rows that were changed are left out, and named in `problems`.

        Returns:
            The number of added timings, and the number of environments in the file.

        Raises:
            BenchError: the file holds no timings, is damaged, or has no valid row.
        """
        con = table.connect()
        try:
            records = _records(con, path, "described")
        except duckdb.Error as error:
            reason = str(error).splitlines()[0][:160]
            raise BenchError(
                f"{path}: not a file of timings ({reason}); `xsp bench --export FILE` writes one"
            ) from error
        finally:
            con.close()
        by_environment: dict[str, list[Timing]] = {}
        descriptions: dict[str, Environment] = {}
        for row in records:
            described = row.pop("described")
            try:
                timing = _timing(row)
                environment = descriptions.get(described) or _environment(json.loads(described))
                if environment.hash != timing.environment:
                    raise ValueError("its environment does not match its hash")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                self._add_problem(f"{path}: {row['op']} ({str(row['key'])[:8]}): {error}")
                continue
            descriptions[described] = environment
            by_environment.setdefault(timing.environment, []).append(timing)
        if not records:
            raise BenchError(f"{path}: it holds no timings; `xsp bench --export FILE` writes a file of them")
        if not by_environment:
            raise BenchError(f"{path}: none of its {len(records)} timings is valid ({self.problems[-1]})")
        added = 0
        for environment in {environment.hash: environment for environment in descriptions.values()}.values():
            taken_at = {timing.key: timing.taken_ns for timing in self.all_of(environment.hash)}
            newer = [
                timing for timing in by_environment[environment.hash] if timing.taken_ns > taken_at.get(timing.key, -1)
            ]
            if newer:
                self._write(environment, newer)
                added += len(newer)
        self._by_key = self._read(self.environment.hash)
        return added, len(by_environment)

    # --- on the disk ------------------------------------------------------------------------------------

    def _parts(self, environment: str) -> list[Path]:
        return sorted((self.folder / f"environment={environment}").glob("part-*.parquet"))

    def _read(self, environment: str) -> dict[str, Timing]:
        by_key: dict[str, Timing] = {}
        parts = self._parts(environment)
        if parts and self._read_environment(environment) is None:
            return by_key
        read_parts: set[Path] = set()
        while parts:
            for part in parts:
                for timing in self._timings(part, environment)[0]:
                    previous = by_key.get(timing.key)
                    if previous is None or previous.taken_ns <= timing.taken_ns:
                        by_key[timing.key] = timing
            read_parts.update(parts)
            parts = [part for part in self._parts(environment) if part not in read_parts]  # merged by another process
        return by_key

    def _timings(self, part: Path, environment: str) -> tuple[list[Timing], bool]:
        """Return the valid timings of a part, and whether the part can be read and all its rows are valid."""
        rows = self._rows(part)
        valid = []
        for row in rows or ():
            try:
                timing = _timing(row)
                if timing.environment != environment:
                    raise ValueError(f"it belongs to environment {timing.environment}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                self._add_problem(f"{part}: {row['op']} ({str(row['key'])[:8]}): {error}")
                continue
            valid.append(timing)
        return valid, rows is not None and len(valid) == len(rows)

    def _read_environment(self, hash_: str) -> Environment | None:
        """Return the environment that the folder describes; None, and a problem, if its hash is not `hash_`."""
        path = self.folder / "environments" / f"{hash_}.json"
        try:
            environment = _environment(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._add_problem(f"{path}: the description of an environment cannot be read ({error})")
            return None
        if environment.hash != hash_:
            self._add_problem(f"{path}: this description was changed: its hash does not match its name")
            return None
        return environment

    def _rows(self, part: Path) -> list[dict[str, Any]] | None:
        con = table.connect()
        try:
            return _records(con, part)
        except (duckdb.Error, OutputError) as error:
            if not os.path.lexists(part):  # another process has merged it with others
                return []
            self._add_problem(f"{part}: cannot be read ({str(error).splitlines()[0][:160]})")
            return None
        finally:
            con.close()

    def _write(self, environment: Environment, timings: Sequence[Timing]) -> None:
        folder = self.folder / f"environment={environment.hash}"
        description = self.folder / "environments" / f"{environment.hash}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            description.parent.mkdir(exist_ok=True)
            if not description.exists() or self._read_environment(environment.hash) is None:
                with atomic.replacing(description) as file:
                    file.write_text(json.dumps(_plain(environment), indent=2, sort_keys=True), encoding="ascii")
        except OSError as error:
            raise BenchError(
                f"{self.folder}: timings cannot be written ({error.strerror}); name another folder: --timings DIR"
            ) from error
        _write_rows(folder / f"part-{secrets.token_hex(8)}.parquet", [_row(timing) for timing in timings], COLUMNS)

    def _add_problem(self, message: str) -> None:
        if message not in self.problems:
            self.problems.append(message)


def _parquet(path: Path) -> str:
    """Return the SQL that reads a file: all columns come from the file, none from the names of its folders."""
    return f"read_parquet({table.path_literal(path)}, hive_partitioning = false)"


def _write_rows(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[Column]) -> None:
    con = table.connect()
    try:
        table.create(con, "timings", columns)
        table.insert(con, "timings", rows, columns)
        table.write_parquet(con, "timings", path)
    except (OSError, duckdb.Error, OutputError) as error:
        message = first_line(error)
        reason = message.rpartition(": ")[2] if "Cannot open file" in message else message[:160]
        raise BenchError(f"{path}: timings cannot be written ({reason})") from error
    finally:
        con.close()


def _row(timing: Timing) -> tuple[Any, ...]:
    values = {field.name: getattr(timing, field.name) for field in fields(timing)}
    values |= {
        "state": timing.state.value,
        "status": timing.status.value,
        "kernels": json.dumps(timing.kernels),
        "reason": timing.reason.encode("utf-8", "replace").decode(),
    }
    return (*values.values(), _seal(tuple(values.values())))


def _records(con: duckdb.DuckDBPyConnection, path: Path, *others: str) -> list[dict[str, Any]]:
    """Return the rows of a file; columns that came later are absent in older files.

    Raises:
        duckdb.Error: the file cannot be read, or lacks columns that all files have.
    """
    present = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {_parquet(path)}").fetchall()}
    names = [column.name for column in COLUMNS if column.name in present or column.name not in _LATER]
    rows = con.execute(f"SELECT {', '.join((*names, *others))} FROM {_parquet(path)}").fetchall()
    return [dict(zip((*names, *others), row, strict=True)) for row in rows]


def _timing(row: Mapping[str, Any]) -> Timing:
    """Return the timing of a row.

    Raises:
        ValueError: the row was changed, or its key does not match its calls.
    """
    arguments = {name: value for name, value in row.items() if name != "seal"}
    if row["seal"] != _seal(tuple(arguments.values())):
        raise ValueError("this timing was changed")
    arguments |= {"state": CacheState(arguments["state"]), "status": Status(arguments["status"])}
    timing = Timing(**{**arguments, "kernels": tuple(map(str, json.loads(arguments["kernels"])))})
    spec_of(timing)
    return timing


def _seal(values: Sequence[Any]) -> str:
    text = json.dumps([repr(value) if isinstance(value, float) else value for value in values], separators=(",", ":"))
    return cached.hash_of(text, nbytes=8)


def _plain(environment: Environment) -> dict[str, Any]:
    return {MARK: VERSION, "equal": dict(environment.properties), "noted": dict(environment.circumstances)}


def _environment(description: Mapping[str, Any]) -> Environment:
    if description.get(MARK) != VERSION:
        raise ValueError("not a description of an environment, or one of a newer xsp")
    return Environment(dict(description["equal"]), dict(description["noted"]))
