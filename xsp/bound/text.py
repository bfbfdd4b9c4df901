"""A bound as text that fits a terminal of 80 columns, and as plain values."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xsp.bound.ladder import NAMES, Bound, Rung
from xsp.bound.timed import NOT_TIMED, can_time_here
from xsp.bound.totals import Coverage, Total
from xsp.device import devices
from xsp.graph import text as graphtext
from xsp.graph.node import KnownBy
from xsp.scrub import plain
from xsp.texts import at_least, cut, ns_text

WIDTH = 22
"""Number of characters of the longest bar."""

MOST_LAYERS = 5
MOST_HOLES = 4
MOST_PROBLEMS = 4


def page(bound: Bound, source: str, partial: bool = False, step: str = "") -> str:
    """Return ladder, differences, coverage, layers, and the next command.

    Args:
        bound: any bound.
        source: the source as the user named it, for the next command.
        partial: whether totals with too little coverage were requested.
        step: options of the step as the user typed them, `--train --batch 8`.
    """
    lines = [
        *_title(bound), "", *_ladder(bound), *_differences(bound), *_parallel(bound), *_coverage(bound),
        *_layers(bound), *_holes(bound), *_problems(bound), "", f"next: {_next(bound, source, partial, step)}",
    ]  # fmt: skip
    return "\n".join(lines)


def _title(bound: Bound) -> list[str]:
    graph, settings = bound.graph, bound.settings
    conditions = [f"{sum(bound.is_computing):,} computing calls"]
    for name, text in (("batch", "batch {}"), ("dtype", "{}")):
        if graph.settings.get(name):
            conditions.append(text.format(graph.settings[name]))
    if graphtext.phase(graph):
        conditions.append(graphtext.phase(graph))
    elif graph.settings.get("train") is not None:
        conditions.append("training step" if graph.settings["train"] else "inference")
    if settings.get("threads") and not settings.get("device"):
        conditions.append(f"{settings['threads']} threads")
    if settings.get("state"):
        conditions.append(f"caches {settings['state']}")
    lines = [plain(graph.name), ", ".join(conditions)]
    roof = settings.get("ceilings")
    if roof is not None:
        lines.append(plain(f"ceilings of {roof['name']}"))
    lines += [plain(f"timings of {settings['machine']}")] if settings.get("device") else []
    lines += textwrap.wrap(plain(settings.get("processor_note", "") or bound.limit_text), 79)
    return [*lines, bound.scope_note]


def _ladder(bound: Bound) -> list[str]:
    totals = {rung: bound.rungs[rung.value] for rung in Rung}
    ladder = bound.ladder
    longest = max((total.high or 0.0 for total in totals.values()), default=0.0) or 1.0
    lines = []
    for rung in Rung:
        total = totals[rung]
        if rung in ladder:
            figure = at_least(ns_text(total.sequential), total.is_lower_limit)
            lines.append(f"{NAMES[rung]:14} {figure:>10} {_interval(total):>17} {_bar(total, longest)}")
        elif rung in _explained_rungs(bound):
            head = f"{NAMES[rung]:15} {'–':>9}  "
            reason = plain(bound.absent.get(rung.value, ""))
            lines += textwrap.wrap(reason, 79, initial_indent=head, subsequent_indent=" " * len(head)) or [
                head.rstrip()
            ]
    return lines


def _explained_rungs(bound: Bound) -> list[Rung]:
    """Return the rungs that are shown with a reason if they are missing."""
    timed = [] if _is_foreign(bound) else [Rung.BEST, Rung.AS_RUN]
    requested = [Rung.BLOCKS] if bound.settings.get("granularity") else []
    whole = [Rung.REPLAYED, Rung.ISSUED] if bound.settings.get("device") else []
    return [Rung.CEILING, *timed, *requested, *whole, Rung.MEASURED]


def _is_foreign(bound: Bound) -> bool:
    """Return whether the bound is for another device than that of the timings."""
    return "environment" not in bound.settings


def _interval(total: Total) -> str:
    if not total.half_ns or total.low is None:
        return ""
    return f"{ns_text(total.low)} … {ns_text(total.high)}"


def _bar(total: Total, most: float) -> str:
    """Return a bar, with a thin line over the interval at its end."""
    assert total.sequential is not None
    low, value, high = (round(WIDTH * (ns or 0.0) / most) for ns in (total.low, total.sequential, total.high))
    full = min(low, value) if total.half_ns else value
    return "█" * full + "─" * (high - full if total.half_ns else 0)


def _differences(bound: Bound) -> list[str]:
    if not bound.differences:
        return []
    top = bound.rungs[bound.ladder[-1].value].sequential or 1.0
    lines = []
    for difference in bound.differences:
        sign = "+" if difference.ns >= 0 else "−"
        name = difference.name if difference.calls is None else f"{difference.calls} {difference.name}"
        between = f"{NAMES[difference.below]} → {NAMES[difference.above]}"
        lines.append(
            f"{sign}{ns_text(abs(difference.ns)):>9} {100 * difference.ns / top:6.1f} %  {name[:30]:30} {between}"[:79]
        )
    return ["", f"differences, in percent of {NAMES[bound.ladder[-1]]}:", *lines]


def _parallel(bound: Bound) -> list[str]:
    rung = next((rung for rung in (Rung.BEST, Rung.CEILING) if bound.rungs[rung.value].parallel is not None), None)
    if rung is None:
        order = bound.graph.known_by is KnownBy.ORDER
        return ["", "in parallel: unknown, a trace has only the order of calls"] if order else []
    total = bound.rungs[rung.value]
    without_limit = at_least(ns_text(total.parallel), total.is_lower_limit)
    figures = f"{without_limit} without limit, at least {ns_text(total.machine)} here"
    return ["", f"{NAMES[rung]}, in parallel: {figures}, {ns_text(total.schedule)} scheduled"]


def _coverage(bound: Bound) -> list[str]:
    lines = [""]
    for rung, label in ((Rung.CEILING, "ceilings"), (Rung.AS_RUN, "timings")):
        coverage = bound.rungs[rung.value].coverage
        if coverage.nodes or (rung is Rung.AS_RUN and not _is_foreign(bound)):
            lines.append(f"{label:9} of {_share(coverage)}")
    if bound.join is not None:
        join = bound.join
        rules = ", ".join(f"{count} by {name}" for name, count in join.rules.items() if count)
        planned, unplanned = len(join.unmatched_nodes), len(join.unmatched_calls)
        lines.append(f"trace     {rules}; only in the graph {planned}, only in the trace {unplanned}")
    if bound.ratio is not None:
        faster = (
            f"at most {1 / bound.ratio:.2f} times as fast with these calls"
            if bound.ratio < 1
            else "the step is faster than its calls alone"
        )
        lines.append(f"best / measured {bound.ratio:.3f}: {faster}")
    if bound.below_ceiling:
        lines.append(
            f"{bound.below_ceiling} calls are below their ceiling: cached data, or a machine busy when measured"
        )
    floor = bound.settings.get("at_the_floor")
    if floor:
        lines.append(f"{floor} calls take no longer than an empty call")
    return lines


def _share(coverage: Coverage) -> str:
    time_ = "" if coverage.time is None else f", {100 * coverage.time:.1f} % of the expected time"
    return f"{coverage.nodes:,} of {coverage.of_nodes:,} calls{time_}"


def _layers(bound: Bound) -> list[str]:
    rungs = [rung for rung in (Rung.CEILING, Rung.BEST, Rung.AS_RUN, Rung.IN_PLACE) if _has_figures(bound, rung)]
    largest = [layer for layer in bound.layers if layer.differences][:MOST_LAYERS]
    if not largest:
        return []
    heads = "".join(f"{'trace' if rung is Rung.IN_PLACE else NAMES[rung]:>8}" for rung in rungs)
    lines = ["", f"{'layer':18} {'largest difference':28}{heads}"]
    for layer in largest:
        name, ns = layer.differences[0]
        cells = "".join(f"{ns_text(layer.ns.get(rung)):>8}" for rung in rungs)
        lines.append(f"{_short(plain(layer.name), 18):18} {ns_text(ns):>8} {name:19}{cells}")
    return lines


def _has_figures(bound: Bound, rung: Rung) -> bool:
    return any(bound.figures.get(rung.value) or ())


def _holes(bound: Bound) -> list[str]:
    if not bound.holes:
        return []
    timed = _has_figures(bound, Rung.AS_RUN)
    lines = ["", f"{'not timed' if timed else 'without a ceiling'}: {sum(hole.calls for hole in bound.holes):,} calls"]
    for hole in bound.holes[:MOST_HOLES]:
        estimate = "" if hole.expected_ns is None else f"  about {ns_text(hole.expected_ns)}"
        lines.append(cut(f"  {hole.calls:5} {plain(hole.op)}: {plain(hole.reason)}{estimate}", 79))
    remaining = len(bound.holes) - MOST_HOLES
    return [*lines, *([f"        {remaining} more operators"] if remaining > 0 else [])]


def _problems(bound: Bound) -> list[str]:
    shown = [cut(plain(problem), 158) for problem in bound.problems[:MOST_PROBLEMS]]
    remaining = len(bound.problems) - len(shown)
    return ["", *shown, *([f"{remaining} more in --format json"] if remaining > 0 else [])] if shown else []


def _next(bound: Bound, source: str, partial: bool, step: str) -> str:
    """Return the command that adds the most important missing part."""
    target = f"{shlex.quote(source)} {step}".rstrip()
    options = shlex.split(step)
    ceiling, timed = bound.rungs[Rung.CEILING.value], bound.rungs[Rung.AS_RUN.value]
    is_foreign = _is_foreign(bound)
    is_here = "--device" not in options or devices.is_id(options[options.index("--device") + 1])
    can_time = not is_foreign and is_here and can_time_here(bound.graph)
    if not ceiling.coverage.nodes:
        if is_foreign and "--device" not in options:
            return f"xsp bound {target} --device NAME"
        if not is_foreign:
            return f"xsp bound {target} --fill 60s" if can_time and not timed.coverage.nodes else "xsp doctor --measure"
    if is_foreign:
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
        return f"xsp profile {model}" if is_named else f"xsp bound {target} --run RUN"
    return f"xsp bound {target} --html bound.html"


def _profile_options(arguments: Sequence[str]) -> list[str]:
    """Return those of the typed options that `xsp profile` takes too."""
    options = ["--train"] if "--train" in arguments else []
    for name in ("--batch", "--input", "--sequence", "--prefill", "--decode"):
        if name in arguments:
            options += arguments[arguments.index(name) : arguments.index(name) + 2]
    return options


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


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
