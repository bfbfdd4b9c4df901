"""Messages to a second process: whole or not at all, whatever is cut off, and whoever dies."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from xsp import transport
from xsp.transport import SecondProcess, _Messages


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_message_that_an_interrupt_cut_off_is_skipped(ends) -> None:
    class Interrupted:
        """Sends some bytes, then the interrupt comes."""

        sent = 0

        def send(self, rest: memoryview, flags: int) -> int:
            self.sent += ends[0].send(rest[: cuts - self.sent])
            if self.sent == cuts:
                raise KeyboardInterrupt
            return self.sent

    whole = transport._HEADER.size + 30
    for cuts in range(1, whole):  # noqa: B007 (it is used above)
        sender, receiver = _Messages(ends[0]), _Messages(ends[1])
        sender._socket = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            sender.send(1, b"x" * 30)
        sender._socket = ends[0]
        sender.send(2, b"next")
        heard = [receiver.receive()]
        while heard[-1] != (2, b"next"):
            assert heard[-1] in [(number, b"") for number in (0, 1)], "nothing of what was cut off is taken for more"
            heard.append(receiver.receive())


def test_messages_come_whole_in_whatever_pieces_they_arrive(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [b"", b"xsp", transport._MARK * 3, os.urandom(3000)]
    sender, receiver = _Messages(ends[0]), _Messages(ends[1])
    for number, content in enumerate(contents):
        sender.send(number, content)
    ends[0].shutdown(socket.SHUT_WR)
    monkeypatch.setattr(transport, "_CHUNK_BYTES", 7)
    assert [receiver.receive() for _ in range(5)] == [*enumerate(contents), None]


def test_what_fails_stands_alone_and_who_is_killed_is_gone(tmp_path: Path) -> None:
    second = SecondProcess("xsp.record.writer", str(tmp_path), purpose="stores spans")
    assert (second.is_refused, second.failure) == (False, None)
    assert second.ask(("loop", object(), 0)) is None
    assert "no text and no number" in (second.failure or "")
    assert second.ask(("paint", str(tmp_path))) is None
    assert second.failure == "KeyError: 'paint'"
    refused = SecondProcess("xsp.record.writer", str(tmp_path), purpose="stores spans")
    assert (refused.process, refused.is_refused) == (None, True), "another process writes there"
    number = second.post(("loop", b"", 0))
    assert second.answer(number or 0) is True
    second.kill()
    assert (second.ask(("loop", b"", 0)), second.is_gone) == (None, True)
    assert (second.failure or "").startswith("the process that stores spans ")
    second.close()


def test_a_process_that_ends_at_once_did_not_start() -> None:
    second = SecondProcess("xsp.there.is.none", purpose="paints")
    assert (second.process, second.is_refused, second.is_gone) == (None, False, True)
    assert second.failure == "the process that paints ended"


def test_one_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    second = SecondProcess("xsp.record.writer", str(tmp_path), purpose="stores spans")
    assert second.process is not None
    os.kill(second.process, signal.SIGSTOP)
    second.close(0.01, kill=True)
    for _ in range(200):  # the dead one lets go of the directory
        again = SecondProcess("xsp.record.writer", str(tmp_path), purpose="stores spans")
        if again.process is not None:
            break
    assert again.failure is None
    again.close()
