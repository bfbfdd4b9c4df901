"""What a receiver says to a request: that it took it, or one of three errors.

OTLP says of each answer whether the same request may be sent again: later (`Busy`), in smaller parts (`TooLarge`), or
never (`Refused`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp.errors import DeliveryError
from xsp.otlp.endpoint import Endpoint
from xsp.version import __version__

AGENT = f"xsp/{__version__}"
"""What a sender calls itself."""


class Answer(NamedTuple):
    """What a receiver said that took a request."""

    rejected: int = 0
    """Spans of it that it did not take; they are not to be sent again."""

    message: str = ""


class Busy(DeliveryError):
    """It did not work this time; the same request may be sent again."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s
        """Seconds to wait, where the receiver said so."""


class Nobody(Busy):
    """Nothing listens at an address of this machine: sending again helps only while a receiver is starting."""


class TooLarge(DeliveryError):
    """The receiver takes smaller requests."""


class Refused(DeliveryError):
    """The same request will not be taken."""

    def __init__(self, message: str, always: bool = False) -> None:
        super().__init__(message)
        self.always = always
        """Whether no other request would be taken either: a wrong path, missing credentials."""


class Sender(Protocol):
    """Sends requests to one endpoint."""

    def send(self, body: bytes, timeout_s: float) -> Answer:
        """Send an encoded request once, and return what the receiver said.

        Raises:
            Busy, TooLarge, Refused: it did not take it.
            OutputError: the file cannot be written.
        """

    def close(self, complete: bool) -> None:
        """Let go of the connection; `complete` says that a file is to appear."""


def status(content: bytes) -> Status:
    """Return the details of an error; empty where they are no protobuf."""
    try:
        return Status.FromString(content)
    except DecodeError:
        return Status()


def answer(response: ExportTraceServiceResponse, to: Endpoint) -> Answer:
    """Return what a receiver said that took the request, without what is secret of the endpoint."""
    partial = response.partial_success
    return Answer(partial.rejected_spans, to.without_secrets(partial.error_message))
