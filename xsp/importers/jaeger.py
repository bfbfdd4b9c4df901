"""Read traces from Jaeger: a trace by URL, the same JSON as a file, and the JSON that its UI downloads.

`/api/v3/traces/{id}` is OTLP in JSON and exact. The UI's download has times and durations in microseconds; xsp's own
spans carry `xsp.duration_ns`, which restores exact durations. By URL, the traces that the spans link to are fetched
too: the details of an overview, and the trace of the run.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urlsplit

from xsp.errors import TraceError
from xsp.importers import otlp_json
from xsp.importers.contract import Imported, Losses, RowImporter, is_url, open_bytes, without_credentials
from xsp.importers.otlp import MAX_MESSAGE_BYTES, InvalidSpan, OtlpSpan, Reader, ScopeSpans

if TYPE_CHECKING:
    from urllib.error import HTTPError
    from urllib.request import Request

SECONDS = 30
"""Timeout of each read in seconds: if Jaeger sends no byte for so long, it counts as hanging."""

MAX_ANSWER_S = 600
"""Maximum seconds for a whole answer, even if it keeps arriving."""

MAX_LINKED = 2_000
"""Maximum number of linked traces that are fetched."""

_UI = re.compile(rb'\s*\{\s*"(?:data|result)"\s*:\s*[\[{]')
_TRACE_URL = re.compile(r"(https?://[^?#]*?)/(?:trace|api/traces|api/v3/traces)/([0-9a-fA-F]{1,32})/?(?:[?#].*)?", re.I)
_JAEGER_TAGS = frozenset(
    "span.kind otel.scope.name otel.scope.version otel.status_code otel.status_description error "
    "internal.span.format w3c.tracestate".split()
)
"""Tags in which Jaeger stores data that are fields, not attributes, in OTLP."""


class Jaeger(RowImporter):
    """Importer of Jaeger traces."""

    name = "jaeger"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the source is a URL, or a file that begins like an answer of Jaeger."""
        return is_url(source) or _UI.match(head) is not None

    def read(self, source: str) -> Imported:
        """Start to read a file or a URL; see `RowImporter.read`."""
        losses = Losses(self.name)
        if is_url(source):
            match = _TRACE_URL.fullmatch(source)
            if match is None:
                raise TraceError(
                    f"{without_credentials(source)}: not the URL of a trace; "
                    "give http://localhost:16686/trace/<trace id>, as in the browser's address bar"
                )
            base, trace_id = match[1], match[2].lower().zfill(32)
            reader = Reader(losses)
            return Imported(reader.rows(_trace_parts(base, trace_id, reader)), losses, reader.runs)
        with open_bytes(Path(source)) as file:
            text = otlp_json.read_rest(file, source)
        documents = list(_documents(text, source))
        in_microseconds = any("data" in document for document in documents)
        reader = Reader(losses, unit_ns=1000 if in_microseconds else 1)
        if in_microseconds:
            losses.note("Jaeger's UI gives times in whole microseconds: starts are exact to the microsecond only")

        def parts() -> Iterator[ScopeSpans]:
            for document in documents:
                yield from _parts(document, source)
            reader.close()

        return Imported(reader.rows(parts()), losses, reader.runs)


# --- by URL -------------------------------------------------------------------------------------------


def _trace_parts(base: str, trace_id: str, reader: Reader) -> Iterator[ScopeSpans]:
    """Yield the parts of a trace and of the traces that its spans link to."""
    visited = {trace_id}
    yield from _trace(base, trace_id)
    while pending := sorted(reader.links - visited):
        for linked in pending[: MAX_LINKED - len(visited)]:
            visited.add(linked)
            try:
                yield from _trace(base, linked)
            except TraceError as error:
                reader.losses.note(f"linked trace {linked}: {str(error).rpartition(f'{linked}: ')[2]}")
        if len(visited) >= MAX_LINKED:
            reader.losses.note(
                f"{len(reader.links - visited)} linked traces were not fetched: {MAX_LINKED} is the limit"
            )
            break
    reader.close()


def _trace(base: str, trace_id: str) -> Iterator[ScopeSpans]:
    url = f"{base}/api/v3/traces/{trace_id}?raw_traces=true"  # as stored: no clock is adjusted
    place = without_credentials(url)
    text = _get(url, place)
    if text.lstrip()[:1] == b"<":
        raise TraceError(f"{place}: answers with a page, not with a trace; is this the base path of a Jaeger v2?")
    for document in _documents(text, place):
        yield from _parts(document, place)


def _get(url: str, place: str) -> bytes:
    """Return the content of a URL.

    Raises:
        TraceError: it cannot be fetched; the message contains no credentials.
    """
    from urllib import error as errors  # imported here because it takes long, and files do not need it
    from urllib.request import HTTPRedirectHandler, build_opener

    class NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Follow no redirect: credentials must not be sent elsewhere, and Jaeger does not redirect."""

    request = _request(url, place)
    try:
        with build_opener(NoRedirect).open(request, timeout=SECONDS) as response:
            return _body(response, place)
    except errors.HTTPError as error:
        with error:
            _raise_for_status(error, place)
    except errors.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise TraceError(f"{place}: no answer ({reason}); is Jaeger running there?") from None
    except TimeoutError:
        raise TraceError(f"{place}: no answer within {SECONDS} s") from None
    except TraceError:
        raise
    except Exception as error:  # from http.client, if the answer is not HTTP or breaks off
        raise TraceError(f"{place}: the answer was cut off or is not HTTP ({type(error).__name__})") from None


def _request(url: str, place: str) -> Request:
    """Return the request, with the URL's credentials in a header."""
    from urllib.request import Request

    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        request = Request(parts._replace(netloc=host, fragment="").geturl())
        _ = parts.port  # raises if it is not a number
        if not parts.hostname:
            raise ValueError("it has no host")
    except ValueError:
        raise TraceError(f"{place}: not a URL; write http://localhost:16686/trace/<trace id>") from None
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret.encode()).decode()}")
    return request


def _body(response: Any, place: str) -> bytes:
    """Return the content of a response, which must not be too long or too slow."""
    content, end = bytearray(), time.monotonic() + MAX_ANSWER_S
    while part := response.read1(1 << 20):
        content += part
        if len(content) > MAX_MESSAGE_BYTES:
            raise TraceError(
                f"{place}: more than {MAX_MESSAGE_BYTES >> 20} MiB; export it to a file of JSON lines instead"
            )
        if time.monotonic() > end:
            raise TraceError(f"{place}: not finished within {MAX_ANSWER_S} s")
    return bytes(content)


def _raise_for_status(error: HTTPError, place: str) -> NoReturn:
    if error.code == 404:
        raise TraceError(f"{place}: Jaeger has no such trace (404), or this is not a Jaeger") from None
    if error.code in (401, 403):
        raise TraceError(f"{place}: not allowed ({error.code}); put credentials into the URL") from None
    raise TraceError(f"{place}: answers with {error.code}") from None


# --- as JSON ------------------------------------------------------------------------------------------


def _documents(text: bytes, place: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a text, one after another; a long answer of Jaeger consists of several."""
    try:
        content = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{place}: not UTF-8 at byte {error.start}; this is not a Jaeger trace") from error
    decoder, index = json.JSONDecoder(), 0
    while True:
        index = _BLANK.match(content, index).end()  # type: ignore[union-attr]
        if index == len(content):
            return
        try:
            document, index = decoder.raw_decode(content, index)
        except json.JSONDecodeError as error:
            raise TraceError(f"{place}: not JSON, or cut off ({error})") from error
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{place}: JSON that cannot be read ({error})") from error
        if not isinstance(document, dict):
            raise TraceError(f"{place}: not a JSON object; this is not a Jaeger trace")
        yield document


_BLANK = re.compile(r"\s*")


def _parts(document: Mapping[str, Any], place: str) -> Iterator[ScopeSpans]:
    """Yield the parts of a document in one of Jaeger's two formats."""
    for name in ("error", "errors"):
        if document.get(name):
            raise TraceError(f"{place}: Jaeger answers with an error: {_message(document[name])}")
    result = document.get("result")
    if isinstance(result, dict):
        yield from otlp_json.parts_of(result, place)
    elif isinstance(document.get("data"), list):
        for trace in document["data"]:
            yield from _ui_parts(trace, place)
    else:
        raise TraceError(f"{place}: not a Jaeger trace: it has neither result nor data")


def _message(error: Any) -> str:
    first = error[0] if isinstance(error, list) and error else error
    text = first.get("message", first.get("msg", "")) if isinstance(first, dict) else first
    return "".join(letter if letter.isprintable() else " " for letter in str(text))[:200]


def _ui_parts(trace: Any, place: str) -> Iterator[ScopeSpans]:
    """Yield the parts of a trace in the format of the UI's download: one per span, with the resource of its process."""
    fits = isinstance(trace, dict) and isinstance(trace.get("spans"), list)
    if not fits or not isinstance(trace.get("processes", {}), dict):
        raise TraceError(f"{place}: an item of data has no spans and processes; this is not a Jaeger trace")
    for span in trace["spans"]:
        embedded = span.get("process") if isinstance(span, dict) else None
        process_id = str(span.get("processID")) if isinstance(span, dict) else ""
        process = embedded if isinstance(embedded, dict) else trace.get("processes", {}).get(process_id)
        process = process if isinstance(process, dict) else {}
        try:
            resource = {**_tags(process.get("tags")), "service.name": process.get("serviceName")}
            tags = _tags(span.get("tags")) if isinstance(span, dict) else {}
            yield ScopeSpans(resource, str(tags.get("otel.scope.name", "")), [_span(span, tags)])
        except InvalidSpan as error:
            yield ScopeSpans({}, "", [error])


def _span(span: Any, tags: Mapping[str, Any]) -> OtlpSpan | InvalidSpan:
    if not isinstance(span, dict):
        return InvalidSpan("it is not a JSON object")
    start, duration = span.get("startTime"), span.get("duration")
    trace_id, references = _digits(span.get("traceID"), 32), span.get("references") or []
    if not isinstance(start, int) or not isinstance(duration, int) or not isinstance(references, list):
        return InvalidSpan("its times are missing or not valid")
    targets = [
        (str(reference.get("refType")), _digits(reference.get("traceID"), 32), _digits(reference.get("spanID"), 16))
        for reference in references
        if isinstance(reference, dict)
    ]
    child_of, follows_from = (
        [target for kind, trace, target in targets if kind == relation and trace == trace_id]
        for relation in ("CHILD_OF", "FOLLOWS_FROM")
    )
    parents = [*child_of, _digits(span.get("parentSpanID"), 16), *follows_from]  # the order in which Jaeger looks
    return OtlpSpan(
        trace_id=trace_id,
        span_id=_digits(span.get("spanID"), 16),
        parent_id=next(filter(None, parents), None),
        name=span.get("operationName", ""),
        start_ns=start * 1000,
        end_ns=(start + duration) * 1000,
        attributes={name: value for name, value in tags.items() if name not in _JAEGER_TAGS},
        status=2 if tags.get("error") in (True, "true") or tags.get("otel.status_code") == "ERROR" else 0,
        links=tuple(trace for kind, trace, _ in targets if trace and trace != trace_id),
        events=otlp_json.item_count(span.get("logs")),
    )


def _digits(value: Any, count: int) -> str | None:
    """Return an id with the leading zeros that Jaeger omits."""
    return value.zfill(count) if isinstance(value, str) and value else None


def _tags(tags: Any) -> dict[str, Any]:
    """Return a list of Jaeger tags as a dictionary."""
    if tags is None:
        return {}
    if not isinstance(tags, list):
        raise InvalidSpan("its tags are not a list")
    attributes = {}
    for tag in tags:
        if not isinstance(tag, dict) or not isinstance(tag.get("key"), str):
            raise InvalidSpan("one of its tags has no key")
        # Jaeger sends lists and objects as JSON text, which stays text
        kind = tag.get("type")
        value = tag.get("value")
        if kind == "int64" or (isinstance(value, int) and not isinstance(value, bool)):
            value = otlp_json.integer(value)  # None beyond 64 bits: a float may not hold it either
        attributes[tag["key"]] = float(value) if kind == "float64" and isinstance(value, (int, float)) else value
    return attributes
