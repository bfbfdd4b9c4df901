"""Reports served on loopback, for the links on spans in Jaeger (`deploy/ui.json`).

Pages are rendered once and served from memory: no request reads from the disk.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from urllib.parse import quote, unquote

from xsp import hosts
from xsp.connections import ConnectionLimits
from xsp.errors import UsageError
from xsp.receiver.loopback import DeadlineHandler, LimitedHTTPServer
from xsp.report.html import render
from xsp.store.trace import Trace

PORT = 8600
"""The port in the links of `deploy/ui.json`."""

LIMITS = ConnectionLimits(connections=32)
"""Limits of its connections, of which a browser opens six."""

_LOOPBACK = "127.0.0.1"


def pages(runs: Iterable[Sequence[Trace]]) -> dict[str, bytes]:
    """Return the page of each run by its name.

    Args:
        runs: for each run, the traces of its kinds of steps; the page shows the first one at first.

    Raises:
        UsageError: two runs have the same name.
    """
    rendered: dict[str, bytes] = {}
    for trace, *other_kinds in runs:
        if trace.name in rendered:
            raise UsageError(
                f"two of the runs are called {trace.name!r}, and a link contains only the name: serve one of them"
            )
        rendered[trace.name] = render(trace, other_kinds).encode("utf-8", "replace")
    return rendered


def server(rendered: Mapping[str, bytes], port: int = PORT) -> LimitedHTTPServer:
    """Return a server that listens on loopback; `serve_forever` answers, `server_close` ends it.

    Args:
        rendered: page by name of the run; it is served at `/<name>`.
        port: port to listen on; 0 takes a free one.

    Raises:
        UsageError: the port is in use or invalid.
    """
    try:
        return LimitedHTTPServer((_LOOPBACK, port), _handler_class(rendered), LIMITS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--port {port}: cannot listen on {_LOOPBACK} ({reason}); name another port") from error


def address(http_server: LimitedHTTPServer, name: str) -> str:
    """Return the URL of the page of a run."""
    return f"http://{_LOOPBACK}:{http_server.server_port}/{quote(name, safe='')}"


def _handler_class(rendered: Mapping[str, bytes]) -> type[DeadlineHandler]:
    """Return the request handler for these pages."""

    class Handler(DeadlineHandler):
        def do_GET(self) -> None:
            status, kind, body = _response(rendered, self.path, self.headers.get("Host", ""))
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

    return Handler


def _response(rendered: Mapping[str, bytes], path: str, host: str) -> tuple[HTTPStatus, str, bytes]:
    """Return status, type and body for a path."""
    if not hosts.names_loopback(host):
        return HTTPStatus.FORBIDDEN, "text/plain", f"Use the address {_LOOPBACK}.\n".encode()
    name = unquote(path.partition("?")[0][1:])
    if name in rendered:
        return HTTPStatus.OK, "text/html", rendered[name]
    if not name:
        links = "".join(f'<li><a href="/{quote(name, safe="")}">{html.escape(name)}</a></li>' for name in rendered)
        page = f'<!doctype html><meta charset="utf-8"><title>xsp</title><ul>{links}</ul>'
        return HTTPStatus.OK, "text/html", page.encode("utf-8", "replace")
    names = ", ".join(rendered)
    message = f"No run called {name!r} is served here, only: {names}. To serve it: xsp report DIRECTORY --serve\n"
    return HTTPStatus.NOT_FOUND, "text/plain", message.encode("utf-8", "replace")
