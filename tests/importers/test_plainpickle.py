"""Pickles of plain values are read as Python reads them, and nothing that a pickle says takes memory or time on end."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_torchmemory import snapshot

import xsp
from xsp.cli import main
from xsp.errors import TraceError
from xsp.importers.plainpickle import PickleError, Plain

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**120), 2**120) | st.floats(allow_nan=False) | st.text() | st.binary()
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.tuples(inner) | st.dictionaries(SCALARS, inner),
    max_leaves=30,
)
MOST_MEMORY = 16
"""Bytes of memory for a byte of a pickle, at most, and as much again for Python's growing lists."""

TIMES, SEED = int(os.environ.get("XSP_FUZZ_TIMES", "300")), int(os.environ.get("XSP_FUZZ_SEED", "1"))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(PLAIN, st.integers(3, 5))  # protocol 2 has no bytes
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert Plain(pickle.dumps(value, protocol)).value == value


def test_what_is_shared_stays_shared_and_what_holds_itself_is_read() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    found = Plain(pickle.dumps({"a": inner, "b": inner})).value
    assert found["a"] is found["b"] is found["a"][1]


def proto(*instructions: bytes) -> bytes:
    return b"\x80\x04" + b"".join(instructions)


BOMBS = {
    "a large index": proto(b"Nr\xff\xff\xff\xf0."),
    "a large index twice": proto(b"Nr\xff\xff\xff\x0fr\xff\xff\xff\xf0."),
    "lists": proto(b"]" * 300_000, b"."),
    "dictionaries": proto(b"}" * 300_000, b"."),
    "marks": proto(b"(" * 300_000, b"."),
    "tuples of tuples": proto(b")", b"\x85" * 300_000, b"."),
    "a tuple of tuples as a key": proto(b"})", b"\x85" * 50, b"Ns."),
    "pairs of pairs as a key": proto(b"})", b"\x942\x86" * 60, b"Ns."),
    "a list as a key": proto(b"}]Ns."),
    "an integer without end": proto(b"\x8b\xff\xff\xff\x7f", b"\x01" * 1000, b"."),
    "a text without end": proto(b"X\xff\xff\xff\xff", b"a" * 1000, b"."),
    "bytes without end": proto(b"\x8e", b"\xff" * 8, b"a" * 1000, b"."),
    "a class": proto(b"cos\nsystem\n."),
    "a class by its names": proto(b"\x8c\x02os\x8c\x06system\x93."),
    "a class without names": proto(b"\x93."),
    "an object elsewhere": proto(b"NQ."),
    "a call": proto(b"NNR."),
    "an extension": proto(b"\x82\x01."),
    "an append to nothing": proto(b"Na."),
    "items of a list": proto(b"]NNs."),
    "no mark": proto(b"]e."),
    "no value": proto(b"."),
    "no memo": proto(b"h\x05."),
    "no end": proto(b"N"),
    "nothing": b"\x80",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_pickle_of_something_large_is_one_line(name: str, tmp_path: Path, capsys: Any) -> None:
    content = BOMBS[name]
    tracemalloc.start()
    try:
        with contextlib.suppress(PickleError):  # an index may be large: here it is only a name
            Plain(content)
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST_MEMORY * len(content) + (1 << 20)
    finally:
        tracemalloc.stop()
    path = tmp_path / "memory.pickle"
    path.write_bytes(content)
    assert main(["import", str(path), "--out", str(tmp_path / "run"), "--from", "torch-memory"]) != 0
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err


@pytest.mark.slow
def test_a_small_gzip_of_something_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle.gz"
    path.write_bytes(gzip.compress(proto(b"N0" * (64 << 20), b"."), 6))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="times as large"):
            xsp.load(str(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def shared(**parts: Any) -> dict[str, Any]:
    return {**snapshot(), **parts}


EVENT = {"action": "alloc", "addr": 1, "size": 1, "frames": [{"name": "f", "filename": "a.py", "line": 1}] * 3000}
PAIRS: Any = ()
for _ in range(60):
    PAIRS = (PAIRS, PAIRS)
BLOCKS = [{"size": 1, "state": "active_allocated"}] * 3000


@pytest.mark.parametrize(
    "content",
    [
        shared(device_traces=[[EVENT] * 3000] * 3000),
        shared(segments=[{"device": 0, "total_size": 1, "blocks": BLOCKS}] * 3000),
        shared(device_traces=[[]] * 3000, segments=[{"device": 0, "total_size": 1, "blocks": BLOCKS}] * 3000),
        shared(device_traces=[[{**EVENT, "action": PAIRS}]]),
        shared(segments=[{"device": PAIRS, "total_size": 1, "blocks": []}]),
        shared(segments=[{"device": 0, "total_size": PAIRS, "blocks": []}]),
        shared(device_traces=[[{**EVENT, "time_us": PAIRS}]]),
    ],
    ids=["events", "blocks", "blocks of devices", "action", "device", "size", "time"],
)
def test_what_is_shared_again_and_again_comes_to_an_end(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(content))
    assert path.stat().st_size < 100_000
    with pytest.raises(TraceError) as refused:
        xsp.load(str(path))
    assert "\n" not in str(refused.value)


def test_frames_that_many_events_share_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    events = [{**EVENT, "addr": number, "time_us": 1_700_000_000_000_000 + number} for number in range(3000)]
    path.write_bytes(pickle.dumps(shared(device_traces=[events])))
    assert xsp.load(str(path)).sql("SELECT count(*) FROM spans WHERE kind = 'alloc'").fetchall() == [(3000,)]


def test_any_damage_is_read_or_one_error() -> None:
    draw = random.Random(SEED)
    sound = [pickle.dumps(snapshot(), protocol) for protocol in range(2, 6)]
    for time in range(TIMES):
        content = bytearray(draw.choice(sound))
        for _ in range(draw.randint(1, 8)):
            place = draw.randrange(len(content))
            kind = draw.random()
            if kind < 0.5:
                content[place] = draw.randrange(256)
            elif kind < 0.75:
                del content[place : place + draw.randint(1, 9)]
            else:
                content[place:place] = draw.choice([b"(", b"\x85", b"]", b"}", b"r\xff\xff\xff\xff", draw.randbytes(9)])
        said = ""
        try:
            Plain(bytes(content))
        except PickleError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, time {time}") from error
        assert "\n" not in said
