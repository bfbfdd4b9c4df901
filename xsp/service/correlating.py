"""A second process that gives a service's spans their parents, so that the service's threads do not.

What was recorded during one call of a model goes there as raw rows and comes back as the spans of that call
alone, in the shape that OpenTelemetry wants them; or they are sent on from there over OTLP, and only their
number comes back. Both ends are the same Python, so messages travel as `marshal`.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from xsp import identity, semconv
from xsp.correlate import correlate
from xsp.errors import XspError
from xsp.span import COLUMNS, Kind, Span

_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from xsp.service.correlating import main; main(int(sys.argv[2]))"
START_S = 60.0
NICE = 10
"""By how much the second process stands back behind the service's."""

PATIENCE_S = 30.0
"""How long a receiver of spans is tried again."""

_SIMPLE = (str, bool, int, float)
_HOSTS = ("host.id", "host.ip", "host.name")


class Recorded(NamedTuple):
    """What the collectors saw during one call of a model, and whose call it was."""

    trace_id: str
    span_id: str
    """Of the model's span, which the service's own tracer made."""

    thread: int
    process: int
    rung: int
    rows: list[tuple[Any, ...]]


class Finished(NamedTuple):
    """A span with its parent, as an OpenTelemetry span has it."""

    name: str
    level: int
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: str
    """As in the table: `ok`, `error:<exception type>`, …"""

    attributes: dict[str, Any]


class Answer(NamedTuple):
    """What became of one call's rows."""

    spans: list[Finished]
    """To be given to the service's own processors; empty if they were sent from here."""

    sent: int = 0
    strangers: int = 0
    """Spans that were recorded at the same time and do not belong to the call, as far as evidence goes."""

    problem: str | None = None
    """Why spans are missing."""


class CorrelatorError(XspError):
    """The second process did not start, or ended."""


def pack(recorded: Recorded) -> bytes:
    """Return a call in the form in which it travels, a tenth of the size of its rows."""
    return marshal.dumps(tuple(recorded))


# --- in the service -------------------------------------------------------------------------------------


class Correlator:
    """The service's end of the pipe."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the second process.

        Args:
            settings: `otlp`, a target of `xsp.exporters.endpoint`, or None to have the spans back; `resource`,
                the attributes of the service's.

        Raises:
            CorrelatorError: it does not start.
        """
        self._pipe, theirs = Pipe()
        package = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", _CODE, package, str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",  # the service's own directory may hold a file called duckdb.py
                start_new_session=True,  # an interrupt in the terminal is for the service
            )
        except OSError as error:
            raise CorrelatorError(f"the process that correlates did not start ({error})") from error
        finally:
            theirs.close()
        problem = self._ask(marshal.dumps(dict(settings)), START_S)
        if problem is not None:
            self.close()
            raise CorrelatorError(f"the process that correlates did not start ({problem})")

    def correlate(self, packed: bytes) -> Answer:
        """Return what became of a call's rows; waits for it.

        Args:
            packed: what `pack` made of the call.

        Raises:
            CorrelatorError: the process is gone.
        """
        spans, *rest = self._ask(packed)
        return Answer([Finished(*span) for span in spans], *rest)

    def close(self) -> None:
        """End the second process."""
        self._pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now; whoever waits for an answer gets an error."""
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Let go of the pipe in a forked child, whose parent goes on using it."""
        self._pipe.close()
        self._process.returncode = 0  # it is no child of this process

    def _ask(self, message: bytes, timeout_s: float | None = None) -> Any:
        try:
            self._pipe.send_bytes(message)
            if not self._pipe.poll(timeout_s):
                raise CorrelatorError(f"the process that correlates did not start within {timeout_s:.0f} s")
            return marshal.loads(self._pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise CorrelatorError("the process that correlates is gone; it starts again with the next call") from error


# --- in the second process --------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Answer until the pipe ends."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # the service has ended, or needs no more answers
        try:
            answer_to = _answering(**marshal.loads(pipe.recv_bytes()))
        except Exception as error:
            pipe.send_bytes(marshal.dumps(f"{type(error).__name__}: {error}"))
            return
        pipe.send_bytes(marshal.dumps(None))
        while True:
            recorded = Recorded(*marshal.loads(pipe.recv_bytes()))
            pipe.send_bytes(marshal.dumps(_tried(answer_to, recorded)))


def _answering(otlp: str | None, resource: Mapping[str, Any]) -> Callable[[Recorded], tuple[Any, ...]]:
    return _give_back if otlp is None else _Sending(otlp, resource)


def _tried(answer_to: Callable[[Recorded], tuple[Any, ...]], recorded: Recorded) -> tuple[Any, ...]:
    try:
        return answer_to(recorded)
    except XspError as error:
        return [], 0, 0, str(error)
    except Exception as error:  # whatever it is, the service must hear of it and go on
        return [], 0, 0, f"spans could not be correlated: {type(error).__name__}: {error}"


def _give_back(recorded: Recorded) -> tuple[Any, ...]:
    spans, strangers = spans_of(recorded)
    return [tuple(finished(span)) for span in spans], 0, strangers, None


class _Sending:
    """Sends calls over OTLP; the table engine and the encoder load here and never in the service."""

    def __init__(self, target: str, resource: Mapping[str, Any]) -> None:
        from xsp import table
        from xsp.exporters.courier import Courier
        from xsp.exporters.endpoint import endpoint

        self._resource = resource
        self._con = table.connect()
        self._con.execute("SET threads = 1")
        self._courier = Courier(endpoint(target), PATIENCE_S)

    def __call__(self, recorded: Recorded) -> tuple[Any, ...]:
        """Return the numbers of spans that were sent and that were not the call's, and a problem."""
        from xsp import table
        from xsp.exporters import zoom
        from xsp.exporters.encode import requests

        spans, strangers = spans_of(recorded)
        before, problem = self._courier.counts.spans, None
        table.create(self._con, "spans")
        table.insert(self._con, "spans", spans)
        for part in zoom.split(self._con, "spans"):
            for request in requests(self._con, part, self._resource_of, max_bytes=self._courier.max_bytes):
                if not self._courier.bring(request):
                    problem = "; ".join(self._courier.counts.messages)
        return [], self._courier.counts.spans - before, strangers, problem

    def _resource_of(self, level: int, rank: int, process: int | None) -> dict[str, Any]:
        return level_resource(self._resource, level)


def level_resource(resource: Mapping[str, Any], level: int) -> dict[str, Any]:
    """Return the resource of a deeper level: the service's, as a service of its own called `name.level`.

    Viewers give services colours and filters. Where the service does not tell its host, a pseudonym stands
    in: viewers doubt the clocks of spans whose hosts they do not know.
    """
    host = {} if any(name in resource for name in _HOSTS) else {"host.id": identity.host()}
    name = f"{resource.get('service.name', 'unknown_service')}.{semconv.level_name(level)}"
    return {**resource, **host, "service.name": name}


def spans_of(recorded: Recorded) -> tuple[list[Span], int]:
    """Return the spans beneath the model's span, parents first, and the number of spans that are not of this call.

    Other requests' threads are recorded at the same time. They are correlated too: work that tells no thread
    is this call's only if it cannot be theirs.
    """
    rows = _rows(recorded)
    inside = _beneath(recorded.span_id, correlate(rows))
    strangers = len(rows) - len(inside)
    if strangers:  # the others' rows would take part in the numbering of layers and in the keys
        rows = [row for row in rows if row.span_id in inside]
    own = [span for span in correlate(rows) if span.span_id != recorded.span_id]
    return own, strangers


def _rows(recorded: Recorded) -> list[Span]:
    """Return the rows with ids, the model's own with the id of its OpenTelemetry span."""
    common: dict[str, Any] = {"trace_id": recorded.trace_id, "process": recorded.process, "rung": recorded.rung}
    rows = []
    for row in map(Span._make, recorded.rows):
        model = row.kind == Kind.FORWARD and row.thread == recorded.thread
        identifier = recorded.span_id if model else row.span_id or os.urandom(8).hex()
        rows.append(row._replace(**common, span_id=identifier, timed=True))
    return rows


def _beneath(root: str, spans: Iterable[Span]) -> set[str | None]:
    """Return the ids of a span and of all that hangs under it; parents come first."""
    inside: set[str | None] = {root}
    for span in spans:
        if span.parent_id in inside:
            inside.add(span.span_id)
    return inside


def finished(span: Span) -> Finished:
    """Return a span as OpenTelemetry has it."""
    return Finished(
        name=span.name,
        level=span.level,
        span_id=span.span_id or "",
        parent_id=span.parent_id or "",
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=span.status,
        attributes=attributes(span),
    )


def attributes(span: Span) -> dict[str, Any]:
    """Return the attributes of a span; what the SDK's attributes cannot hold is JSON."""
    found: dict[str, Any] = {}
    value: Any
    for column, value in zip(COLUMNS, span, strict=True):
        if value is None or column.attribute is None or column.attribute in semconv.ON_RESOURCES:
            continue
        if column.name == "attributes":
            found |= {name: _plain(each) for name, each in semconv.flat(value).items() if each is not None}
        else:
            found[column.attribute] = semconv.level_name(value) if column.name == "level" else value
    if span.status.startswith("error:"):
        found["error.type"] = span.status.removeprefix("error:")
    return found


def _plain(value: Any) -> Any:
    simple = isinstance(value, _SIMPLE)
    alike = isinstance(value, list) and value and {type(each) for each in value} in [{kind} for kind in _SIMPLE]
    return value if simple or alike else json.dumps(value)
