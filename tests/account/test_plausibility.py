"""What is impossible or missing in a trace is found in each format: the same program, damaged in four ways.

Lost records (pytorch#192021, kineto#762), no records of kernels (kineto#859), no calls at all, and a kernel that lasts
over later ones of its stream (TraceLens#669).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import rocpd
import small_traces
import sqlitefiles
import wire
from depth import deep

import xsp
from xsp import account
from xsp.cli import main

BASE_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Program:
    """Launch calls and kernels, each with start, end and the number that they share; nanoseconds."""

    calls: tuple[tuple[int, int, int], ...]
    kernels: tuple[tuple[int, int, int], ...]
    copies: tuple[tuple[int, int, int], ...] = field(default=())


def program(kernels: int = 48) -> Program:
    """Return launches 20 µs apart, of kernels that run one after the other for 100 µs each."""
    return Program(
        tuple((1000 + 20_000 * number, 6000 + 20_000 * number, number + 1) for number in range(kernels)),
        tuple((50_000 + 101_000 * number, 150_000 + 101_000 * number, number + 1) for number in range(kernels)),
    )


SOUND = program()
DAMAGED = {
    "sound": SOUND,
    "lost": replace(SOUND, kernels=SOUND.kernels[:10] + SOUND.kernels[30:]),
    "no kernels": replace(SOUND, kernels=(), copies=SOUND.kernels[:2]),
    "no launches": replace(SOUND, calls=()),
    "overlap": replace(SOUND, kernels=(*SOUND.kernels[:1], (SOUND.kernels[1][0], 1_600_000, 2), *SOUND.kernels[2:])),
}
FORBIDDEN = {
    "sound": set(), "lost": {"busy", "cause"}, "no kernels": {"busy", "cause"}, "no launches": {"cause"},
    "overlap": {"busy", "cause"},
}  # fmt: skip


def kineto(path: Path, made: Program) -> str:
    def event(category: str, name: str, row: tuple[int, int, int], **args: Any) -> dict[str, Any]:
        start, end, number = row
        place = {"pid": 0, "tid": 7} if "device" in args else {"pid": 1, "tid": 1}
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        return {"ph": "X", "cat": category, "name": name, **place, **times, "args": {"correlation": number, **args}}

    events = [event("cuda_runtime", "cudaLaunchKernel", row) for row in made.calls]
    events += [event("kernel", "gemm", row, device=0, stream=7) for row in made.kernels]
    events += [event("gpu_memcpy", "Memcpy HtoD", row, device=0, stream=7, bytes=64) for row in made.copies]
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    return str(path)


def nsys(path: Path, made: Program) -> str:
    tables: dict[str, Any] = {**small_traces.START, **small_traces.GPUS}
    if made.calls:
        tables[small_traces.RUNTIME] = [small_traces.call(*row) for row in made.calls]
    if made.kernels:
        tables[small_traces.KERNELS] = [small_traces.kernel(*row) for row in made.kernels]
    if made.copies:
        tables["CUPTI_ACTIVITY_KIND_MEMCPY"] = [
            {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": number,
             "bytes": 64, "globalPid": small_traces.packed(100), "copyKind": 1, "srcKind": 0, "dstKind": 2}
            for start, end, number in made.copies
        ]  # fmt: skip
    return small_traces.nsys(path.with_suffix(".sqlite"), tables)


def rpd(path: Path, made: Program) -> str:
    strings = [(1, ""), (2, "hipLaunchKernel"), (3, "gemm"), (4, "KernelExecution"), (5, "CopyHostToDevice")]
    calls = [(number, 42, 43, start, end, 2, 1) for start, end, number in made.calls]
    work = [(number, 3, 0, 0, "", start, end, 3, 4) for start, end, number in made.kernels]
    work += [(100 + number, 3, 0, 0, "", start, end, 1, 5) for start, end, number in made.copies]
    links = [(place, each[0] % 100 if each[0] < 200 else each[0] - 100, each[0]) for place, each in enumerate(work, 1)]
    known = {number for _, _, number in made.calls}
    content = {
        "rocpd_string": strings, "rocpd_op": work, "rocpd_api": calls,
        "rocpd_api_ops": [link for link in links if link[1] in known],
        "rocpd_copyapi": [(1, "0x0", 64)], "rocpd_kernelapi": [(1, 4, 2, 1, 256, 1, 1, 0)],
    }  # fmt: skip
    return str(sqlitefiles.rpd(path.with_suffix(".rpd"), content))


def rocprof(path: Path, made: Program) -> str:
    calls = [(number, 7, 8, start, end, 1, number) for start, end, number in made.calls]
    work = [(number, 7, 8, 5, 1, 3, 2, start, end, 256, 1, 1, 1024, 1, 1, 0, 1000 + number)
            for start, end, number in made.kernels]  # fmt: skip
    copies = [(number, 7, 8, start, end, 3, 5, 1, 64, 2, 2000 + number) for start, end, number in made.copies]
    events = [(number, 4, number, "{}") for _, _, number in made.calls]
    events += [(1000 + number, None, number, "{}") for _, _, number in made.kernels]
    events += [(2000 + number, None, number, "{}") for _, _, number in made.copies]
    content = {
        **rocpd.CONTENT, "rocpd_event": events, "rocpd_region": calls, "rocpd_kernel_dispatch": work,
        "rocpd_memory_copy": copies,
    }  # fmt: skip
    return str(rocpd.database(path.with_suffix(".db"), content))


def otlp(path: Path, made: Program) -> str:
    run, file = path.with_name("run"), path.with_name("spans.jsonl")
    assert main(["import", kineto(path, made), "-o", str(run)]) == 0
    assert main(["export", str(run), "--to", str(file)]) == 0
    return str(file)


def chrome(path: Path, made: Program) -> str:
    """Write device work as JAX does, in a process that is named after the device; such a file has no calls."""
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 13, "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    ]
    work = [
        {"ph": "X", "name": "gemm", "pid": 1, "tid": 13, "ts": start / 1e3, "dur": (end - start) / 1e3}
        for start, end, _ in made.kernels
    ]
    host = [{"ph": "X", "name": "train", "pid": 2, "tid": 1, "ts": 0, "dur": 6000}]
    path.write_text(json.dumps({"traceEvents": [*names, *work, *host]}))
    return str(path)


def xplane(path: Path, made: Program) -> str:
    def event(name: str, row: tuple[int, int, int]) -> dict[str, Any]:
        start, end, number = row
        stats = {"correlation_id": number, "hlo_op": "→dot", "hlo_module": "→jit_step"}
        return {"name": name, "at": start, "dur": end - start, "stats": stats}

    work = sorted(made.kernels + made.copies)
    data = wire.xspace(
        wire.Plane("/device:GPU:0", device_vendor="NVIDIA").line(
            14, "Stream #14(Compute)", [event("MemcpyH2D" if row in made.copies else "gemm", row) for row in work]
        ),
        wire.Plane("/host:CPU").line(7, "Host Threads/7", [event("cuLaunchKernel", row) for row in made.calls]),
        wire.Plane("Task Environment", profile_start_time=BASE_NS),
    )
    path = path.with_suffix(".xplane.pb")
    path.write_bytes(data)
    return str(path)


def perfetto(path: Path, made: Program) -> str:
    """Write the events of `kineto` as slices, each on a track of its own that is named after its thread or stream."""

    def packet(*parts: tuple[int, Any]) -> tuple[int, bytes]:
        return 1, wire.message(*parts, (10, 1))

    def argument(name: str, value: str | int) -> tuple[int, bytes]:
        return 4, wire.message((10, name), (4 if isinstance(value, int) else 6, value))

    packets = [
        packet((60, wire.message((1, 1), (3, wire.message((1, 1), (6, "python")))))),
        packet((60, wire.message((1, 2), (5, 1), (4, wire.message((1, 1), (2, 1), (5, "main")))))),
    ]
    for number, event in enumerate(json.loads(Path(kineto(path, made)).read_text())["traceEvents"]):
        track = 2
        if event["pid"] == 0:  # work on one stream may overlap in a damaged trace, slices of one track may not
            track = 100 + number
            packets.append(packet((60, wire.message((1, track), (2, "stream 7")))))
        begin, end = BASE_NS + round(1e3 * event["ts"]), BASE_NS + round(1e3 * (event["ts"] + event["dur"]))
        arguments = [argument(*each) for each in event["args"].items()]
        names = ((23, event["name"]), (22, event["cat"]), *arguments)
        packets.append(packet((8, begin), (11, wire.message((9, 1), (11, track), *names))))
        packets.append(packet((8, end), (11, wire.message((9, 2), (11, track)))))
    path = path.with_suffix(".pftrace")
    path.write_bytes(wire.message(*packets))
    return str(path)


def jaeger(path: Path, made: Program) -> str:
    """Write the spans of `otlp` as Jaeger's page downloads them."""
    traces: dict[str, dict[str, Any]] = {}
    for line in Path(otlp(path, made)).read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            service = {"tags": [_tag(each) for each in resource["resource"]["attributes"]]}
            service["serviceName"] = next(each["value"] for each in service["tags"] if each["key"] == "service.name")
            for span in (each for scope in resource["scopeSpans"] for each in scope["spans"]):
                trace = traces.setdefault(span["traceId"], {"traceID": span["traceId"], "spans": [], "processes": {}})
                process = f"p{len(trace['processes']) + 1}"
                trace["processes"][process] = service
                parent = span.get("parentSpanId")
                start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                trace["spans"].append(
                    {
                        "traceID": span["traceId"], "spanID": span["spanId"], "operationName": span["name"],
                        "references": [{"refType": "CHILD_OF", "traceID": span["traceId"], "spanID": parent}]
                        if parent else [],
                        "startTime": start // 1000, "duration": (end - start) // 1000, "processID": process,
                        "tags": [_tag(each) for each in span["attributes"]],
                    }
                )  # fmt: skip
    path = path.with_name("traces.json")
    path.write_text(json.dumps({"data": list(traces.values())}))
    return str(path)


def _tag(attribute: dict[str, Any]) -> dict[str, Any]:
    ((kind, value),) = attribute["value"].items()
    kinds = {"intValue": "int64", "boolValue": "bool", "doubleValue": "float64"}
    return {
        "key": attribute["key"],
        "type": kinds.get(kind, "string"),
        "value": int(value) if kind == "intValue" else value,
    }


def proton(path: Path, made: Program) -> str:
    """Write a timeline of Proton, which has device work and neither calls nor copies."""
    work = [
        {"args": {"call_stack": ["ROOT", "layer", "gemm"]}, "cat": "kernel", "name": "gemm", "ph": "X", "tid": 7,
         "ts": start / 1e3, "dur": (end - start) / 1e3} for start, end, _ in made.kernels
    ]  # fmt: skip
    path = path.with_suffix(".chrome_trace")
    path.write_text(json.dumps({"displayTimeUnit": "us", "traceEvents": work}))
    return str(path)


WITHOUT_CALLS = ("chrome", "proton")
WRITERS: dict[str, Callable[[Path, Program], str]] = {
    "kineto": kineto, "nsys": nsys, "rpd": rpd, "rocprof": rocprof, "otlp": otlp, "chrome": chrome,
    "xplane": xplane, "perfetto": perfetto, "jaeger": jaeger, "proton": proton,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        (pytest.param if form == "kineto" or damage == "overlap" else deep)(form, damage)
        for form in WRITERS
        for damage in DAMAGED
    ],
)
def test_damage_forbids_the_statements_that_rest_on_it_in_each_format(form: str, damage: str, tmp_path: Path) -> None:
    expected = FORBIDDEN[damage]
    if form in WITHOUT_CALLS:  # lost records cannot be told
        if damage in ("lost", "no kernels"):
            pytest.skip("a trace without calls does not show that records are missing")
        expected = expected | {"cause"}
    trace = xsp.load(WRITERS[form](tmp_path / "made.json", DAMAGED[damage]))
    accounted = account.of(trace)
    assert {what for doubt in accounted.doubts for what in doubt.forbids} == expected
    if "busy" in expected:
        assert "busy" not in "".join(entry.name for each in accounted.iterations for entry in each.host.entries)
        assert all(not each.devices for each in accounted.iterations)
