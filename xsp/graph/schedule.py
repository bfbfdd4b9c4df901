"""Total time of the calls of a graph from the time of each: in sequence, in parallel, and as a schedule.

| figure | is |
|---|---|
| sequential | the sum |
| parallel | the longest path over data edges: unlimited processors; reuse of memory can be avoided by renaming |
| machine | the longer of that path and the work divided by the cores (Brent 1974): no schedule on them is shorter |
| schedule | the end of an actual schedule, with all edges kept |

With the same times, parallel ≤ machine ≤ schedule ≤ sequential. The first, second and last never rise when a node is
removed or becomes shorter. A list schedule may (Graham 1966), which is why it is no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from xsp.graph import paths

Times = Mapping[int, float]
"""Number of threads → time of a node with that number."""


@dataclass(frozen=True)
class Slot:
    """The time and the cores at which a node runs in a schedule."""

    node: int
    start: float
    end: float
    threads: int
    core: int | None
    """Number of the node's first core; None if the node takes no time."""


@dataclass(frozen=True)
class Totals:
    """The total time of a graph's nodes, in the unit of their times."""

    sequential: float
    parallel: float
    path: tuple[int, ...]
    """Numbers of the nodes on the longest path over data edges."""

    machine: float
    schedule: float
    slots: tuple[Slot, ...]


def totals(
    data: Sequence[Sequence[int]], all_predecessors: Sequence[Sequence[int]], times: Sequence[Times], cores: int
) -> Totals:
    """Return the total times of nodes; each node is as fast as possible with the threads that it may have.

    Args:
        data: predecessors of each node by data edges, all with smaller numbers.
        all_predecessors: predecessors by any edge.
        times: times of each node, by threads; at least one for at most `cores` threads; not negative.
        cores: number of cores of the machine.
    """
    fitting = [{threads: time for threads, time in node_times.items() if threads <= cores} for node_times in times]
    best = [min(node_times.values()) for node_times in fitting]
    parallel, path = paths.longest(data, best)
    work = sum(min(threads * time for threads, time in node_times.items()) for node_times in fitting)
    slots = min(
        (list_schedule(all_predecessors, choice, cores) for choice in (fitting, _economical(fitting))), key=_end
    )
    return Totals(
        sequential=sum(best),
        parallel=parallel,
        path=tuple(path),
        machine=max(parallel, work / cores),
        schedule=_end(slots),
        slots=tuple(slots),
    )


def _economical(times: Sequence[Times]) -> list[Times]:
    """Reduce each node to the number of threads with which it takes the least core time in total."""
    cheapest = [min(node_times, key=lambda threads: (threads * node_times[threads], threads)) for node_times in times]
    return [{threads: node_times[threads]} for threads, node_times in zip(cheapest, times, strict=True)]


def _end(slots: Sequence[Slot]) -> float:
    return max((slot.end for slot in slots), default=0)


def list_schedule(all_predecessors: Sequence[Sequence[int]], times: Sequence[Times], cores: int) -> list[Slot]:
    """Return a schedule: of the ready nodes, the one with the longest path to the end goes first.

    A node gets the number of threads with which it ends first, given when the cores become free. Since it never ends
    later than it would after all nodes before it, the schedule never takes longer than the sequence.
    """
    successors: list[list[int]] = [[] for _ in all_predecessors]
    for node, predecessors in enumerate(all_predecessors):
        for predecessor in set(predecessors):
            successors[predecessor].append(node)
    rank = _ranks(successors, times)
    pending = [len(set(predecessors)) for predecessors in all_predecessors]
    ready_at = [0.0] * len(all_predecessors)
    waiting: list[tuple[float, int]] = []
    ready: list[tuple[float, int]] = []
    for node, count in enumerate(pending):
        if not count:
            heappush(waiting, (0.0, node))
    free = [(0.0, core) for core in range(cores)]
    slots = []
    while waiting or ready:
        now = free[0][0] if ready else max(free[0][0], waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, node = heappop(waiting)
            heappush(ready, (-rank[node], node))
        _, node = heappop(ready)
        slot = _place(node, times[node], ready_at[node], free)
        slots.append(slot)
        for successor in successors[node]:
            ready_at[successor] = max(ready_at[successor], slot.end)
            pending[successor] -= 1
            if not pending[successor]:
                heappush(waiting, (ready_at[successor], successor))
    return slots


def _ranks(successors: Sequence[Sequence[int]], times: Sequence[Times]) -> list[float]:
    """Return for each node the longest path from its start to an end."""
    rank = [0.0] * len(successors)
    for node in range(len(successors) - 1, -1, -1):
        rank[node] = min(times[node].values()) + max((rank[successor] for successor in successors[node]), default=0.0)
    return rank


def _place(node: int, times: Times, ready: float, free: list[tuple[float, int]]) -> Slot:
    """Place a node where it ends first, and update when the cores become free; the list stays sorted."""
    if not any(times.values()):
        return Slot(node, ready, ready, 0, None)
    end, threads, start = min(
        ((begin := max(ready, free[threads - 1][0])) + duration, threads, begin) for threads, duration in times.items()
    )
    core = free[0][1]
    free[:threads] = [(end, core) for _, core in free[:threads]]
    free.sort()
    return Slot(node, start, end, threads, core)
