"""What a source says of the run that its spans are of. It is a claim: only what has the expected type is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from xsp.importers.contract import Losses

_ID = re.compile(r"[0-9a-f]{1,32}")
INT64 = 1 << 63


def run_of(text: str, losses: Losses) -> dict[str, Any] | None:
    """Return the content of a `run.json` that came as text; fields of other types than ours are left out.

    Args:
        text: JSON.
        losses: where what was left out is counted.

    Returns:
        With an `id` in any case; None if it is no description of a run.
    """
    try:
        claimed = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        claimed = None
    if not isinstance(claimed, dict) or not _is_id(claimed.get("id")):
        losses.changed["description of a run that is none"] += 1
        return None
    wrong = misfits(claimed)
    for name in wrong:
        losses.changed[f"field {name} of a run left out: it has another type than xsp's"] += 1
    return {name: value for name, value in claimed.items() if name not in _ELSEWHERE and name not in wrong}


def device(name: str, sms: Any, memory_bytes: Any, major: Any, minor: Any, warp_size: Any) -> dict[str, Any]:
    """Return the properties of a device as a `run.json` has them; what a source does not say is None."""
    return {
        "name": name,
        "sms": sms,
        "memory_bytes": memory_bytes,
        "compute": None if major is None or minor is None else f"{major}.{minor}",
        "warp_size": warp_size,
    }


def misfits(claimed: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's fields that have other types than ours, as the readers of a run rely on them."""
    return [name for name, fits in _EXPECTED.items() if name in claimed and not fits(claimed[name])]


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that a column holds, and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < INT64


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < INT64


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _each(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _values(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _fields(expected: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(fits(value.get(name)) for name, fits in expected.items())


_COUNTED = _fields({"kernel": _is_text, "metric": _is_text, "kernels": lambda value: is_count(value) and value > 0,
                    "sum": _is_number, "least": _is_number, "most": _is_number})  # fmt: skip
"""What `xsp.importers.kineto_counters` says of kernels whose counters belong to no span."""

_BY_RUNG = ("taken", "cost_ns", "left_out")


def _is_of_budget(field: tuple[str, Any]) -> bool:
    """Return whether a field of `budget` is what it is: numbers by rung, a flag, or a number; or unknown."""
    name, value = field
    if value is None:
        return not name.endswith("_ns") or name == "bare_step_ns"
    if name in _BY_RUNG:
        return isinstance(value, dict) and all(each is None or _is_number(each) for each in value.values())
    return _is_flag(value) if name == "kept" else _is_number(value)


_EXPECTED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("xsp", "name", "created", "host", "levels", "kind"), _is_text),
    **dict.fromkeys(("finished", "settle"), _is_flag),
    **dict.fromkeys(("seconds",), _is_number),
    **dict.fromkeys(("start_ns", "end_ns", "rank", "local_rank", "world_size", "process", "warmup"), is_count),
    "seed": _or_null(_is_number),
    "batch_size": _or_null(is_count),
    "otel": _fields({"trace_id": _is_id, "span_id": _is_id, "parent_id": _or_null(_is_id)}),
    **dict.fromkeys(("command", "rungs", "collectors"), _each(_is_text)),
    "steps": lambda value: _values(is_count)(value) and {"seen", "stored"} <= value.keys(),
    "budget": _or_null(lambda value: isinstance(value, dict) and all(map(_is_of_budget, value.items()))),
    "kinds": _each(_fields({"kind": is_count, "name": _is_text, "batch_source": _or_null(_is_text)})),
    "delivery": _each(_fields({"endpoint": _is_text, "messages": _or_null(_each(_is_text))})),
    "empty": _or_null(_is_text),
    "absent": _values(_is_text),
    "costs": _values(_fields({"ns_per_span": _is_number, "ns_passing": _or_null(_is_number), "level": is_count})),
    "notes": _each(_fields({"source": _is_text, "text": _is_text})),
    "counters": lambda value: isinstance(value, dict) and _each(_COUNTED)(value.get("apart") or []),
    "machine": _fields({"devices": _or_null(_each(_is_text))}),
    "samples": _or_null(
        _fields({"absent": _or_null(_values(_is_text)), "readings": _or_null(is_count), "missed": _or_null(is_count)})
    ),
    "clock": lambda value: isinstance(value, dict),
}
"""What the readers of a run rely on. A field that is not named here is taken as it is, and relied on by none."""

_ELSEWHERE = frozenset({"format", "parts", "ranks", "imported", "received", "delivery"})
"""Fields that say how a run lies on the disk, which whoever writes it says himself."""
