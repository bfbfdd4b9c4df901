"""Bounds and schedules of graphs whose nodes have times."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xsp.graph import paths
from xsp.graph.schedule import Times, Totals, list_schedule, totals

Drawn = tuple[list[list[int]], list[list[int]], list[Times], int]


@st.composite
def graphs(draw: st.DrawFn, fixed: bool = False) -> Drawn:
    """Draw edges of data, all edges, times by threads in whole numbers, and cores."""
    count = draw(st.integers(0, 9))
    cores = draw(st.integers(1, 4))
    data = [draw(st.lists(st.integers(0, node - 1), max_size=3, unique=True)) if node else [] for node in range(count)]
    more = [draw(st.lists(st.integers(0, node - 1), max_size=2)) if node else [] for node in range(count)]
    widths = st.lists(st.integers(1, cores), min_size=1, max_size=1 if fixed else 3, unique=True)
    times = [{width: draw(st.integers(0, 9)) for width in draw(widths)} for _ in range(count)]
    return data, [[*one, *other] for one, other in zip(data, more, strict=True)], times, cores


def without(removed: int, earlier: list[list[int]]) -> list[list[int]]:
    """Return the edges without a node; those behind it come after those before it, as they did."""
    found = []
    for node, those in enumerate(earlier):
        if node != removed:
            through = [*those, *(earlier[removed] if removed in those else [])]
            found.append(sorted({each - (each > removed) for each in through if each != removed}))
    return found


@given(graphs())
def test_each_figure_is_at_most_the_next_one(drawn: Drawn) -> None:
    found = totals(*drawn)
    assert found.parallel <= found.machine <= found.schedule <= found.sequential


@given(graphs())
def test_a_schedule_keeps_all_edges_and_gives_no_core_to_two(drawn: Drawn) -> None:
    _, every, times, cores = drawn
    placed = {each.node: each for each in list_schedule(every, times, cores)}
    assert sorted(placed) == list(range(len(times)))
    for node, those in enumerate(every):
        assert all(placed[before].end <= placed[node].start for before in those)
        assert placed[node].end - placed[node].start == times[node].get(placed[node].threads, 0)
    for moment in {each.start for each in placed.values()}:
        assert sum(each.threads for each in placed.values() if each.start <= moment < each.end) <= cores


@given(graphs(), st.data())
def test_without_a_node_no_bound_rises(drawn: Drawn, data: st.DataObject) -> None:
    links, every, times, cores = drawn
    if not times:
        return
    removed = data.draw(st.integers(0, len(times) - 1))
    fewer = totals(without(removed, links), without(removed, every), times[:removed] + times[removed + 1 :], cores)
    whole = totals(*drawn)
    assert fewer.sequential <= whole.sequential
    assert fewer.parallel <= whole.parallel
    assert fewer.machine <= whole.machine
    assert fewer.schedule <= whole.sequential


def test_a_list_schedule_may_take_longer_without_a_node() -> None:
    """An anomaly that Graham found in all such schedules, and why they are no bound; his limit to it holds."""
    edges: list[list[int]] = [[], [], [0, 1], [], [0]]
    times: list[Times] = [{1: 1.0}, {1: 3.0}, {1: 1.0}, {1: 4.0}, {1: 3.0}]
    whole = totals(edges, edges, times, 2)
    fewer = totals(without(2, edges), without(2, edges), times[:2] + times[3:], 2)
    assert (whole.schedule, fewer.schedule) == (6, 7)
    assert fewer.machine <= whole.machine
    assert fewer.schedule <= (2 - 1 / 2) * whole.schedule


@given(graphs(), st.randoms(use_true_random=False))
def test_other_numbers_for_the_nodes_change_no_bound(drawn: Drawn, random: object) -> None:
    data, every, times, cores = drawn
    order = _another_order(every, random)
    new = {node: place for place, node in enumerate(order)}

    def renamed(earlier: list[list[int]]) -> list[list[int]]:
        return [[new[each] for each in earlier[node]] for node in order]

    one, other = totals(*drawn), totals(renamed(data), renamed(every), [times[node] for node in order], cores)
    assert (one.sequential, one.parallel, one.machine) == (other.sequential, other.parallel, other.machine)


def _another_order(every: list[list[int]], random: object) -> list[int]:
    """Return the nodes in a random order in which each stands behind those before it."""
    left, order = set(range(len(every))), []
    while left:
        ready = sorted(node for node in left if not left & set(every[node]))
        order.append(random.choice(ready))  # type: ignore[attr-defined]
        left.remove(order[-1])
    return order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
@example([3, 4], 2)
def test_a_chain_takes_the_same_in_parallel(took: list[int], cores: int) -> None:
    edges = [[node - 1] if node else [] for node in range(len(took))]
    found = totals(edges, edges, [{1: each} for each in took], cores)
    assert found.sequential == found.parallel == found.machine == found.schedule == sum(took)


def test_independent_nodes_fill_the_cores() -> None:
    edges: list[list[int]] = [[], [], [], []]
    found = totals(edges, edges, [{1: 4.0, 2: 3.0}] * 4, 2)
    assert found == Totals(12, 3, (0,), 8, 8, found.slots)
    assert {each.threads for each in found.slots} == {1}


def test_a_node_waits_for_the_second_core_if_it_ends_earlier_so() -> None:
    edges: list[list[int]] = [[], []]
    found = list_schedule(edges, [{1: 2.0}, {1: 9.0, 2: 5.0}], 2)
    assert [(each.node, each.start, each.end) for each in found] == [(1, 0, 5), (0, 5, 7)]


def test_what_reuses_memory_delays_the_schedule_and_not_the_path() -> None:
    found = totals([[], []], [[], [0]], [{1: 3.0}, {1: 2.0}], 2)
    assert (found.parallel, found.schedule) == (3, 5)


def test_nothing_takes_no_time() -> None:
    assert totals([], [], [], 2) == Totals(0, 0, (), 0, 0, ())


def test_the_heaviest_branch_of_the_published_inception_module_is_its_path() -> None:
    """Benanza, V100 at batch 1, in µs; the branches begin at one pooling."""
    branches = [
        [30.511, 8.046], [30.719, 8.045, 47.652, 8.122], [30.231, 7.963, 41.912, 8.017], [10.102, 30.465, 8.017]
    ]  # fmt: skip
    edges: list[list[int]] = []
    times: list[Times] = []
    for branch in branches:
        for place, took in enumerate(branch):
            edges.append([len(edges) - 1] if place else [])
            times.append({1: took})
    found = totals(edges, edges, times, 2)
    assert found.parallel == pytest.approx(94.538, abs=1e-9)
    assert found.path == (2, 3, 4, 5)
    assert found.sequential == pytest.approx(sum(map(sum, branches)))
    assert paths.longest(edges, [each[1] for each in times])[0] == pytest.approx(found.parallel)
