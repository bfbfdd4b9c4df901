"""A bound as text with the next command, and as plain values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from xsp import terminal
from xsp.bound import targets
from xsp.bound.ladder import Bound, Rung
from xsp.bound.section import is_foreign, section
from xsp.bound.timed import NOT_TIMED, can_time_here
from xsp.bound.totals import Coverage, Total


def page(bound: Bound, source: str, partial: bool = False, step: str = "") -> str:
    """Return ladder, differences, coverage, layers, and the next command.

    Args:
        bound: any bound.
        source: the source as the user named it, for the next command.
        partial: whether totals with too little coverage were requested.
        step: options of the step as the user typed them, `--train --batch 8`.
    """
    return terminal.page(section(bound, details=False), _next(bound, source, partial, step))


def _next(bound: Bound, source: str, partial: bool, step: str) -> str:
    """Return the command that adds the most important missing part."""
    target = f"{shlex.quote(source)} {step}".rstrip()
    options = shlex.split(step)
    ceiling, timed = bound.rungs[Rung.CEILING.value], bound.rungs[Rung.AS_RUN.value]
    foreign = is_foreign(bound)
    is_here = targets.product_of(options) is None
    can_time = not foreign and is_here and can_time_here(bound.graph)
    if not ceiling.coverage.nodes:
        if foreign and "--device" not in options:
            return f"xsp bound {target} --device NAME"
        if not foreign:
            return f"xsp bound {target} --fill 60s" if can_time and not timed.coverage.nodes else "xsp doctor --measure"
    if foreign:
        if ceiling.coverage.nodes and ceiling.sequential is None and not partial:
            return f"xsp bound {target} --partial"
        if Rung.IN_PLACE.value not in bound.figures:
            return f"xsp bound {target} --html bound.html"
        run = options[options.index("--run") + 1] if "--run" in options else source
        return f"xsp analyze {shlex.quote(run)} A9 A15"
    is_tried = timed.coverage.nodes > 0 and not any(hole.reason == NOT_TIMED for hole in bound.holes)
    if can_time and not is_tried and (timed.sequential is None or timed.is_lower_limit):
        return f"xsp bound {target} --fill 60s"
    if can_time and timed.sequential is None and not partial:
        return f"xsp bound {target} --partial"
    if Rung.IN_PLACE.value not in bound.figures:
        is_named = re.match(r"(torchvision|timm|transformers|micro):", source)
        model = shlex.join([source, *_profile_options(options)])
        return f"xsp profile {model}" if is_named and is_here else f"xsp bound {target} --run RUN"
    return f"xsp bound {target} --html bound.html"


def _profile_options(arguments: Sequence[str]) -> list[str]:
    """Return those of the typed options that `xsp profile` takes too."""
    options = ["--train"] if "--train" in arguments else []
    for name in ("--batch", "--input", "--sequence", "--prefill", "--decode", "--device"):
        if name in arguments:
            options += arguments[arguments.index(name) : arguments.index(name) + 2]
    return options


def as_json(bound: Bound) -> dict[str, Any]:
    """Return a bound as plain values, the output of `xsp bound --format json`."""
    return {
        "name": bound.graph.name,
        "source": bound.graph.source.value,
        "edges_known_by": bound.graph.known_by.value,
        "nodes": len(bound.graph.nodes),
        "computing": sum(bound.is_computing),
        "coverage": _coverage_json(bound.coverage),
        "ratio": bound.ratio,
        "scope": bound.scope,
        "limit": bound.limit_text or None,
        "rungs": {rung.value: _total_json(bound.rungs[rung.value], bound.absent.get(rung.value)) for rung in Rung},
        "differences": [
            {
                "name": delta.name, "below": delta.below.value, "above": delta.above.value, "ns": delta.ns,
                "half_ns": delta.half_ns, "calls": delta.calls,
            }
            for delta in bound.differences
        ],
        "layers": [
            {
                "name": layer.name,
                "calls": len(layer.nodes),
                "ns": {rung.value: ns for rung, ns in layer.ns.items()},
                "differences": dict(layer.differences),
            }
            for layer in bound.layers
        ],
        "holes": [
            {"op": hole.op, "reason": hole.reason, "calls": hole.calls, "expected_ns": hole.expected_ns}
            for hole in bound.holes
        ],
        "join": None if bound.join is None else {
            "pairs": bound.join.rules,
            "planned_not_seen": [_call(bound, index) for index in bound.join.unmatched_nodes],
            "seen_not_planned": [
                {"op": call.op, "module": call.module, "ns": call.ns}
                for call in (bound.join.calls[index] for index in bound.join.unmatched_calls)
            ],
        },
        "beats_ceiling": bound.below_ceiling,
        "settings": dict(bound.settings),
        "graph_settings": dict(bound.graph.settings),
        "problems": list(bound.problems),
    }  # fmt: skip


def _call(bound: Bound, index: int) -> Mapping[str, Any]:
    node = bound.graph.nodes[index]
    return {"node": index, "op": node.call.op, "module": node.module, "phase": node.phase.value}


def _coverage_json(coverage: Coverage) -> dict[str, Any]:
    return {"calls": coverage.nodes, "of_calls": coverage.of_nodes, "time_share": coverage.time}


def _total_json(total: Total, absent: str | None) -> dict[str, Any]:
    return {
        "sequential_ns": total.sequential,
        "low_ns": total.low,
        "high_ns": total.high,
        "parallel_ns": total.parallel,
        "parallel_half_ns": total.parallel_half_ns,
        "machine_ns": total.machine,
        "schedule_ns": total.schedule,
        "at_least": total.is_lower_limit if total.sequential is not None else None,
        "path": list(total.path),
        "coverage": _coverage_json(total.coverage),
        "absent": absent if total.sequential is None else None,
    }
