"""The cheapest labels, compared with all labellings of small graphs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp.questions.mincut import Cost, SharedValue, price, two_labels

COST = st.integers(0, 40)
MAYBE = st.one_of(COST, COST, COST, st.none())


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[Cost, Cost]], list[SharedValue]]:
    count = draw(st.integers(1, 8))
    costs: list[tuple[Cost, Cost]] = []
    for _ in range(count):
        pair = draw(MAYBE), draw(MAYBE)
        costs.append(pair if pair != (None, None) else (draw(COST), None))
    values = []
    for maker in range(count - 1):
        readers = draw(st.lists(st.integers(maker + 1, count - 1), unique=True, max_size=4))
        if readers:
            values.append(SharedValue(maker, tuple(readers), draw(MAYBE), draw(MAYBE)))
    return costs, values


def least(costs: list[tuple[Cost, Cost]], values: list[SharedValue]) -> float:
    return min(price(costs, values, labels) for labels in itertools.product((0, 1), repeat=len(costs)))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_cut_is_as_cheap_as_the_cheapest_of_all_labellings(
    problem: tuple[list[tuple[Cost, Cost]], list[SharedValue]],
) -> None:
    costs, values = problem
    expected = least(costs, values)
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no labels are possible"):
            two_labels(costs, values)
    else:
        assert price(costs, values, two_labels(costs, values)) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(COST, COST), min_size=1, max_size=40), st.data())
def test_a_chain_has_the_cost_of_dynamic_programming_with_two_states(
    nodes: list[tuple[int, int]], data: st.DataObject
) -> None:
    conversions = [(data.draw(COST), data.draw(COST)) for _ in nodes[1:]]
    zero, one = nodes[0]
    for (a, b), (to_one, to_zero) in zip(nodes[1:], conversions, strict=True):
        zero, one = min(zero, one + to_zero) + a, min(one, zero + to_one) + b
    values = [SharedValue(index, (index + 1,), *cost) for index, cost in enumerate(conversions)]
    assert price(nodes, values, two_labels(nodes, values)) == min(zero, one)


def test_a_value_with_several_readers_is_converted_once() -> None:
    costs = [(0, None), (10, 0), (10, 0), (10, 0)]
    shared = [SharedValue(0, (1, 2, 3), 25, 25)]
    assert two_labels(costs, shared) == [0, 1, 1, 1]  # 25 once and not three times, which would be more than 30
    assert price(costs, shared, [0, 1, 1, 1]) == 25


def test_a_conversion_that_was_not_measured_is_never_made() -> None:
    assert two_labels([(0, None), (1000, 0)], [SharedValue(0, (1,), None, None)]) == [0, 0]


def test_equal_costs_change_nothing() -> None:
    assert two_labels([(5, 5), (7, 7)], [SharedValue(0, (1,), 3, 3)]) == [0, 0]


def test_a_graph_of_thousands_of_nodes_is_cut_in_a_moment() -> None:
    costs = [(7 * index % 31, 5 * index % 29) for index in range(3000)]
    values = [
        SharedValue(index, tuple(cost for cost in (index + 1, index + 7) if cost < 3000), 6, 4) for index in range(2999)
    ]
    labels = two_labels(costs, values)
    assert price(costs, values, labels) <= min(price(costs, values, [cost] * 3000) for cost in (0, 1))
