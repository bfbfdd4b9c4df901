"""Requests of spans over HTTP, in bounded time."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLong
from http.client import BadStatusLine
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp.otlp import answers
from xsp.otlp.answers import AGENT, Answer, Busy, Nobody, Refused, TooLarge
from xsp.otlp.bodies import as_json
from xsp.otlp.endpoint import Endpoint, Protocol

_MOST_OF_AN_ANSWER = 65536
_GRACE_S = 0.5
_RETRYABLE = frozenset({408, 429, 502, 503, 504})
_NO_RECEIVER = frozenset({401, 403, 404, 405, 407, 410, 415, 501})


class HttpSender:
    """OTLP over HTTP, one connection that is kept."""

    def __init__(self, to: Endpoint) -> None:
        self._to = to
        self._json = to.protocol is Protocol.HTTP_JSON
        parts = urlsplit(to.url)
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._session = self._connected()

    def _connected(self) -> requests.Session:
        session, to, parts = requests.Session(), self._to, urlsplit(self._to.url)
        session.auth = lambda request: request  # or else what stands in ~/.netrc replaces the header
        if parts.username is not None and "authorization" not in dict(to.headers):
            session.auth = (unquote(parts.username), unquote(parts.password or ""))
        if to.cert_file:
            session.cert = (to.cert_file, to.key_file) if to.key_file else to.cert_file
        kind = "application/json" if self._json else "application/x-protobuf"
        session.headers.update({"User-Agent": AGENT, "Content-Type": kind, **dict(to.headers)})
        if to.gzip:
            session.headers["Content-Encoding"] = "gzip"
        return session

    def send(self, body: bytes, timeout_s: float) -> Answer:
        """Send a request once; see `xsp.otlp.answers.Sender`."""
        if self._json:
            body = as_json(body).encode()
        if self._to.gzip:
            body = gzip.compress(body, compresslevel=1)  # the next levels take twice as long for a tenth less
        return self._judge(*self._within(body, timeout_s))

    def _within(self, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        """Post in bounded time: libraries bound each wait, but neither their sum nor the look-up of a name."""
        posted: Future[tuple[requests.Response, bytes]] = Future()
        session = self._session

        def post() -> None:
            try:
                posted.set_result(self._post(session, body, timeout_s))
            except BaseException as error:
                posted.set_exception(error)

        threading.Thread(target=post, daemon=True).start()
        try:
            return posted.result(timeout_s + _GRACE_S)
        except TooLong:
            self._session = self._connected()  # the thread has the other one, until the receiver lets go
            raise Busy(f"{self._to.name}: no whole answer within {timeout_s:.3g} s") from None

    def _post(self, session: requests.Session, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        try:
            verify = self._to.ca_file or True  # given with the request: a session's gives way to the environment
            with session.post(
                self._url, data=body, timeout=timeout_s, verify=verify, allow_redirects=False, stream=True
            ) as response:
                return response, response.raw.read(_MOST_OF_AN_ANSWER, decode_content=True)
        except requests.exceptions.SSLError as error:
            raise Refused(f"{self._to.name}: TLS failed ({self._shown(_innermost(error))})", always=True) from error
        except requests.exceptions.ConnectionError as error:
            if self._to.is_this_machine and _was_refused(error):
                raise Nobody(self._to.nobody_listens()) from error
            if any(isinstance(each, BadStatusLine) and not isinstance(each, ConnectionError) for each in _chain(error)):
                port = "answers, but not in HTTP: does gRPC listen there? Then write grpc://HOST:PORT"
                raise Refused(f"{self._to.name}: {port}", always=True) from error
            raise Busy(f"{self._to.name}: no connection ({self._shown(_innermost(error))})") from error
        except requests.exceptions.Timeout as error:
            raise Busy(f"{self._to.name}: no answer within {timeout_s:.3g} s") from error
        except (requests.exceptions.RequestException, OSError, ValueError) as error:
            raise Refused(f"{self._to.name}: {self._shown(_innermost(error))}", always=True) from error
        except urllib3.exceptions.DecodeError as error:
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does", always=True) from error
        except urllib3.exceptions.HTTPError as error:
            raise Busy(f"{self._to.name}: the answer broke off ({type(error).__name__})") from error

    def _judge(self, response: requests.Response, content: bytes) -> Answer:
        code, kind = response.status_code, response.headers.get("Content-Type", "")
        if 200 <= code < 300:
            return self._taken(content, kind)
        text = f"{self._to.name}: {code} {response.reason or ''}".rstrip() + self._said(content, kind)
        if code == 413:
            raise TooLarge(text)
        if code in _RETRYABLE:
            raise Busy(text, _seconds(response.headers.get("Retry-After", "")))
        if 300 <= code < 400:
            raise Refused(f"{text}: it is elsewhere; give the URL that it is at", always=True)
        raise Refused(text, always=code in _NO_RECEIVER)

    def _taken(self, content: bytes, kind: str) -> Answer:
        try:
            if "json" in kind:
                partial = json.loads(content or b"{}").get("partialSuccess") or {}
                return Answer(int(partial.get("rejectedSpans", 0)), self._shown(partial.get("errorMessage", "")))
            if content and "protobuf" not in kind:
                raise ValueError("no OTLP")
            return answers.answer(ExportTraceServiceResponse.FromString(content), self._to)
        except (DecodeError, ValueError, AttributeError) as error:
            said = self._said(content, "text/plain")
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does{said}", always=True) from error

    def _said(self, content: bytes, kind: str) -> str:
        """Return the message in an answer: of a protobuf `Status`, of its JSON, or the text."""
        text = content.decode("utf-8", "replace")
        if "html" in kind:
            text = "with a page for a browser: this may be no receiver"
        elif "protobuf" in kind:
            text = answers.status(content).message
        elif "json" in kind:
            try:
                text = str(json.loads(content).get("message", text))
            except (ValueError, AttributeError):
                pass
        return f" ({self._shown(text)})" if text.strip() else ""

    def _shown(self, text: object) -> str:
        return self._to.without_secrets(str(text))

    def close(self, complete: bool) -> None:
        """Let go of the connection."""
        self._session.close()


def _was_refused(error: requests.exceptions.ConnectionError) -> bool:
    return not isinstance(error, requests.exceptions.ProxyError) and any(
        isinstance(inner, ConnectionRefusedError) for inner in _chain(error)
    )


def _innermost(error: BaseException) -> object:
    """Return the operating system's own words for what went wrong: the outer ones repeat the URL."""
    words = (inner.strerror for inner in _chain(error) if isinstance(inner, OSError) and inner.strerror)
    return next(words, type(error).__name__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it came of, outermost first."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        reason = getattr(inner, "reason", None)
        first = inner.args[0] if inner.args else None
        inner = next((each for each in (reason, first, inner.__cause__, inner.__context__)
                      if isinstance(each, BaseException) and id(each) not in seen), None)  # fmt: skip


def _seconds(text: str) -> float | None:
    """Return the seconds of a `Retry-After`; a date is left to our own patience."""
    return float(text) if text.strip().isdigit() else None
