"""How many CUPTI records are decoded per second? No GPU is needed: records are fabricated, or were recorded on an H200.

A kernel produces a record of its own and a record of the runtime call that launched it. Records come as raw buffers,
which are read as arrays, or as objects of cupti-python; creating and freeing these objects is the minimum cost of
processing them one by one (`floor`). For both forms these take turns: what is done in CUPTI's callback, and the
conversion into spans after the step. Without cupti-python, the records are those of a step of a transformer in
`tests/gpu/recorded`, as plain objects, and the minimum is not measured.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
from parts import turns

from xsp_collectors.cuda.activities import BUFFER_BYTES, TEXT_FIELDS, Activity
from xsp_collectors.cuda.recordbuffers import STRUCTURES, RecordBuffers
from xsp_collectors.cuda.recordobjects import RecordObjects

COLUMNS = ("what", "ns a record [95 %]", "records a second", "of the floor")


def kernel_class(cupti: Any) -> type:
    """Return the class of kernel records; its name ends in a number that increases with CUPTI's version."""
    names = [name for name in dir(cupti) if name.startswith("ActivityKernel") and name[14:].isdigit()]
    return getattr(cupti, max(names, key=lambda name: int(name[14:])))  # type: ignore[no-any-return]


def fabricate(cupti: Any, kernels: int) -> list[Any]:
    """Return the records of `kernels` kernels and of their launches."""
    kind = kernel_class(cupti)
    records = []
    for number in range(kernels):
        kernel, call = kind(), cupti.ActivityAPI()
        kernel.name = "relu"  # records that are not from CUPTI hold arbitrary bytes
        kernel.kind, call.kind = int(Activity.CONCURRENT_KERNEL), int(Activity.RUNTIME)
        kernel.start, kernel.end = 1_000 * number + 1, 1_000 * number + 900
        call.start, call.end = 1_000 * number, 1_000 * number + 500
        kernel.correlation_id = call.correlation_id = number + 1
        records += [call, kernel]
    return records


def floor(cupti: Any, kernels: int) -> Callable[[], object]:
    """Return a function that creates the objects of records, and frees them."""
    kind, call = kernel_class(cupti), cupti.ActivityAPI

    def run() -> None:
        records = []
        for _ in range(kernels):
            records.append(call())
            records.append(kind())

    return run


RECORDED = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "recorded" / "records" / "transformer.json"


def recorded(count: int) -> list[Any]:
    """Return at least `count` records of a step that was recorded on a GPU, the step repeated."""
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    records = []
    for kind, name, *values in content["rows"]:
        fields = dict(zip(content["fields"][name], values, strict=True))
        thread = SimpleNamespace(thread_id=fields.pop("object_id_pt_thread_id", None))
        records.append(SimpleNamespace(kind=kind, object_id=SimpleNamespace(pt=thread), **fields))
    return records * -(-count // len(records))


def as_buffers(records: Sequence[Any]) -> tuple[list[bytes], list[Any]]:
    """Return the contents of the buffers in which CUPTI delivers these records, and the texts that must be kept."""
    objects = RecordObjects()
    objects.complete(records)
    batch = objects.take()
    kept = [None if text is None else ctypes.create_string_buffer(text.encode()) for text in batch.texts]
    addresses = np.array([0 if text is None else ctypes.addressof(text) for text in kept], np.uint64)
    pieces: dict[int, bytes] = {}
    for structure in STRUCTURES:
        table = batch[structure.row_type]
        table = table.where(np.isin(table.kind, structure.kinds))
        values = np.zeros(len(table), structure.dtype(structure.sizes[-1]))
        values["kind"] = table.kind
        for field in structure.fields:
            values[field] = addresses[table[field]] if field in TEXT_FIELDS else table[field]
        pieces.update(zip(table.number.tolist(), (value.tobytes() for value in values), strict=True))
    contents, size = [[]], 0
    for _, piece in sorted(pieces.items()):
        if size + len(piece) > BUFFER_BYTES:
            contents.append([])
            size = 0
        contents[-1].append(piece)
        size += len(piece)
    return [b"".join(content) for content in contents], kept


def lend(records: RecordBuffers, contents: Sequence[bytes]) -> list[tuple[int, int]]:
    """Request buffers as CUPTI does and fill them; return their addresses and sizes."""
    lent = []
    for content in contents:
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        records.on_request(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
        assert buffer.value is not None
        ctypes.memmove(buffer.value, content, len(content))
        lent.append((buffer.value, len(content)))
    return lent


NAMES = ("floor", "objects, callback", "objects, spans", "buffers, callback", "buffers, spans")


def measure(records: Sequence[Any], rounds: int, least: Callable[[], object] | None = None) -> dict[str, list[float]]:
    """Return the nanoseconds per record in each round, by kind of work; `least` is the minimum, if it is known."""
    from xsp_collectors.cuda.cupti import CuptiActivities

    times: dict[str, list[float]] = {name: [] for name in NAMES if least or name != "floor"}
    contents, kept = as_buffers(records)
    sizes = {int(kind): structure.sizes[-1] for structure in STRUCTURES for kind in structure.kinds}
    for number in range(rounds + 1):
        objects, buffers = RecordObjects(), RecordBuffers(None, sizes)
        lent = lend(buffers, contents)
        steps: dict[str, Callable[[], object]] = {} if least is None else {"floor": least}
        deliveries: dict[str, tuple[Any, Callable[[], object]]] = {
            "objects": (objects, lambda objects=objects: objects.complete(records)),
            "buffers": (
                buffers,
                lambda buffers=buffers, lent=lent: [
                    buffers.on_complete(None, 0, address, size, size) for address, size in lent
                ],
            ),
        }
        for form, (delivered, deliver) in deliveries.items():
            collector = CuptiActivities()
            collector._records = delivered
            collector._stopped_ns = 1 << 62  # no record is of xsp's own calls after the step
            steps[f"{form}, callback"] = deliver
            steps[f"{form}, spans"] = lambda collector=collector: len(list(collector.spans()))
        made = {}
        for name, step in steps.items():
            begin = perf_counter_ns()
            made[name] = step()
            elapsed_ns = perf_counter_ns() - begin
            if number:  # the first round is not counted
                times[name].append(elapsed_ns / len(records))
        assert made["objects, spans"] == made["buffers, spans"]
    del kept
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=15), arguments)
    kernels = 2_000 if options.quick else 50_000
    try:
        from cupti import cupti

        records = fabricate(cupti, kernels)
        times = measure(records, options.rounds, floor(cupti, kernels))
        origin = f"Records are of the class {kernel_class(cupti).__name__}."
    except ImportError as error:
        turns.say(f"  recorded records, as plain objects: {error}; pip install 'xsp[cuda]'")
        records = recorded(2 * kernels)
        times = measure(records, options.rounds)
        origin = f"Records of {RECORDED.stem}, recorded on an H200, as plain objects."
    report = turns.Report("cupti_decode", f"Decoding {len(records):,} records of CUPTI", COLUMNS)
    for name, values in times.items():
        cost, rate = turns.middle(values), turns.middle([1e9 / value for value in values])
        least = times.get("floor")
        against = turns.middle([a / b for a, b in zip(values, least, strict=True)]).text(2) if least else "–"
        report.add([name, cost.text(0), rate.text(0), against], ns=cost, rate=rate, rounds=values)
    report.notes += [
        "`callback` runs on a thread of CUPTI and holds the GIL at the flush after a step; `spans` runs after it.",
        "Objects exist before their callback: `floor` comes in addition.",
        origin,
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
