"""A sweep over batch sizes as a table, with the optimal size by each reading of the rule."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from xsp.analyses import A1, optimal_batch
from xsp.scrub import plain
from xsp.store.trace import Trace


def sweep(traces: Sequence[Trace], target_ms: float | None = None) -> RenderableType:
    """Return A1 over the runs of a sweep, and the optimal batch size.

    Args:
        traces: one per batch size.
        target_ms: the longest acceptable latency, if there is one.
    """
    title = Text(f"{A1.title} (A1): {plain(traces[0].name)}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("batch", "latency ms", "95 % interval", "p90 ms", "p99 ms", "samples/s", "gain", "steps"):
        table.add_column(column, justify="right")
    asked = "batch_size, latency_ms, low_ms, high_ms, p90_ms, p99_ms, samples_per_s, steps"
    rows = sorted(row for trace in traces for row in A1(trace).select(asked).fetchall())
    before: float | None = None
    for batch, latency, low, high, p90, p99, rate, steps in rows:
        ends = f"{low:.2f} … {high:.2f}" if low is not None else "–"
        gain = f"{100 * (rate / before - 1):+.1f} %" if before else "–"
        table.add_row(str(batch), f"{latency:.2f}", ends, f"{p90:.2f}", f"{p99:.2f}", f"{rate:.1f}", gain, str(steps))
        before = rate
    best = optimal_batch([row[0] for row in rows], [row[1] for row in rows], target_ms)
    measured = best.first_plateau < rows[-1][0]
    why = "the first whose doubling gains at most 5 %" if measured else "the largest here: try larger ones"
    lines = [f"optimal batch size: {best.first_plateau} ({why}), {best.max_throughput} (the highest throughput)"]
    if target_ms is not None:
        found = "no size meets it" if best.within_target is None else f"batch size {best.within_target}"
        lines.append(f"latency target {target_ms:g} ms: {found}")
    return Group(table, *lines)
