"""Rewriting that preserves the function of a graph: rules remove work that a step does not need.

| rule | what it removes |
|---|---|
| `dead` | calls whose results are not read |
| `equal` | calls that recompute an existing result |
| `cast` | casts to another type and back, and float64 computation between two casts |
| `copy` | copies that are not written to, and copies of copies |
| `loop` | equal calls on the samples of a batch, one by one |
| `norm` | batch norm in evaluation, which can be folded into the preceding convolution |
| `attention` | hand-written attention, which is one call of `scaled_dot_product_attention` |
| `joined` | linear layers on one input, which are one layer with joined weights |

A rule reports what it removes, what replaces it, and whether results change by more than rounding. The rewritten graph
is only counted and timed: the program does not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xsp.errors import GraphError
from xsp.graph import attention, merging, rules
from xsp.graph.draft import Draft, PreparedTensor
from xsp.graph.measures import measures
from xsp.graph.node import Graph, Origin
from xsp.graph.rules import RuleMatch
from xsp.graph.section import total_text
from xsp.graph.work import Total
from xsp.sections import Part, Section, Table, Text

RULES: Mapping[str, Callable[[Draft], Iterator[RuleMatch]]] = {
    "dead": rules.dead,
    "equal": rules.equal,
    "cast": rules.casts,
    "copy": rules.copies,
    "loop": merging.loops,
    "norm": rules.norms,
    "attention": attention.attention,
    "joined": merging.linears,
}
"""Rules in the order in which they are applied: removals by one enable the next."""


@dataclass(frozen=True)
class RuleChange:
    """A change by a rule at one place."""

    rule: str
    removed: tuple[int, ...]
    """Places of the removed calls in the original graph."""

    kept: tuple[int, ...]
    """Places in the original graph of the calls whose results replace those of the removed calls."""

    added: tuple[int, ...]
    """Places of the added calls in the rewritten graph."""

    modules: tuple[str, ...]
    """Modules of the removed calls, in order; calls without a module are left out."""

    description: str
    """Description in one sentence."""

    changes_numbers: str | None = None
    """How results change; None if they stay within rounding."""


@dataclass(frozen=True)
class RewrittenGraph:
    """A graph after rewriting, with the changes."""

    original: Graph
    graph: Graph
    changes: tuple[RuleChange, ...]
    prepared: tuple[tuple[int, PreparedTensor], ...] = ()
    """Number and recipe of each outside tensor of the rewritten graph that is made once from others."""

    outside: tuple[Origin, ...] = ()
    """Name in the original graph of each outside tensor of the rewritten one; for a prepared one its index."""

    def removed_calls(self, change: RuleChange) -> Iterator[int]:
        """Yield the places of the removed calls that do work."""
        return (index for index in change.removed if self.original.nodes[index].computes)

    def added_calls(self, change: RuleChange) -> Iterator[int]:
        """Yield the places of the added calls that do work."""
        return (index for index in change.added if self.graph.nodes[index].computes)


def of(graph: Graph, only: Iterable[str] = RULES) -> RewrittenGraph:
    """Return a graph without the work that the rules remove.

    Args:
        graph: a graph that was captured from a model or is of a program: it has to record which call made each tensor.
        only: names of the rules to apply; default: all.

    Raises:
        GraphError: the graph does not record that, or there is no such rule.
    """
    selected = list(only)
    unknown = [name for name in selected if name not in RULES]
    if unknown:
        raise GraphError(f"there is no rule {unknown[0]!r}; there are {', '.join(RULES)}")
    draft = Draft(graph)
    findings = [finding for name, rule in RULES.items() if name in selected for finding in rule(draft)]
    rewritten, places = draft.finish()
    names = draft.outside_names()
    changes = [_change(draft, finding, places) for finding in findings]
    return RewrittenGraph(
        graph,
        rewritten,
        tuple(change for change in changes if change.removed),
        tuple((number, draft.prepared[origin[1]]) for number, origin in enumerate(names) if origin[0] < -1),
        tuple(names),
    )


def _change(draft: Draft, finding: RuleMatch, places: Mapping[int, int]) -> RuleChange:
    original = len(draft.graph.nodes)
    removed = tuple(sorted(number for number in finding.removed if number < original))
    return RuleChange(
        finding.rule,
        removed,
        tuple(sorted(number for number in finding.kept if number < original)),
        tuple(sorted(places[number] for number in finding.added if number in places)),
        _modules(draft.graph, removed),
        finding.description,
        finding.changes_numbers,
    )


def _modules(graph: Graph, places: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(graph.nodes[index].module for index in places if graph.nodes[index].module))


# --- output -------------------------------------------------------------------------------------------------

MOST_LINES = 20

PAGE_MEASURES = ("nodes", "computing", "flops", "bytes", "longest_path", "peak_activation_bytes", "weight_bytes")


def section(rewritten: RewrittenGraph) -> Section:
    """Return the measures before and after, and the changes, as a document."""
    before, after = measures(rewritten.original), measures(rewritten.graph)
    rows = tuple((name, _cell(before, name), _cell(after, name)) for name in PAGE_MEASURES)
    parts: list[Part] = [Table(("measure", "before", "after"), rows)]
    groups: dict[tuple[str, str, str | None], list[RuleChange]] = defaultdict(list)
    for change in rewritten.changes:
        groups[change.rule, change.description, change.changes_numbers].append(change)
    for (rule, description, effect), similar in list(groups.items())[:MOST_LINES]:
        text = f"{rule}{f', {len(similar)} times' if len(similar) > 1 else ''}: {description}"
        modules = list(dict.fromkeys(module for change in similar for module in change.modules))
        text += f"; in {', '.join(modules[:6])}" if modules else ""
        text += f" and {len(modules) - 6} more" if len(modules) > 6 else ""
        parts.append(Text(text if effect is None else f"{text}; changes results: {effect}"))
    if not rewritten.changes:
        parts.append(Text("no removable calls were found"))
    if len(groups) > MOST_LINES:
        parts.append(Text(f"{len(groups) - MOST_LINES} more; --format json has all"))
    return Section(rewritten.original.name, tuple(parts))


def _cell(figures: Mapping[str, Any], name: str) -> str:
    return total_text(Total(figures[name], figures.get(f"{name}_unknown", 0)))


def as_json(rewritten: RewrittenGraph) -> dict[str, Any]:
    """Return the changes, and the measures before and after, as plain values."""
    return {
        "name": rewritten.original.name,
        "changes": [
            {"said" if name == "description" else name: value for name, value in asdict(change).items()}
            for change in rewritten.changes
        ],
        "before": measures(rewritten.original),
        "after": measures(rewritten.graph),
    }
