"""Apply a schedule of requests to a server with OpenAI's completions, over HTTP, and time the tokens that it streams.

Each request has a thread, which waits for the server in the system and not in Python. A prompt is sent as the numbers
of its tokens. End-of-text tokens are ignored where the server can (`ignore_eos`), so output lengths are those drawn.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from xsp.errors import ManifestError, first_line
from xsp.evaluate.generation.prompts import Prompts
from xsp.evaluate.generation.timing import Generated
from xsp.evaluate.load import Clock, Progress, Requests, Schedule
from xsp.evaluate.load.requests import Times

MOST_OPEN = 1024
"""Most requests that wait for the server together; a further one is late, which its lateness shows."""

TIMEOUT_S = 300.0
"""Longest time without anything from the server."""

MOST_LINE_BYTES = 1 << 20
MOST_ERROR_BYTES = 1 << 12


class Endpoint:
    """A server with OpenAI's completions."""

    def __init__(self, address: str, model: str) -> None:
        """Use a server; it is not called yet.

        Args:
            address: such as `http://127.0.0.1:8000/v1`.
            model: the server's name of the model.

        Raises:
            ManifestError: it is not such an address.
        """
        parts = urlsplit(address)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ManifestError(f"model.endpoint: {address!r} is not an address such as http://127.0.0.1:8000/v1")
        self._host, self._port, self._model = parts.hostname, port, model
        self._path = f"{parts.path.rstrip('/')}/completions"
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = address
        self._idle: list[http.client.HTTPConnection] = []

    def stream(self, prompt: Times, tokens: int) -> Iterator[tuple[str, int | None]]:
        """Request a completion, and yield the text of each message as it arrives.

        Args:
            prompt: the numbers of the prompt's tokens.
            tokens: how many to generate.

        Yields:
            The text; and the number of all generated tokens, if this message states it, else None.

        Raises:
            ManifestError: the server does not answer, or refuses the request.
        """
        body = json.dumps({
            "model": self._model, "prompt": prompt.tolist(), "max_tokens": tokens, "temperature": 0.0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        })  # fmt: skip
        try:
            connection = self._idle.pop() if self._idle else self._class(self._host, self._port, timeout=TIMEOUT_S)
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                reason = " ".join(response.read(MOST_ERROR_BYTES).decode("utf-8", "replace").split())
                raise ManifestError(f"model.endpoint: {self._address} answers {response.status} ({reason[:200]})")
            while line := response.readline(MOST_LINE_BYTES):
                content = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or content == b"[DONE]":
                    continue
                message = json.loads(content)
                choices, usage = message.get("choices") or [], message.get("usage") or {}
                yield (str(choices[0].get("text") or "") if choices else ""), usage.get("completion_tokens")
            self._idle.append(connection)
        except (OSError, http.client.HTTPException, ValueError, LookupError, AttributeError) as error:
            raise ManifestError(f"model.endpoint: {self._address}: {first_line(error)}") from error

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()


def drive_endpoint(
    schedule: Schedule,
    prompts: Prompts,
    endpoint: Endpoint,
    *,
    users: int = 1,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Generated:
    """Send the requests of a schedule to a server, and return the times at which their tokens arrived.

    Args:
        schedule: when requests are due.
        prompts: what each asks for.
        endpoint: the server.
        users: in a closed loop, how many requests are open at any time.
        clock: the clock, if not the real one.
        progress: called after each request, on its thread.

    Raises:
        ManifestError: the server does not answer, or refuses a request; those in progress have ended.
    """
    return _Run(schedule, prompts, endpoint, users, clock or Clock(), progress).run()


class _Run:
    """The execution of a schedule."""

    def __init__(
        self, schedule: Schedule, prompts: Prompts, endpoint: Endpoint, users: int, clock: Clock,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._schedule, self._prompts, self._endpoint = schedule, prompts, endpoint
        self._users, self._clock, self._progress = users, clock, progress
        n = len(schedule)
        self._due, self._issued, self._end = (np.zeros(n, np.int64) for _ in range(3))
        self._token_ns: list[Times] = [np.zeros(0, np.int64)] * n
        self._counts = np.zeros(n, np.int64)
        self._lock = threading.Lock()
        self._next = self._ended = 0
        self._error: BaseException | None = None

    def run(self) -> Generated:
        """Send all requests."""
        if self._schedule.due_ns is None:
            threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._users)]
            for thread in threads:
                thread.start()
        else:
            threads = self._send_when_due(self._schedule.due_ns + self._clock.now_ns())
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        requests = Requests(
            self._due, self._issued, self._issued, self._end, np.ones(len(self._due), np.int64),
            is_open_loop=self._schedule.due_ns is not None, schedule_length=len(self._due),
        )  # fmt: skip
        return Generated(requests, self._prompts.counts, tuple(self._token_ns), self._counts)

    def _send_when_due(self, due_ns: Times) -> list[threading.Thread]:
        """Start a thread for each request when it is due, and return those that may still run."""
        places = threading.Semaphore(MOST_OPEN)

        def send(number: int) -> None:
            self._send(number)
            places.release()

        threads = []
        self._due = due_ns
        for number, due in enumerate(due_ns.tolist()):
            thread = threading.Thread(target=send, args=(number,), daemon=True)
            self._clock.wait_until(due)
            places.acquire()
            if self._error is not None:
                break
            thread.start()
            threads.append(thread)
        return threads

    def _work(self) -> None:
        """Send the next request when the one before has ended, until there are none."""
        while True:
            with self._lock:
                number = self._next
                if number == len(self._due) or self._error is not None:
                    return
                self._next += 1
            self._due[number] = self._clock.now_ns()
            self._send(number)

    def _send(self, number: int) -> None:
        times, stated = [], None
        self._issued[number] = self._clock.now_ns()
        try:
            expected = int(self._prompts.output_counts[number])
            for text, count in self._endpoint.stream(self._prompts.tokens[number], expected):
                if text:
                    times.append(self._clock.now_ns())
                stated = count or stated
            if not times:
                raise ManifestError("model.endpoint: a request ended without text")
        except BaseException as error:  # for the thread that waits for all
            self._error = self._error or error
            return
        self._token_ns[number] = np.array(times, np.int64)
        self._end[number] = times[-1]
        self._counts[number] = stated or len(times)
        with self._lock:
            self._ended += 1
            if self._progress is not None:
                self._progress(self._ended, len(self._due))


def texts(endpoint: Endpoint, prompts: Prompts, count: int) -> list[Any]:
    """Return the texts that a server generates for the first prompts, one request at a time."""
    return [
        "".join(text for text, _ in endpoint.stream(prompts.tokens[number], int(prompts.output_counts[number])))
        for number in range(min(count, len(prompts)))
    ]
