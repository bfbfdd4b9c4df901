"""Bring requests to an endpoint: try again where that makes sense, in halves where they are too large, and count.

OTLP says of each answer whether the same request may be sent again. Between two attempts there is a pause, which
grows, and has chance in it, so that many senders do not come back at the same moment.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from xsp.errors import DeliveryError
from xsp.otlp import bodies, encode
from xsp.otlp import request as otlp
from xsp.otlp.answers import Answer, Busy, Nobody, Refused, TooLarge
from xsp.otlp.encode import Request
from xsp.otlp.endpoint import Endpoint

PATIENCE_S = 60.0
"""How long a request is tried again, unless told otherwise."""

STARTING_S = 1.0
"""How long where nothing listens on this machine."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


@dataclass
class Counts:
    """What became of what was sent."""

    steps: int = 0
    spans: int = 0
    requests: int = 0
    bytes: int = 0
    rejected: int = 0
    """Spans that the receiver did not take."""

    retries: int = 0
    seconds: float = 0.0
    left: int = 0
    """Steps, and runs' own spans, that are still to be delivered."""

    messages: list[str] = field(default_factory=list)
    """Why something was rejected or is left, each reason once."""

    trace_id: str | None = None
    """Of the first step that was delivered."""

    def say(self, message: str) -> None:
        """Keep a reason."""
        if message and message not in self.messages:
            self.messages.append(message)


class Courier:
    """Brings requests to one endpoint, and tries again for as long as its patience lasts."""

    def __init__(
        self, to: Endpoint, patience_s: float, stop: threading.Event | None = None, starting_s: float | None = None
    ) -> None:
        """Make the sender; nothing is sent yet.

        Args:
            to: where to.
            patience_s: how long a request is tried again.
            stop: ends the pauses between attempts, and with them the patience.
            starting_s: how long where nothing listens on this machine; as long unless told otherwise.
        """
        self.to = to
        self.counts = Counts()
        self.max_bytes = encode.MAX_BYTES
        self._patience_s = patience_s
        self._starting_s = patience_s if starting_s is None else starting_s
        self._stop = stop or threading.Event()
        self._sender = otlp.sender(to)

    def close(self, complete: bool = True) -> None:
        """Let go of the endpoint; a file appears if it is `complete`."""
        self._sender.close(complete)

    def bring(self, request: Request) -> bool:
        """Bring one request, in smaller ones if need be, and count what became of it.

        Returns:
            Whether the receiver took it, possibly but for spans that it rejected.

        Raises:
            DeliveryError: it could not be brought for as long as the patience lasted, or nothing can be.
        """
        try:
            answer = self._send(request.body)
        except TooLarge as error:
            return self._bring_halves(request, error)
        except Refused as error:
            if error.always:
                raise
            self._reject(Answer(request.spans, str(error)))
            return False
        answer = answer._replace(rejected=min(max(answer.rejected, 0), request.spans))
        self._reject(answer)
        self.counts.requests += 1
        self.counts.bytes += len(request.body)
        self.counts.spans += request.spans - answer.rejected
        return True

    def _bring_halves(self, request: Request, error: TooLarge) -> bool:
        halves = bodies.halves(request.body)
        if len(halves) < 2:
            self._reject(Answer(request.spans, str(error)))
            return False
        self.max_bytes = min(self.max_bytes, max(len(request.body) // 2, 4096))
        taken = [self.bring(Request(*half)) for half in halves]
        return all(taken)

    def _reject(self, answer: Answer) -> None:
        self.counts.rejected += answer.rejected
        self.counts.say(answer.message)

    def _send(self, body: bytes) -> Answer:
        begin = time.monotonic()
        end = begin + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._sender.send(body, min(self.to.timeout_s, max(end - time.monotonic(), 0.1)))
            except Busy as error:
                wait = max(error.after_s or 0.0, pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                patience = self._starting_s if isinstance(error, Nobody) else self._patience_s
                if time.monotonic() + wait >= begin + patience or self._stop.wait(wait):
                    raise DeliveryError(f"{error}; tried for {patience:.3g} s") from error
                self.counts.retries += 1
