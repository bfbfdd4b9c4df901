"""How long the calls of a graph take together, from the time of each: in sequence, in parallel, and as a schedule.

| figure | is |
|---|---|
| sequential | the sum |
| parallel | the longest path over edges of data: unlimited processors; what reuses memory could be renamed |
| machine | the longer of that path and of the work divided by the cores (Brent 1974): no schedule on them is shorter |
| schedule | the end of a schedule that exists, with all edges kept |

With the same times, parallel ≤ machine ≤ schedule ≤ sequential. The first, second and last never rise when a node is
removed or becomes shorter. A list schedule may (Graham 1966), which is why it is no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from xsp.graph import paths

Times = Mapping[int, float]
"""Threads → time that a node takes with them."""


@dataclass(frozen=True)
class Placed:
    """When and where a node runs in a schedule."""

    node: int
    start: float
    end: float
    threads: int
    core: int | None
    """Number of the first of its cores; None if it takes no time."""


@dataclass(frozen=True)
class Together:
    """What the nodes of a graph take together, in the unit of their times."""

    sequential: float
    parallel: float
    path: tuple[int, ...]
    """Nodes on the longest path over data, by their number."""

    machine: float
    schedule: float
    placed: tuple[Placed, ...]


def together(
    data: Sequence[Sequence[int]], every: Sequence[Sequence[int]], times: Sequence[Times], cores: int
) -> Together:
    """Return what nodes take together; each is as fast as it can be with the threads that it may have.

    Args:
        data: for each node those before it by data, all with smaller numbers.
        every: the same by any edge.
        times: of each node, by threads; at least one of at most `cores` threads; not negative.
        cores: of the machine.
    """
    fitting = [{threads: each for threads, each in those.items() if threads <= cores} for those in times]
    best = [min(those.values()) for those in fitting]
    parallel, path = paths.longest(data, best)
    work = sum(min(threads * each for threads, each in those.items()) for those in fitting)
    placed = min((list_schedule(every, each, cores) for each in (fitting, _economical(fitting))), key=_end)
    return Together(
        sequential=sum(best),
        parallel=parallel,
        path=tuple(path),
        machine=max(parallel, work / cores),
        schedule=_end(placed),
        placed=tuple(placed),
    )


def _economical(times: Sequence[Times]) -> list[Times]:
    """Leave each node the number of threads with which it keeps cores busy for the shortest time in all."""
    least = [min(those, key=lambda threads: (threads * those[threads], threads)) for those in times]
    return [{threads: those[threads]} for threads, those in zip(least, times, strict=True)]


def _end(placed: Sequence[Placed]) -> float:
    return max((each.end for each in placed), default=0)


def list_schedule(every: Sequence[Sequence[int]], times: Sequence[Times], cores: int) -> list[Placed]:
    """Return a schedule: of the nodes that are ready, the one with the longest path behind it goes first.

    It takes the number of threads with which it ends first, given which cores are free when. As it never ends later
    than all before it and then itself, the whole never takes longer than the sequence.
    """
    after: list[list[int]] = [[] for _ in every]
    for node, those in enumerate(every):
        for before in set(those):
            after[before].append(node)
    rank = _ranks(after, times)
    missing = [len(set(those)) for those in every]
    ready_at = [0.0] * len(every)
    waiting: list[tuple[float, int]] = []
    ready: list[tuple[float, int]] = []
    for node, count in enumerate(missing):
        if not count:
            heappush(waiting, (0.0, node))
    free = [(0.0, core) for core in range(cores)]
    placed = []
    while waiting or ready:
        now = free[0][0] if ready else max(free[0][0], waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, node = heappop(waiting)
            heappush(ready, (-rank[node], node))
        _, node = heappop(ready)
        found = _place(node, times[node], ready_at[node], free)
        placed.append(found)
        for each in after[node]:
            ready_at[each] = max(ready_at[each], found.end)
            missing[each] -= 1
            if not missing[each]:
                heappush(waiting, (ready_at[each], each))
    return placed


def _ranks(after: Sequence[Sequence[int]], times: Sequence[Times]) -> list[float]:
    """Return for each node the longest path from its beginning to an end."""
    rank = [0.0] * len(after)
    for node in range(len(after) - 1, -1, -1):
        rank[node] = min(times[node].values()) + max((rank[each] for each in after[node]), default=0.0)
    return rank


def _place(node: int, times: Times, ready: float, free: list[tuple[float, int]]) -> Placed:
    """Put a node where it ends first, and change when the cores are free; the list stays in order."""
    if not any(times.values()):
        return Placed(node, ready, ready, 0, None)
    end, threads, start = min(
        ((begin := max(ready, free[threads - 1][0])) + took, threads, begin) for threads, took in times.items()
    )
    core = free[0][1]
    free[:threads] = [(end, each) for _, each in free[:threads]]
    free.sort()
    return Placed(node, start, end, threads, core)


def queued(host: Sequence[float], device: Sequence[float]) -> float:
    """Return when the last kernel ends if calls are launched one after the other on one stream (eager execution).

    Args:
        host: time of each call on the host, which launches its work as it ends.
        device: time of its work on the device.
    """
    launched = ended = 0.0
    for call, work in zip(host, device, strict=True):
        launched += call
        ended = max(ended, launched) + work
    return max(ended, launched)
