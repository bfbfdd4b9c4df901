"""Write a Kineto trace of any size: copies of a real one, one after the other in time.

The numbers that link spans (correlation ids, operators' ids, sequence numbers, flows, step numbers) are shifted in each
copy, so that copies are independent. Memory holds the real trace once, whatever the size of the written one.

    python benchmarks/parts/kineto_copies.py trace.json.gz large.json.gz --events 2000000
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NamedTuple

LINKS = {
    "correlation": "correlation",
    "wait_on_cuda_event_record_corr_id": "correlation",
    "External id": "operator",
    "external id": "operator",
    "Sequence number": "sequence",
    "Record function id": "record",
    "Python id": "python",
    "Python parent id": "python",
    "Ev Idx": "index",
}
"""Arguments that link spans → the counter that they refer to; several arguments may refer to the same counter."""

GAP_NS = 1_000_000
"""Nanoseconds between copies."""

_STEP = re.compile(r"(ProfilerStep#)(\d+)")
_MARK = "\x00"
"""Placeholder in the text of a span for a number that differs from copy to copy."""

Value = tuple[str, int]
"""The counter of a number, and its value in the first copy."""


class CopyCounts(NamedTuple):
    """The size of the written trace."""

    events: int
    copies: int


def write(source: Path, target: Path, events: int) -> CopyCounts:
    """Write as many copies of a trace as are needed for a number of spans, instants and flows.

    Args:
        source: a trace of PyTorch's profiler, plain or compressed.
        target: the file to write, compressed if it ends in `.gz`.
        events: minimum number of events; metadata of processes and threads is written once and does not count.
    """
    raw = source.read_bytes()
    trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal, strict=False)
    rows: list[dict[str, Any]] = trace.pop("traceEvents")
    timed = [row for row in rows if row.get("ph") != "M" and "ts" in row]
    untimed = [row for row in rows if row.get("ph") == "M" or "ts" not in row]
    copies = max(1, -(-events // len(timed)))
    with _open(target) as file:
        head = json.dumps(trace, default=float)
        file.write(f'{head[:-1]}{", " if trace else ""}"traceEvents": [\n')
        file.write(",\n".join(json.dumps(row, default=float) for row in untimed))
        for number, part in enumerate(_parts(timed, copies)):
            file.write((",\n" if untimed or number else "") + part)
        file.write("\n]}\n")
    return CopyCounts(copies * len(timed), copies)


def _parts(rows: Sequence[dict[str, Any]], copies: int) -> Iterator[str]:
    """Yield the text of each copy."""
    shapes = [_shape(row) for row in rows]
    strides = _strides([value for _, values in shapes for value in values])
    is_exact = any(isinstance(row["ts"], Decimal) for row in rows)
    for copy in range(copies):
        yield ",\n".join(
            pieces
            % tuple(_number_text(counter, value + copy * strides[counter], is_exact) for counter, value in values)
            for pieces, values in shapes
        )


def _number_text(counter: str, value: int, is_exact: bool) -> str:
    if counter != "time":
        return str(value)
    return f"{value // 1000}.{value % 1000:03d}" if is_exact else str(value // 1000)


def _shape(row: dict[str, Any]) -> tuple[str, list[Value]]:
    """Return the text of a span with `%s` for each number that is shifted, and the numbers."""
    values: list[Value] = []
    copy = {**row, "args": dict(row["args"])} if isinstance(row.get("args"), dict) else dict(row)
    for place, key, counter in _numbers(copy):  # in the order in which they appear in the text
        values.append((counter, _nanoseconds(place[key]) if counter == "time" else place[key]))
        place[key] = _MARK
    text, mark = json.dumps(copy, default=float), json.dumps(_MARK)
    step = _STEP.search(text)
    if step is not None:
        values.insert(text[: step.start()].count(mark), ("step", int(step[2])))
        text = f"{text[: step.end(1)]}{mark}{text[step.end() :]}"
    return text.replace("%", "%%").replace(mark, "%s"), values


def _numbers(row: dict[str, Any]) -> Iterable[tuple[dict[str, Any], str, str]]:
    """Yield the dictionary, key and counter of each number that is shifted; an argument of 0 means no link."""
    for key in row:
        if key == "ts":
            yield row, key, "time"
        elif key == "id" and isinstance(row[key], int):
            yield row, key, "flow"
        elif key == "args" and isinstance(row[key], dict):
            for name in row[key]:
                if name in LINKS and isinstance(row[key][name], int) and row[key][name] > 0:
                    yield row[key], name, LINKS[name]


def _strides(values: Sequence[Value]) -> dict[str, int]:
    """Return the difference between the numbers of consecutive copies, by counter."""
    values_by_counter: dict[str, list[int]] = defaultdict(list)
    for counter, value in values:
        values_by_counter[counter].append(value)
    return {
        counter: max(counter_values) - min(counter_values) + (GAP_NS if counter == "time" else 1)
        for counter, counter_values in values_by_counter.items()
    }


def _nanoseconds(microseconds: Any) -> int:
    return round(Decimal(microseconds) * 1000)


def _open(target: Path) -> IO[str]:
    return (
        gzip.open(target, "wt", compresslevel=1, encoding="utf-8")
        if target.suffix == ".gz"
        else open(target, "w", encoding="utf-8")
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a trace of PyTorch's profiler")
    parser.add_argument("target", type=Path, help="compressed if it ends in .gz")
    parser.add_argument("--events", type=int, default=2_000_000, help="minimum number of events (default: 2000000)")
    options = parser.parse_args(arguments)
    counts = write(options.source, options.target, options.events)
    print(
        f"{options.target}: {counts.events:,} spans, instants and flows, "
        f"{counts.copies} copies of {options.source.name}"
    )


if __name__ == "__main__":
    main()
