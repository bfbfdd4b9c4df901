"""A predicted step as execution traces in Chakra's schema (MLCommons, `et_def.proto`), one file for each rank.

A file is a sequence of length-prefixed messages: metadata, then a node for each task of the rank. Tasks that compute
are COMP_NODE with their durations; buckets are COMM_COLL_NODE with the kind and the bytes of the collective, whose time
a simulator computes. Field numbers are those of the published schema. This module encodes the messages without a
library.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from xsp import atomic
from xsp.errors import OutputError, UsageError
from xsp.predict import training
from xsp.predict.prediction import PredictedStep
from xsp.predict.schedule import Cause, Task
from xsp.predict.training import ALL_RANKS, Job
from xsp.version import __version__

SCHEMA = "0.0.4"
MOST_RANKS = 4_096
"""Maximum number of ranks, and so of files; more would be of no use."""

COMP_NODE, COMM_COLL_NODE = 4, 7
_KINDS = {"all-reduce": 0, "all-gather": 2, "reduce-scatter": 7}
"""Values of `CollectiveCommType`."""

# fields of Node, GlobalMetadata and AttributeProto
_ID, _NAME, _TYPE, _DATA_DEPS, _START, _DURATION, _ATTR = 1, 2, 3, 5, 6, 7, 10
_VERSION, _META_ATTR = 1, 2
_ATTR_NAME, _DOUBLE, _INT64, _BOOL, _STRING = 1, 3, 9, 27, 29
_VARINT, _FIXED64, _BYTES = 0, 1, 2


def check(folder: Path, ranks: int) -> None:
    """Check that `write` accepts a folder, which need not exist.

    Raises:
        OutputError: it is a file, or has files of a step on more ranks.
        UsageError: there are too many ranks.
    """
    if ranks > MOST_RANKS:
        raise UsageError(f"{ranks:,} files are too many: predict at most {MOST_RANKS:,} ranks with --chakra")
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        existing = next((file.name for file in folder.glob("rank.*.et") if _rank_of(file) >= ranks), None)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from error
    if existing is not None:
        raise OutputError(f"{folder}: has {existing} of a step on more ranks: name another folder")


def write(step: PredictedStep, sizes: Sequence[int], folder: Path) -> int:
    """Write `rank.N.et` of each rank into a folder, and return the number of files.

    Args:
        step: a step, predicted with a task for each layer.
        sizes: bytes of each bucket.
        folder: the folder, which is created if it is missing.

    Raises:
        OutputError: a file cannot be written, or the folder has files of a step on more ranks.
        UsageError: there are too many ranks.
    """
    job = step.job
    check(folder, job.ranks)
    classes = [kind for kind, (count, _) in enumerate(training.rank_classes(job)) for _ in range(count)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        contents = {kind: content(step, sizes, kind) for kind in set(classes)}
        for rank, kind in enumerate(classes):
            with atomic.replacing(folder / f"rank.{rank}.et", flush=False) as temporary:
                temporary.write_bytes(contents[kind])
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from error
    return len(classes)


def _rank_of(file: Path) -> int:
    number = file.name.split(".")[1]
    return int(number) if number.isascii() and number.isdecimal() else -1


def content(step: PredictedStep, sizes: Sequence[int], kind: int) -> bytes:
    """Return the file content for the ranks of a class: the last simulated step, with times from its start."""
    schedule = step.schedule
    last_step = schedule.tasks[-1].step
    indices = [
        index
        for index, task in enumerate(schedule.tasks)
        if task.step == last_step and task.rank in (kind, ALL_RANKS) and (task.seconds > 0 or task.rank == ALL_RANKS)
    ]
    start_time = min((schedule.starts[index] for index in indices), default=0.0)
    node_numbers = {index: number for number, index in enumerate(indices)}
    parts = [_with_length(_metadata(step))]
    for index, number in node_numbers.items():
        dependencies = sorted(
            node_numbers[dependency] for dependency in _dependencies(schedule.tasks, index, node_numbers.keys())
        )
        start = schedule.starts[index] - start_time
        parts.append(_with_length(_node(number, schedule.tasks[index], start, dependencies, sizes, step.job)))
    return b"".join(parts)


def _dependencies(tasks: Sequence[Task], task_index: int, selected_indices: Collection[int]) -> set[int]:
    """Return the selected tasks that a task waits for; any other task is replaced by the tasks that it waits for."""
    dependencies: set[int] = set()
    pending, visited = list(tasks[task_index].dependencies), set()
    while pending:
        index = pending.pop()
        if index in selected_indices:
            dependencies.add(index)
        elif index not in visited:
            visited.add(index)
            pending += tasks[index].dependencies
    return dependencies


def _metadata(step: PredictedStep) -> bytes:
    properties = {"producer": f"xsp {__version__}", "link": step.job.link.description}
    parts = [_text_field(_VERSION, SCHEMA)]
    parts += [_text_field(_META_ATTR, _attribute(name, value)) for name, value in properties.items()]
    return b"".join([*parts, _text_field(_META_ATTR, _attribute("ranks", step.job.ranks)),
                     _text_field(_META_ATTR, _attribute("predicted_step_s", step.step))])  # fmt: skip


def _node(number: int, task: Task, start: float, dependencies: Sequence[int], sizes: Sequence[int], job: Job) -> bytes:
    is_collective = task.cause is Cause.COMMUNICATION
    parts = [
        _integer_field(_ID, number), _text_field(_NAME, task.name),
        _integer_field(_TYPE, COMM_COLL_NODE if is_collective else COMP_NODE),
        _text_field(_DATA_DEPS, b"".join(map(_varint, dependencies))) if dependencies else b"",
        _integer_field(_START, round(start * 1e6)), _integer_field(_DURATION, round(task.seconds * 1e6)),
    ]  # fmt: skip
    attributes: dict[str, bool | int | float | str] = {
        "is_cpu_op": task.cause is Cause.INPUT, "cause": str(task.cause), "duration_s": task.seconds
    }  # fmt: skip
    if is_collective:
        collective, _, bucket = task.name.partition(" ")
        size = sizes[int(bucket)] if collective == "all-gather" else training.compressed_bytes(sizes[int(bucket)], job)
        attributes |= {"comm_type": _KINDS[collective], "comm_size": size}
    return b"".join([*parts, *(_text_field(_ATTR, _attribute(name, value)) for name, value in attributes.items())])


def _attribute(name: str, value: bool | int | float | str) -> bytes:
    """Return an encoded attribute: its name, and its value in the field of its type."""
    if isinstance(value, bool):
        encoded = _key(_BOOL, _VARINT) + _varint(value)
    elif isinstance(value, int):
        encoded = _key(_INT64, _VARINT) + _varint(value)
    elif isinstance(value, float):
        encoded = _key(_DOUBLE, _FIXED64) + struct.pack("<d", value)
    else:
        encoded = _text_field(_STRING, value)
    return _text_field(_ATTR_NAME, name) + encoded


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _integer_field(field: int, value: int) -> bytes:
    """Return an encoded integer; nothing for 0, which is the default of an absent field."""
    return _key(field, _VARINT) + _varint(value) if value else b""


def _text_field(field: int, value: str | bytes) -> bytes:
    encoded = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return _key(field, _BYTES) + _varint(len(encoded)) + encoded


def _with_length(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _varint(value: int) -> bytes:
    return bytes(_varint_bytes(value))


def _varint_bytes(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
