"""Read what Proton, Triton's profiler, writes: sums by place (`.hatchet`), and timelines (`.chrome_trace`).

A `.hatchet` file is a tree of scopes with sums over all calls at a place: it has no moments, so nothing in it tells
what ran when, side by side, or how long a device was idle. Its kernels become spans of equal length, as many as there
were calls, one after the other; `timeline: false` in `run.json` says that their order and their starts mean nothing,
and no statement about time on the clock is made. A timeline is a JSON document for each stream, a line each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers import contract
from xsp.importers.contract import MAX_TIME_NS, RAW_COLUMNS, Losses, SourceInfo, TableImporter, read_file
from xsp.schema import Kind, Level

MAX_BYTES = 1 << 28
"""Maximum size of a file in bytes, decompressed: sums by place are small, whatever the program did."""

MAX_CALLS = 100_000
"""Maximum number of calls in a file that become a span each; beyond it a place is one span."""

TIME = "time (ns)"
_TREE = re.compile(rb'"frame"\s*:\s*\{\s*"name"')
_TIMELINE = re.compile(rb'"args"\s*:\s*\{\s*"call_stack"')
_ROOT = "ROOT"
_THREAD = 1
_MAX_DEVICE = 1024

_COLUMNS = tuple(
    column for column in RAW_COLUMNS
    if column.name in {"number", "level", "kind", "name", "start_ns", "dur_ns", "thread", "device", "stream",
                       "operator", "flops", "flops_source", "attributes", "status", "collector", "replayed"}
)  # fmt: skip
_NAMES = tuple(column.name for column in _COLUMNS)


class Proton(TableImporter):
    """Profiles of Proton, Triton's profiler: trees with sums (hatchet), and timelines."""

    name = "proton"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is a tree of frames with metrics, or a timeline with call stacks of Proton."""
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        is_tree = text[:1] == b"[" and b'"metrics"' in text and bool(_TREE.search(text))
        return is_tree or is_timeline(head) or source.lower().endswith((".hatchet", ".hatchet.gz"))

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is damaged, or holds no kernel.
        """
        text = read_file(source, MAX_BYTES, "profile fewer steps, or without call stacks")
        losses = Losses(self.name)
        try:
            run, rows = _of_tree(json.loads(text), losses) if text.lstrip()[:1] == b"[" else _of_lines(text, losses)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, json.JSONDecodeError) else str(error)
            raise TraceError(
                f"{source}: a profile of Proton that is damaged, cut off or in its binary form ({reason[:200]}); copy "
                "it again, or write it anew with proton.finalize() as `hatchet` or `chrome_trace`"
            ) from error
        if not any(row["level"] == Level.KERNEL for row in rows):
            raise TraceError(
                f"{source}: a profile of Proton without any kernel; was one launched between proton.start and "
                "proton.finalize?"
            )
        table.create(con, "raw_spans", RAW_COLUMNS)
        constant = {"status": "ok", "collector": self.name, "replayed": False}
        values = [
            tuple((constant | row | {"number": number}).get(name) for name in _NAMES) for number, row in enumerate(rows)
        ]
        table.create(con, "proton_spans", _COLUMNS)
        table.insert(con, "proton_spans", values, _COLUMNS)
        con.execute("INSERT INTO raw_spans BY NAME FROM proton_spans")
        con.execute("DROP TABLE proton_spans")
        losses.spans = len(rows)
        return SourceInfo(run, losses)


def is_timeline(head: bytes) -> bool:
    """Return whether a file with these first bytes is a timeline of Proton."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return text[:1] == b"{" and b'"displayTimeUnit"' in text[:64] and bool(_TIMELINE.search(text))


# --- sums by place ----------------------------------------------------------------------------------------------


def _of_tree(document: Any, losses: Losses) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run and the rows of a tree of frames."""
    roots = [entry for entry in document if "frame" in entry]
    described: Mapping[str, Any] = next((entry for entry in document if "frame" not in entry), {})
    calls = sum(_calls(node) for node in _nodes(roots))
    if split := calls <= MAX_CALLS:
        losses.note("calls of a kernel from the same place have the same time, the mean: the file has their sum")
    else:
        losses.note(f"{calls:,} calls: the kernels of a place count as one call")
    losses.note(
        "sums by place, without a timeline: when something ran, and what devices waited for, is not in the file"
    )
    rows: list[dict[str, Any]] = []
    for root in roots:
        _append(rows, root, None, 0, losses, split)
    devices = {
        int(number): (str(kind), properties)
        for kind, entries in described.items()
        for number, properties in entries.items()
        if isinstance(properties, Mapping) and int(number) < _MAX_DEVICE
    }
    machine = [_device(*devices.get(number, ("unknown", {}))) for number in range(max(devices, default=-1) + 1)]
    run = {"timeline": False, "profiler": {"name": "Proton"},
           "machine": {"devices": [each["name"] for each in machine], "device_properties": machine}}  # fmt: skip
    return run, rows


def _nodes(roots: list[Any]) -> Iterator[Mapping[str, Any]]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.get("children", [])


def _append(
    rows: list[dict[str, Any]], root: Mapping[str, Any], parent: int | None, start_ns: int, losses: Losses, split: bool
) -> None:
    """Append the spans of a tree: those of its kernels one after the other, its scopes around them."""
    waiting: list[tuple[Any, int | None, dict[str, Any] | None]] = [(root, parent, None)]
    at = start_ns + sum(row["dur_ns"] for row in rows if row["level"] == Level.KERNEL)
    while waiting:
        node, above, closed = waiting.pop()
        if closed is not None:  # all inside it was appended
            closed["dur_ns"] = at - closed["start_ns"]
            continue
        metrics, name = node.get("metrics", {}), str(node["frame"]["name"])[:4096]
        children = node.get("children", [])
        flops = _sum(value for key, value in metrics.items() if re.fullmatch(r"flops\d*", key))
        attributes = {"accessed_bytes": _sum([metrics["bytes"]])} if metrics.get("bytes") else {}
        common = {"name": name, "flops": flops or None, "flops_source": "shapes" if flops else None}
        if _is_kernel(metrics):
            spans = list(_kernels(common, metrics, above, at, attributes, losses, split))
            rows += spans
            at += sum(span["dur_ns"] for span in spans)
        if name != _ROOT and (children or not _is_kernel(metrics)):
            has_kernels = any(_is_kernel(child.get("metrics", {})) for child in children)
            row = {**common, "level": int(Level.OP), "kind": str(Kind.OP if has_kernels else Kind.USER),
                   "start_ns": at, "dur_ns": 0, "thread": _THREAD, "operator": len(rows) + 1,
                   "attributes": json.dumps(attributes) if attributes else None}  # fmt: skip
            rows.append(row)
            waiting.append((node, None, row))
            above = row["operator"]
        waiting += [(child, above, None) for child in reversed(children)]


def _is_kernel(metrics: Mapping[str, Any]) -> bool:
    return "device_id" in metrics and TIME in metrics


def _calls(node: Mapping[str, Any]) -> int:
    metrics = node.get("metrics", {})
    return max(1, int(metrics.get("count", 1))) if _is_kernel(metrics) else 0


def _kernels(
    common: Mapping[str, Any], metrics: Mapping[str, Any], operator: int | None, at: int, attributes: dict[str, Any],
    losses: Losses, split: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the calls of a kernel from one place, whose times add up to the sum in the file."""
    total, device = int(metrics[TIME]), int(metrics["device_id"])
    if not (0 <= total < MAX_TIME_NS // 4 and 0 <= device < _MAX_DEVICE):
        losses.skipped["a time or a device that is out of range"] += 1
        return
    count = max(1, int(metrics.get("count", 1)))
    calls = count if split else 1
    if calls < count:
        attributes = attributes | {"count": count}
    for call in range(calls):
        first, last = total * call // calls, total * (call + 1) // calls
        yield {
            **common, "level": int(Level.KERNEL), "kind": str(Kind.KERNEL), "start_ns": at + first,
            "dur_ns": last - first, "device": device, "stream": 0, "operator": operator,
            "flops": common["flops"] // calls if common["flops"] else None,
            "attributes": json.dumps({**attributes, **(
                {"accessed_bytes": attributes["accessed_bytes"] // calls} if "accessed_bytes" in attributes else {}
            )}) if attributes else None,
        }  # fmt: skip


def _sum(values: Any) -> int:
    """Return the sum of numbers that fit a column; others are left out."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return int(sum(value for value in numbers if math.isfinite(value) and 0 <= value < MAX_TIME_NS // 4))


def _device(kind: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    arch = str(properties.get("arch", ""))
    major, minor = (arch[:-1], arch[-1]) if kind == "CUDA" and arch.isdigit() and len(arch) > 1 else (None, None)
    sms = properties.get("num_sms")
    is_count = isinstance(sms, int) and not isinstance(sms, bool) and 0 < sms < 1 << 20
    return contract.device(f"{kind} {arch}".strip()[:256], sms if is_count else None, None, major, minor, None)


# --- timelines --------------------------------------------------------------------------------------------------


def _of_lines(text: bytes, losses: Losses) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run and the rows of timelines: a document for each stream."""
    rows = []
    for line in text.splitlines():
        for event in json.loads(line)["traceEvents"] if line.strip() else ():
            start, duration = event.get("ts"), event.get("dur")
            stack = event.get("args", {}).get("call_stack") or []
            if event.get("ph") != "X" or not _is_time(start) or not _is_time(duration):
                losses.skipped["events without a time"] += 1
                continue
            stream = event.get("tid")
            rows.append(
                {"name": str(event.get("name", "unnamed kernel"))[:4096], "level": int(Level.KERNEL),
                 "kind": str(Kind.KERNEL), "start_ns": round(start * 1000), "dur_ns": round(duration * 1000),
                 "device": 0, "stream": stream if isinstance(stream, int) and 0 <= stream < MAX_TIME_NS else 0,
                 "attributes": json.dumps({"sources": ["/".join(map(str, stack[1:-1]))]}) if len(stack) > 2 else None}
            )  # fmt: skip
    losses.note("Proton's timelines do not name devices: all work counts as that of device 0")
    losses.note("times count from the start of the first kernel")
    rows.sort(key=lambda row: (row["start_ns"], row["stream"]))
    return {"profiler": {"name": "Proton"}, "machine": {"devices": ["unknown"]}}, rows


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_TIME_NS / 4000
