"""The names that xsp's spans and resources carry in OpenTelemetry.

Names come from OpenTelemetry's semantic conventions where they have one (`service.*`, `host.*`, `process.*`,
`thread.*`, `code.*`, `hw.*`, `gen_ai.*`); other names are under `xsp.*`, or under `cuda.*` if only device work
has them. `xsp.schema.COLUMNS` has the attribute of each column; this module has the rest: the attributes of a
resource, and the conversion of the JSON in the column `attributes` to single attributes and back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xsp.run import Run
from xsp.schema import COLUMNS, ROOT, Kind, Level
from xsp.version import __version__

SERVICE = "xsp"
"""Default name of the program; its levels are the services `xsp.model`, `xsp.layer`, …"""

PREFIX = "xsp.attributes."
"""Prefix of the keys of the column `attributes` that have no namespace of their own."""

RUN = "xsp.run"
"""Attribute of a run's span: the content of its `run.json`, as text."""

LOOP = "xsp.loop"
"""Attribute of a loop's span: rows of the table `loop`, as JSON text; see `xsp.store.loop.spans`."""

RUN_ID = "xsp.run.id"
RUN_NAME = "xsp.run.name"
RANK = "xsp.rank"
LOCAL_RANK = "xsp.local_rank"
WORLD_SIZE = "xsp.world_size"
PROCESS = "process.pid"

RESOURCE_COLUMNS = frozenset({PROCESS, RANK})
"""Attributes of columns that are set on the resource, because they are the same for all spans of a process."""

RESOURCE: Mapping[str, str] = {
    "service.name": "`xsp.model`, `xsp.layer`, … : a service for each level; `--service` names another one than xsp",
    "service.version": "version of xsp that recorded the run",
    "service.instance.id": "id of the run",
    "telemetry.sdk.name": "xsp",
    "telemetry.sdk.language": "python",
    "telemetry.sdk.version": "version of xsp that recorded the run",
    "host.id": "pseudonym of the host, the same for all that runs on it",
    "host.name": "the same pseudonym",
    "host.cpu.model.name": "model of the processor",
    "process.runtime.version": "version of Python",
    PROCESS: "id of the process that was profiled",
    RUN_ID: "id of the run, 16 hexadecimal digits",
    RUN_NAME: "what the run is called",
    RANK: "number of the process in a distributed job; 0 where it is alone",
    LOCAL_RANK: "its number on its host",
    WORLD_SIZE: "processes of the job",
    "hw.type": "`gpu`; on device work only",
    "hw.name": "models of the devices; on device work only",
}
"""Meanings of the attributes of a resource, in the order of `resource`."""

EXTRA_ATTRIBUTES: Mapping[str, str] = {
    RUN: "on the span of a run: the content of its `run.json`, as text",
    LOOP: "on a span of kind `loop`: how long steps took that ran then, recorded or not; rows of the table `loop`",
    "error.type": "class of the exception with which the span ended",
    "code.function.name": "on module calls: the function that ran",
    PREFIX + ROOT: "on module calls, if the program calls several models: which of them, but for the first",
    "gen_ai.*": "on forward passes and requests of a language model: operation, model, tokens",
    "xsp.serving.*": "on requests and steps of engines, see `requests`",
    "xsp.collective.*": "on collectives: communicator, sequence number, name, and the id that all ranks share",
    "xsp.sample": "on a request's model span: the share of requests that is sampled",
    "xsp.left_out": "on a request's model span: why its layers and kernels are not there",
    PREFIX + "*": "keys of the column `attributes` that have no dot in them",
    "xsp.fold.count": "on a folded span: the number of spans that it represents; 0 on the root of a detail trace",
    "xsp.fold.sum_ns": "sum of their durations; `min_ns`, `median_ns` and `max_ns` likewise",
    "xsp.fold.errors": "how many of them failed, if any",
    "xsp.fold.details": "detail traces that hold them",
    "xsp.details.of": "on the root of a detail trace: id of the trace that it belongs to",
    "xsp.details.spans": "on the root of a detail trace: spans that it holds",
    "xsp.trace_id": "on a span in a detail trace: id of its original trace",
    "xsp.parent_id": "on a span in a detail trace: id of its original parent, empty for none",
}
"""Meanings of the attributes that belong to no column."""

COLUMN_OF: Mapping[str, str] = {c.attribute: c.name for c in COLUMNS if c.attribute is not None}
"""Name of the column by its attribute."""


def level_name(level: int) -> str:
    """Return the name of a level in attributes and services: `layer`; for a third party's level, its number."""
    return Level(level).name.lower() if level in Level._value2member_map_ else str(level)


def level_of(name: str) -> int:
    """Return the level of a name from `level_name`.

    Raises:
        ValueError: it is not the name of a level.
    """
    if name.upper() in Level.__members__:
        return int(Level[name.upper()])
    return int(name)


def resource(
    run: Run, level: int, rank: int = 0, process: int | None = None, service: str = SERVICE
) -> dict[str, str | int]:
    """Return the attributes of the resource of one level's spans in one process.

    Each level is a service of its own, because viewers have colours and filters for services. The host is a pseudonym,
    the same on all resources of a host, because Jaeger assumes that clocks of different hosts differ.

    Args:
        run: the run, possibly of several ranks; fields that it lacks are left out.
        level: level of the spans.
        rank: rank of the process in its job.
        process: id of the process, if known.
        service: name of the program.
    """
    rank_run = next((part for part in run.ranks if part.rank == rank), run)
    attributes: dict[str, Any] = {
        "service.name": f"{service}.{level_name(level)}",
        "service.version": rank_run.xsp,
        "service.instance.id": rank_run.id,
        "telemetry.sdk.name": "xsp",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": rank_run.xsp or __version__,
        "host.id": rank_run.host,
        "host.name": rank_run.host,
        "host.cpu.model.name": rank_run.machine.cpu,
        "process.runtime.version": rank_run.machine.python,
        PROCESS: process if process is not None else rank_run.process,
        RUN_ID: rank_run.id,
        RUN_NAME: rank_run.name or None,
        RANK: rank,
        LOCAL_RANK: rank_run.local_rank,
        WORLD_SIZE: rank_run.world_size,
    }
    if level >= Level.KERNEL and rank_run.machine.devices:
        attributes |= {"hw.type": "gpu", "hw.name": ", ".join(sorted(set(rank_run.machine.devices)))}
    return {name: value for name, value in attributes.items() if value is not None}


def flat(attributes: str | None) -> dict[str, Any]:
    """Return the JSON of the column `attributes` as single attributes; values keep their JSON types."""
    if attributes is None:
        return {}
    fields = json.loads(attributes)
    return {key if "." in key else PREFIX + key: value for key, value in fields.items()}


def nested(attributes: Mapping[str, Any]) -> str | None:
    """Return single attributes as the JSON of the column `attributes`; None if there are none."""
    return json.dumps({key.removeprefix(PREFIX): value for key, value in attributes.items()}) if attributes else None


def run_span_name(run: Run) -> str:
    """Return the name of a run's own span."""
    rank = f" rank {run.rank or 0}" if (run.world_size or 1) > 1 else ""
    return f"{Kind.RUN} {run.name}{rank}"
