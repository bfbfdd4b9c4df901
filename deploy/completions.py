"""The HTTP side of a small server with OpenAI's completions: answers as JSON, whole or streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "seeded"
"""The name of the model, whose weights come from a seed."""


class Handler(BaseHTTPRequestHandler):
    """Lists the model; a subclass answers POST by `answer` or `stream`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """List the model."""
        self.answer({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    def asked(self) -> dict[str, Any]:
        """Return the body of a request."""
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def answer(self, content: Any) -> None:
        """Send a whole answer."""
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, messages: Iterable[dict[str, Any]]) -> None:
        """Send the parts of an answer, each as soon as it is there."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for each in messages:
            self._send(json.dumps(each))
        self._send("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """A server with any number of connections, whose clients may leave."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but not that a client left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def message(created: int, text: str | None, reason: str | None = None) -> dict[str, Any]:
    """Return a completion, or a part of one, in OpenAI's form; without a text it has no choices."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    return {"id": "1", "object": "text_completion", "created": created, "model": NAME, "choices": choices}
