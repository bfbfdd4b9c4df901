"""Perfetto's binary traces: tracks, slices, counters, interned names, arguments."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from fuzzing import MUTATIONS, examples, is_read, mutated
from hypothesis import given
from wire import message

import xsp
from xsp.errors import TraceError
from xsp.importers.contract import find_importer
from xsp.importers.perfetto import Perfetto

NOW = 1_700_000_000_000_000_000
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


def packet(*parts: tuple[int, Any]) -> tuple[int, bytes]:
    return 1, message(*parts, (10, 1))


def track(uuid: int, *parts: tuple[int, Any]) -> tuple[int, bytes]:
    return packet((60, message((1, uuid), *parts)))


def event(at: int, uuid: int, kind: int, *parts: tuple[int, Any]) -> tuple[int, bytes]:
    return packet((8, at), (11, message((9, kind), (11, uuid), *parts)))


def argument(name: str, value: Any) -> tuple[int, bytes]:
    if isinstance(value, dict):
        entries = [argument(*item)[1] for item in value.items()]
        return 4, message((10, name), (11, entries))
    if isinstance(value, list):
        return 4, message((10, name), (12, [argument("", each)[1] for each in value]))
    number = 2 if isinstance(value, bool) else 4 if isinstance(value, int) else 5 if isinstance(value, float) else 6
    return 4, message((10, name), (number, value))


CLOCKS = packet((6, message((1, [message((1, 6), (2, 1000)), message((1, 1), (2, NOW + 1000))]))))
PROCESS = track(1, (3, message((1, 42), (6, "python"))))
THREAD = track(2, (5, 1), (4, message((1, 42), (2, 43), (5, "main"))))
SMALL = (
    CLOCKS, PROCESS, THREAD,
    track(3, (5, 1), (2, "memory"), (8, message((3, 3)))),
    packet((13, 1), (12, message((2, message((1, 7), (2, "outer")))))),
    event(2000, 2, BEGIN, (10, 7), (22, "app"), argument("size", 5)),
    event(2100, 2, BEGIN, (23, "inner")),
    event(2150, 3, COUNTER, (30, 4096)),
    event(2200, 2, END), event(2300, 2, END),
    event(2250, 2, INSTANT, (23, "mark")),
    event(2400, 2, BEGIN, (23, "still open")),
)  # fmt: skip


def write(path: Path, *packets: tuple[int, bytes]) -> Path:
    path.write_bytes(message(*packets))
    return path


def test_slices_nest_on_their_tracks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pftrace", *SMALL)
    assert find_importer(str(path)).name == "perfetto"
    trace = xsp.load(path)
    rows = trace.sql(
        "SELECT s.name, s.process, s.thread, s.start_ns, s.dur_ns, s.status, p.name FROM spans s "
        "LEFT JOIN spans p ON p.span_id = s.parent_id WHERE s.kind <> 'step' ORDER BY s.start_ns"
    )
    assert rows.fetchall() == [
        ("outer", 42, 43, NOW + 2000, 300, "ok", "window"), ("inner", 42, 43, NOW + 2100, 100, "ok", "outer"),
        ("still open", 42, 43, NOW + 2400, 0, "unclosed", "window"),
    ]  # fmt: skip
    assert trace.samples.fetchall() == [(NOW + 2150, 0, None, "memory", "bytes", 4096.0)]
    notes = " ".join(note["text"] for note in trace.run["notes"])
    assert "1 spans were left out: instants, not spans" in notes
    assert "1 × spans without an end" in notes


def kineto(start: int, name: str, category: str, dur: int, uuid: int, **arguments: Any) -> list[tuple[int, bytes]]:
    renamed = {key.replace("_", " "): value for key, value in arguments.items()}
    return [event(start, uuid, BEGIN, (23, name), (22, category), *(argument(*item) for item in renamed.items())),
            event(start + dur, uuid, END)]  # fmt: skip


def test_a_converted_trace_of_pytorch_means_what_it_meant(tmp_path: Path) -> None:
    packets = [
        CLOCKS, PROCESS, THREAD, track(9, (2, "stream 7")),
        event(2000, 2, BEGIN, (23, "ProfilerStep#3"), (22, "user_annotation")),
        event(2100, 2, BEGIN, (23, "aten::mm"), (22, "cpu_op"), argument("Input Dims", [[2, 3], [3, 4]]),
              argument("Input type", ["float", "float"]), argument("External id", 5)),
        *kineto(2110, "cudaLaunchKernel", "cuda_runtime", 20, 2, correlation=8),
        event(2200, 2, END),
        *kineto(2300, "gemm", "kernel", 500, 9, correlation=8, device=0, stream=7, grid=[4, 1, 1], block=[64, 1, 1]),
        event(4000, 2, END),
    ]  # fmt: skip
    trace = xsp.load(write(tmp_path / "a.pftrace", *packets))
    rows = trace.sql(
        "SELECT s.kind, s.name, s.device, s.stream, s.dur_ns, p.name, s.parent_rule FROM spans s "
        "LEFT JOIN spans p ON p.span_id = s.parent_id ORDER BY s.start_ns"
    ).fetchall()
    assert rows == [
        ("step", "ProfilerStep#3", None, None, 2000, None, None),
        ("op", "aten::mm", None, None, 100, "ProfilerStep#3", "containment"),
        ("launch", "cudaLaunchKernel", None, None, 20, "aten::mm", "containment"),
        ("kernel", "gemm", 0, 7, 500, "aten::mm", "correlation"),
    ]
    ((shapes, flops),) = trace.sql("SELECT input_shapes, flops FROM merged WHERE kind = 'op'").fetchall()
    assert (json.loads(shapes), flops) == ([[2, 3], [3, 4]], 48)


def test_names_of_tracks_tell_devices(tmp_path: Path) -> None:
    gpu = (track(5, (3, message((1, 7), (6, "GPU 1")))), track(6, (5, 5), (2, "Stream #3")))
    trace = xsp.load(write(tmp_path / "a.pftrace", *SMALL, *gpu, event(2000, 6, BEGIN, (23, "k")), event(2050, 6, END)))
    assert trace.sql("SELECT name, device, stream, dur_ns FROM spans WHERE level = 70").fetchall() == [("k", 1, 3, 50)]


def test_a_converted_trace_of_jax_means_what_it_meant(tmp_path: Path) -> None:
    device = (track(5, (3, message((1, 7), (6, "/device:GPU:0")))), track(6, (5, 5), (2, "Stream #3")))
    host = (track(7, (3, message((1, 8), (6, "/host:CPU")))), track(8, (5, 7), (4, message((1, 8), (2, 9)))))
    linked = (argument("correlation_id", 4), argument("hlo_op", "dot.1"), argument("hlo_module", "jit_f"))
    packets = [
        *device, *host, event(10, 8, BEGIN, (23, "dot.1")), event(12, 8, BEGIN, (23, "cuLaunchKernel"), *linked),
        event(14, 8, END), event(16, 8, END), event(20, 6, BEGIN, (23, "gemm"), *linked), event(29, 6, END),
    ]  # fmt: skip
    trace = xsp.load(write(tmp_path / "a.pftrace", *packets))
    assert trace.run.framework == "jax"
    rows = trace.sql("SELECT name, kind, dur_ns, device, stream FROM spans WHERE kind <> 'step' ORDER BY start_ns")
    assert rows.fetchall() == [("dot.1", "op", 6, None, None), ("cuLaunchKernel", "launch", 2, None, None),
                               ("gemm", "kernel", 9, 0, 3)]  # fmt: skip


def test_compressed_packets_own_clocks_and_defaults_are_followed(tmp_path: Path) -> None:
    inner = message(
        packet((13, 1), (59, message((58, 64), (11, message((11, 2)))))),
        packet((6, message((1, [message((1, 64), (2, 5), (3, 1), (4, 1000)), message((1, 6), (2, 10_000))])))),
        packet((8, 2), (11, message((9, BEGIN), (23, "a")))),
        packet((8, 3), (11, message((9, END)))),
    )
    compressed = (1, message((50, zlib.compress(inner)), (10, 1)))
    trace = xsp.load(write(tmp_path / "a.pftrace", CLOCKS, PROCESS, THREAD, compressed))
    rows = trace.sql("SELECT name, thread, start_ns, dur_ns FROM spans WHERE kind <> 'step'").fetchall()
    assert rows == [("a", 43, NOW + 12_000, 3000)]


def test_an_independent_writer_is_read(tmp_path: Path) -> None:
    builder = pytest.importorskip("perfetto.trace_builder.proto_builder", reason="Perfetto's package is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    made = builder.TraceProtoBuilder()
    described = made.add_packet().track_descriptor
    described.uuid, described.name = 77, "work"
    for at, kind in ((10, TrackEvent.TYPE_SLICE_BEGIN), (60, TrackEvent.TYPE_SLICE_END)):
        added = made.add_packet()
        added.timestamp, added.trusted_packet_sequence_id = at, 3
        added.track_event.type, added.track_event.track_uuid = kind, 77
        if at == 10:
            added.track_event.name = "slice"
    (tmp_path / "a.pftrace").write_bytes(made.serialize())
    rows = xsp.load(tmp_path / "a.pftrace").sql("SELECT name, start_ns, dur_ns FROM spans WHERE kind <> 'step'")
    assert rows.fetchall() == [("slice", 10, 50)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (message(*SMALL)[:-3], "damaged or cut off; copy it again, or convert it: traceconv json"),
        (message(CLOCKS, PROCESS), "without slices of track events; record the data source track_event"),
        (message((1, message((8, 5), (1, b"abc")))), "1 spans were left out: events of the kernel"),
        (message((1, message((8, 5), (50, b"no deflate")))), "damaged or cut off"),
    ],
)
def test_what_cannot_be_read_is_one_error(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "a b.pftrace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"a b\.pftrace.*{reason}"):
        xsp.load(path)


def test_tracks_in_a_circle_come_to_an_end(tmp_path: Path) -> None:
    packets = [track(1, (5, 2)), track(2, (5, 1)), event(5, 1, BEGIN, (23, "a")), event(9, 1, END)]
    assert xsp.load(write(tmp_path / "a.pftrace", *packets)).sql("SELECT count(*) FROM spans").fetchall() == [(2,)]


@pytest.mark.slow
@examples(40)
@given(mutations=MUTATIONS)
def test_no_bytes_lead_to_another_error(tmp_path: Path, mutations: list[tuple[float, str, bytes]]) -> None:
    path = tmp_path / "fuzzed.pftrace"
    path.write_bytes(mutated(message(*SMALL), mutations))
    is_read(path, Perfetto())
