"""Filter of requests: only those to this server's name, not from other servers' pages, and with a limited body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from xsp import hosts
from xsp.connections import ConnectionLimits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = 512 << 10
"""Maximum bytes of a body: a manifest of 256 KiB, escaped as JSON."""

READ_METHODS = ("GET", "HEAD")

HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"x-frame-options": b"DENY",
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Default headers of responses."""


def is_this_server(host: str | None, address: str) -> bool:
    """Return whether a request's `Host` names this server.

    A foreign page can point a host name to this server's address (DNS rebinding), but only a name. So a server on
    loopback accepts loopback addresses and `localhost`, and any other server accepts IP addresses and the machine's
    name.

    Args:
        host: `Host` of the request, possibly with a port.
        address: address that the server listens on.
    """
    name = hosts.host_of(host or "")
    if name is None or hosts.is_loopback(name):
        return name is not None
    if hosts.is_loopback(address):
        return False
    return hosts.ip_address(name) is not None or name in {address.lower(), socket.gethostname().lower()}


class Guard:
    """Wraps the application, and answers rejected requests."""

    def __init__(
        self,
        application: Application,
        address: str = "127.0.0.1",
        most_bytes: int = MOST_BODY,
        body_s: float = ConnectionLimits.body_s,
    ) -> None:
        """Wrap an application.

        Args:
            application: an ASGI application.
            address: address on which it is served.
            most_bytes: maximum bytes of a body.
            body_s: seconds for a body to arrive; a second before the connection would end, there is an answer.
        """
        self._application, self._address, self._most_bytes = application, address, most_bytes
        self._body_s = body_s - min(1.0, body_s / 2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._application(scope, receive, send)
        elif (rejection := self._rejection(scope)) is not None:
            await _answer(send, *rejection)
        else:
            try:
                body = await asyncio.wait_for(self._body(receive), self._body_s)
            except asyncio.TimeoutError:
                await _answer(send, 408, "The request did not arrive in time.")
                return
            if body is None:
                await _answer(send, 413, self._size_text())
                return
            await self._application(scope, _replay(body, receive), _with_headers(send))

    def _rejection(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason if the headers of a request require its rejection."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not is_this_server(hosts[0], self._address):
            return 403, "The Host header does not name this server."
        for origin in headers.get("origin", []):
            if origin.partition("://")[2].lower() != hosts[0].lower():
                return 403, "Requests from pages of other servers are refused."
        if scope["method"] not in READ_METHODS and set(headers.get("sec-fetch-site", [])) - {"same-origin", "none"}:
            return 403, "Requests from pages of other servers are refused."
        if scope["method"] in ("POST", "PUT", "PATCH"):
            media_type = headers.get("content-type", [""])[0].partition(";")[0].strip().lower()
            if media_type != "application/json":
                return 415, "Send application/json."
        try:
            length = int(headers.get("content-length", ["0"])[0])
        except ValueError:
            return 400, "Content-Length is not a number."
        return (413, self._size_text()) if length > self._most_bytes else None

    def _size_text(self) -> str:
        return f"A request may have at most {self._most_bytes >> 10} KiB."

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body; None if it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return bytes(body)
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read, and then further messages."""
    pending: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return receive_body


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            defaults = [(name, value) for name, value in HEADERS.items() if name not in present]
            message = {**message, "headers": [*message.get("headers", []), *defaults]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
