"""The interface of importers: an importer recognises a source, reads it, and reports what it left out.

An importer is a class whose constructor takes no arguments, named by an entry point in `xsp.importers`. It has exactly
one of three methods, which decides its kind: a `TableImporter` fills a table, a `RowImporter` yields rows, and an
`Enricher` adds to the spans of another file. Rows are a stream, so memory is bounded whatever the size of the file; the
runs and the losses, which are known only at the end, are filled in while the rows are read. Every row has a trace id
and a span id, so a span that is read twice counts once. Rows of a source without steps may omit `step`, `rung` and
`key`: `xsp.ingest` makes each trace a step.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from xsp import plugins
from xsp.errors import PluginError, TraceError
from xsp.run import Run
from xsp.schema import COLUMNS, Column, Span
from xsp.texts import size_text

if TYPE_CHECKING:
    import duckdb

GROUP = "xsp.importers"
HEAD = 1 << 16
"""Number of bytes of a file that are passed to `recognises`, after decompression."""

_RAW_NAMES = (
    "level name kind type phase start_ns dur_ns process thread device stream correlation_id sequence_nr "
    "forward_thread status batch_size input_shapes dtype alloc_bytes flops flops_source dram_read_bytes "
    "dram_write_bytes bytes_source occupancy occupancy_source collector attributes"
).split()

MAX_TIME_NS = 2**62
"""Nanoseconds since the epoch. Times from here on are treated as damaged; the sum of two smaller ones fits a BIGINT."""

PYTHON_FRAMES = "frames of Python that are no module"
"""Key in `skipped` for frames of Python's stack, whose recording slows the host down."""

CUDA_BACKTRACES = "frames of backtraces of CUDA's calls"
OS_BACKTRACES = "frames of backtraces of the operating system's calls"
CPU_SAMPLES = "frames of samples of the CPU"
"""The same for host data of Nsight Systems; recording the backtraces of CUDA calls slows the launching calls down."""

KERNEL_NAME = "kernel"
"""Attribute of a launch call: the name of the kernel, where the source states it. A call that a graph records has no
device work that would."""

SAMPLES = "raw_samples"
"""Table of samples that a `TableImporter` may make, with the columns of `SAMPLE_COLUMNS`; `rank` is null."""

GZIP = b"\x1f\x8b"
_TASKS = re.compile(rb"[\x80-\xff]{0,2}[\x00-\x7f]\x0a[\x05-\x0f]\d+\.\d+\.\d+")
"""Beginning of Chakra's binary form: the length of the first message, and in it the version of the schema."""
_UNSUPPORTED_COMPRESSION = {b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
"""First bytes of compressed files that are refused."""

_MAX_REASONS = 100
"""Maximum number of reasons that are listed; a source can have as many as it has spans."""


class Row(NamedTuple):
    """A span, and the run that it belongs to."""

    span: Span
    run: str = ""
    """Id of the run; empty if the source does not state it."""


@dataclass
class Losses:
    """Counts of spans that were read, and of those that were left out, by reason; and notes."""

    importer: str = ""
    spans: int = 0
    """Number of spans that were read."""

    skipped: Counter[str] = field(default_factory=Counter)
    """Number of spans that were left out, by reason."""

    changed: Counter[str] = field(default_factory=Counter)
    """Number of values that were changed, by what was changed."""

    notes: list[str] = field(default_factory=list)
    """Sentences about the whole source, each once."""

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def report(self) -> dict[str, Any]:
        """Return the entry under `imported` in `run.json`."""
        return {
            "importer": self.importer,
            "spans": self.spans,
            "skipped": _largest(self.skipped),
            "changed": _largest(self.changed),
            "notes": self.notes,
        }

    def sentences(self) -> list[str]:
        """Return the losses as sentences, the largest first."""
        skipped = [f"{count} spans were left out: {reason}" for reason, count in _largest(self.skipped).items()]
        changed = [f"{count} × {change}" for change, count in _largest(self.changed).items()]
        return [*skipped, *changed, *self.notes]


def _largest(reasons: Counter[str]) -> dict[str, int]:
    """Return reasons with their counts, largest first; those beyond the maximum are summed up in one entry."""
    largest = dict(reasons.most_common(_MAX_REASONS))
    rest = reasons.total() - sum(largest.values())
    return {**largest, f"{len(reasons) - len(largest)} further reasons": rest} if rest else largest


@dataclass
class Imported:
    """The content of a source. `runs` and `losses` are complete when `rows` is exhausted."""

    rows: Iterator[Row]
    losses: Losses
    runs: Sequence[Mapping[str, Any]] = ()
    """The description of each run in the source: content of `run.json`, with its `id`."""


RAW_COLUMNS: tuple[Column, ...] = (
    Column("number", "BIGINT", "of the span in its source; unique, not negative"),
    *(column for column in COLUMNS if column.name in _RAW_NAMES),
    Column("operator", "BIGINT", "the source's own id of an operator; of device work, that of the operator it is of"),
    Column("replayed", "BOOLEAN", "device work of a graph that is replayed"),
    Column("dtypes", "VARCHAR", "element types of the inputs, as a JSON array"),
    Column("scalars", "VARCHAR", "inputs that are not tensors, at their positions, as a JSON array"),
)
"""Columns of spans that have no identities and no parents yet. Times are nanoseconds since the epoch."""


@dataclass
class SourceInfo:
    """The description of a source whose spans were read into the table `raw_spans`."""

    run: dict[str, Any]
    """The description of the run in the source: content of `run.json`."""

    losses: Losses

    tolerance_ns: int = 500
    """How far a span may extend beyond its parent: the resolution of the clocks."""

    private: dict[str, Any] = field(default_factory=dict)
    """Names of people, machines and paths; stored only if the user requests it."""


class _Reader(Protocol):
    """The members that all kinds of importers have."""

    name: str

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether this importer reads the source.

        Args:
            head: the first `HEAD` bytes of the source, decompressed if it is gzip; empty for a URL.
            source: path of a file, or URL.
        """
        ...


@runtime_checkable
class TableImporter(_Reader, Protocol):
    """Reads spans without parents, of files of any size, into a table of the engine; `xsp.ingest` adds the parents."""

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans` with the columns of `RAW_COLUMNS`, with all spans of a source, which has one rank.

        Steps have the kind STEP, layers the level LAYER. Do not invent steps if the source has none. A source with
        counters over time (power, clocks, use of units) may also make the table `SAMPLES`.

        Raises:
            TraceError: it cannot be read, or its structure is broken.
            PluginError: a package is missing; the message says what to install.
        """
        ...


@runtime_checkable
class RowImporter(_Reader, Protocol):
    """Reads spans that have ids and parents, as a stream of rows."""

    def read(self, source: str) -> Imported:
        """Start to read a source.

        Raises:
            TraceError: it cannot be read, or its structure is broken; at once, or while the rows are read.
            PluginError: a package is missing; the message says what to install.
        """
        ...


@runtime_checkable
class Enricher(_Reader, Protocol):
    """Reads a file without times, and adds its content to the spans of another file."""

    def enrich(self, con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> None:
        """Update the table `raw_spans` that a `TableImporter` filled; count what does not match.

        Raises:
            TraceError: it cannot be read, or belongs to another file.
        """
        ...


Importer: TypeAlias = TableImporter | RowImporter | Enricher

_KINDS: dict[str, Any] = {"fill": TableImporter, "read": RowImporter, "enrich": Enricher}


def load_importer(name: str) -> Importer:
    """Load an importer by the name of its entry point, and check that it is of exactly one kind.

    Raises:
        PluginError: it cannot be loaded or made, or is not an importer; the message names it and the reason.
    """
    factory = plugins.load(GROUP, name)
    try:
        instance: Importer = factory()
        missing = [member for member in ("name", "recognises") if not hasattr(instance, member)]
        if missing:
            raise TypeError(f"has no {', '.join(missing)}; xsp/importers/contract.py says what an importer has")
        kinds = [method for method, kind in _KINDS.items() if isinstance(instance, kind)]
        if len(kinds) != 1:
            raise TypeError(f"has {' and '.join(kinds) or 'none'} of {', '.join(_KINDS)}; an importer has one of these")
    except plugins.PLUGIN_ERRORS as error:
        raise PluginError(_unusable(name, error)) from error
    return instance


def _unusable(name: str, error: BaseException) -> str:
    return f"importer {name!r} cannot be used: {type(error).__name__}: {error}"


def find_importer(source: str) -> Importer:
    """Return the importer that recognises a source.

    Raises:
        TraceError: there is no such file, it is compressed but not with gzip, or no importer recognises it.
        PluginError: none recognises it, and some could not be loaded.
    """
    head = b"" if is_url(source) else first_bytes(Path(source))
    if not head and not is_url(source):
        raise TraceError(f"{source}: is empty; copy it again")
    unusable: list[str] = []
    for name in plugins.names(GROUP):
        try:
            candidate = load_importer(name)
            recognised = candidate.recognises(head, source)
        except PluginError as error:
            unusable.append(str(error))
            continue
        except plugins.PLUGIN_ERRORS as error:  # of a third party: try the other importers
            unusable.append(_unusable(name, error))
            continue
        if recognised:
            return candidate
    if _TASKS.match(head):
        raise TraceError(
            f"{source}: an execution trace of tasks for simulators (Chakra's binary form, as `xsp predict --chakra` "
            "writes it), without spans and operators; give the run that it was made from, or the JSON that "
            "torch.profiler.ExecutionTraceObserver writes"
        )
    for mark, form in _UNSUPPORTED_COMPRESSION.items():
        if head.startswith(mark):
            raise TraceError(f"{source}: compressed with {form}, which is not read; decompress it, or use gzip")
    if unusable:
        raise PluginError(f"{without_credentials(source)}: no importer recognises it; {'; '.join(unusable)}")
    for pattern, form in _OTHER_FORMS.items():
        if re.match(pattern, head[:_START], re.DOTALL | re.IGNORECASE):
            raise TraceError(f"{without_credentials(source)}: no importer recognises it: {form}")
    names = ", ".join(plugins.names(GROUP))
    raise TraceError(
        f"{without_credentials(source)}: no importer recognises it; there are: {names}. docs/use/importing.md says "
        "what each reads"
    )


_START = 4096
"""Number of bytes at the start of a file by which forms that are not read are told."""

_OTHER_FORMS = {
    rb".{257}ustar": "an archive (tar); unpack it (tar xf), and give the folder or a file in it",
    rb"NVR\0": "a report of Nsight Compute: counters without a timeline; join it with a run: xsp counters RUN FILE",
    rb"PAR1": "a Parquet file; xsp reads those of runs by their folder, or by the name FILE.parquet",
    rb"\s*(<!doctype html|<html)": "a page (HTML); give the data that it was made from, such as a trace as JSON "
    '(prof.export_chrome_trace("trace.json.gz"), prof.export_memory_timeline("memory.json"))',
    rb'"?(Kind|Domain)"?,"?\w+"?,': "a table (CSV) of rocprofv3; record with rocprofv3 --output-format rocpd",
    rb"[\w\" .()%/-]+(,[\w\" .()%/-]+)+\r?\n": "a table (CSV) without times of single spans; export the profiler's "
    "timeline instead: nsys export --type sqlite, rocprofv3 --output-format rocpd",
    rb"\s*\{\s*\}?\s*$|\s*\[\s*\]?\s*$": "JSON without any content; record again while something runs",
    rb"\s*[{\[]": "JSON, but without trace events (`traceEvents`), spans (`resourceSpans`) or frames; write a trace: "
    'prof.export_chrome_trace("trace.json.gz")',
    rb"\x89HDF|\x93NUMPY|\x7fELF|%PDF|\x89PNG": "no trace, but a file of another program",
}  # fmt: skip
"""What a file is that no importer reads, by a pattern for its first bytes, and what to do instead."""


def is_url(source: str) -> bool:
    """Return whether a source is a URL."""
    return source.partition("://")[0].lower() in ("http", "https")


def trace_url(url: str, trace_id: str | None) -> str:
    """Return the URL of a trace below the URL of a Jaeger; without a trace id, return the URL unchanged."""
    return url if trace_id is None else f"{url.partition('?')[0].rstrip('/')}/trace/{trace_id}"


def without_credentials(source: str) -> str:
    """Return a source in a form that may be shown: a URL without user, password and query."""
    if not is_url(source):
        return source
    scheme, _, rest = source.partition("://")
    address = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = address.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed if it is gzip.

    Raises:
        TraceError: it cannot be read.
    """
    with open_bytes(path) as file:
        try:
            return file.read(HEAD)
        except (EOFError, OSError, zlib.error) as error:
            raise read_error(path, error) from error


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file to read its bytes, decompressed if it is gzip. Pass errors of later reads to `read_error`.

    Raises:
        TraceError: it cannot be opened.
    """
    try:
        if path.is_dir():
            raise TraceError(f"{path}: is a directory; give the files in it")
        with open(path, "rb") as file:
            compressed = file.read(2) == GZIP
        return cast("IO[bytes]", gzip.open(path)) if compressed else open(path, "rb")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise TraceError(f"{str(path)!r}: not a path ({error})") from error


@contextmanager
def check_values(source: str) -> Iterator[None]:
    """Report values that do not fit a column as an error of the source.

    Raises:
        TraceError: the body met such a value.
    """
    import duckdb

    try:
        yield
    except duckdb.DataError as error:
        reason = str(error).splitlines()[0]
        raise TraceError(f"{source}: holds values that do not fit the span table ({reason})") from error


def read_file(source: str, most_bytes: int, remedy: str) -> bytes:
    """Return the content of a file, decompressed if it is gzip.

    Args:
        source: path of the file.
        most_bytes: limit of its size when decompressed.
        remedy: how to get a smaller one, for the error.

    Raises:
        TraceError: it cannot be read, or is larger than the limit.
    """
    with open_bytes(Path(source)) as file:
        try:
            data = file.read(most_bytes + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise read_error(source, error) from error
    if len(data) > most_bytes:
        raise TraceError(f"{source}: is larger than {size_text(most_bytes)}; {remedy}")
    return data


def read_error(source: Path | str, error: Exception, place: str = "") -> TraceError:
    """Return the TraceError that states where a source is broken, and why.

    Args:
        source: path or URL.
        error: the error while reading.
        place: position in the source: a line, a byte.
    """
    if isinstance(error, EOFError):
        reason = "the compressed file is truncated; copy it again"
    elif isinstance(error, (gzip.BadGzipFile, zlib.error)):
        reason = f"damaged gzip ({error})"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    location = f"{source}, {place}" if place else f"{source}"
    return TraceError(f"{location}: {reason}")


# --- claims of several importers on a file ----------------------------------------------------------------------------
# Descriptions of runs and devices as sources state them. Only values of the expected type are used.

_ID = re.compile(r"[0-9a-f]{1,32}")


def run_of(text: str, losses: Losses) -> Run | None:
    """Parse a `run.json`; fields of unexpected types are left out.

    Args:
        text: JSON.
        losses: counts fields that were left out.

    Returns:
        The run, which has an `id`; None if the text does not describe a run.
    """
    try:
        run = Run.of(json.loads(text, parse_constant=_refuse))
    except (ValueError, TypeError, AttributeError, RecursionError):
        run = Run.of({})
    if run.id is None or not _ID.fullmatch(run.id):
        losses.changed["description of a run that is not valid"] += 1
        return None
    for name in run.misfits:
        losses.changed[f"field {name} of a run left out: it does not have xsp's type"] += 1
    return Run.of({name: value for name, value in run.items() if name not in _DIRECTORY_FIELDS})


def device(name: str, sms: Any, memory_bytes: Any, major: Any, minor: Any, warp_size: Any) -> dict[str, Any]:
    """Return the properties of a device in the form of `run.json`; values that the source does not state are None."""
    return {
        "name": name,
        "sms": sms,
        "memory_bytes": memory_bytes,
        "compute": None if major is None or minor is None else f"{major}.{minor}",
        "warp_size": warp_size,
    }


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DIRECTORY_FIELDS = frozenset({"format", "parts", "ranks", "imported", "received", "delivery"})
"""Fields about the run directory itself; the process that writes the directory sets them."""
