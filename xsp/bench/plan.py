"""Which specs a graph consists of, in which order they are worth timing, and how a budget is spent on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from xsp.bench.environment import caches
from xsp.bench.spec import AS_RUN, CacheState, Spec, Timing
from xsp.bench.timings import Timings
from xsp.graph.blocks import LASTING, Block, block, windows
from xsp.graph.node import Graph

Progress = Callable[[str, int, int], None]
"""Called with what is timed, how many are done, and how many there are."""

PRIVATE_BYTES = 1 << 20
"""Of the caches that belong to one core, where the system does not tell."""


def specs(
    graph: Graph,
    *,
    granularity: int = 1,
    stride: int | None = None,
    state: CacheState | str = CacheState.CHAIN,
    threads: int | None = None,
    variants: Sequence[str] = (AS_RUN,),
    runtime: str = "torch",
) -> list[tuple[Spec, int]]:
    """Return what a graph consists of: different specs, in the order of first appearance, with how often each occurs.

    Args:
        graph: any; of one whose order alone is known each call stands for itself.
        granularity: computing calls of a block.
        stride: from one block to the next; as many as a block has unless told otherwise.
        state: of the caches. `chain` becomes `warm` where the weights of the whole graph stay in the caches of the
            cores, so that a step finds them there.
        threads: as many as the process may use unless told otherwise.
        variants: names, see `xsp.bench.variants`.
        runtime: of `xsp.runtimes`.

    Raises:
        GraphError: a granularity below 1.
    """
    from xsp.bench.environment import cores

    state = settled(graph, CacheState(state))
    threads = threads or cores()
    counts: dict[str, int] = {}
    first: dict[str, Block] = {}
    for start, stop in windows(graph, granularity, stride):
        found = block(graph, start, stop)
        first.setdefault(found.work_key, found)
        counts[found.work_key] = counts.get(found.work_key, 0) + 1
    return [
        (Spec(each, variant, state, threads, runtime), counts[key])
        for key, each in first.items()
        for variant in variants
    ]


def settled(graph: Graph, state: CacheState) -> CacheState:
    """Return the state that a graph's blocks are in: `chain` is `warm` for weights that the cores' caches hold."""
    if state is not CacheState.CHAIN:
        return state
    kept = {each.storage: each.bytes or 0 for each in graph.values if each.role in LASTING}
    unknown = not graph.values
    return state if unknown or sum(kept.values()) > private_bytes() else CacheState.WARM


def private_bytes() -> int:
    """Return the bytes of the largest cache below the last level."""
    found = caches()
    below = [size for level, size in found if level < max(level for level, _ in found)]
    return max(below, default=PRIVATE_BYTES)


def fill(
    wanted: Iterable[Spec],
    timings: Timings,
    seconds: float,
    progress: Progress = lambda what, done, total: None,
) -> list[Timing]:
    """Time specs that have no timing yet, most valuable first, for so many seconds; return what was timed."""
    raise NotImplementedError
