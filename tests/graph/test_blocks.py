"""Blocks: consecutive calls without their place, and the windows that cut a graph into them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from madegraphs import graph_of

from xsp.errors import GraphError
from xsp.graph.blocks import Block, block, windows
from xsp.graph.node import Graph, NodeKind, Phase, Role

CHAIN = graph_of(*[("aten::relu", [before], after) for before, after in zip("xabcd", "abcde", strict=True)])


def weighted(graph: Graph, *storages: int) -> Graph:
    """Return a graph in which some storages hold weights."""
    values = (
        dataclasses.replace(each, role=Role.WEIGHT) if each.storage in storages else each for each in graph.values
    )
    return dataclasses.replace(graph, values=tuple(values))


def test_a_block_numbers_its_storages_in_the_order_of_first_appearance() -> None:
    graph = graph_of(("aten::relu", ["x"], "a"), ("aten::add", ["a", "w"], "b"), ("aten::add_", ["b!", "a"], None))
    found = block(graph, 1, 3)
    assert [(each.reads, each.returns, each.writes) for each in found.wiring] == [
        ((0, 1), (2,), (2,)),
        ((2, 0), (2,), (2,)),
    ]
    assert list(found.external) == [0, 1]


def test_the_key_of_a_block_depends_on_its_wiring_and_on_what_is_a_weight() -> None:
    graph = graph_of(("aten::add", ["x", "x"], "a"), ("aten::add", ["a", "x"], "b"))
    twice, two = block(graph, 0, 1), block(graph, 1, 2)
    weight = block(weighted(graph, 0), 1, 2)
    assert len({twice.key, two.key, weight.key}) == 3
    assert (two.weights, weight.weights) == ((), (1,))
    assert block(weighted(graph, 1), 1, 2).weights == (0,)


def test_what_a_block_makes_itself_is_no_weight_of_it() -> None:
    graph = weighted(graph_of(("aten::relu", ["x"], "a"), ("aten::relu", ["a"], "b")), 1)
    assert block(graph, 0, 2).weights == ()


def test_a_block_comes_back_from_json_as_it_was() -> None:
    found = block(weighted(CHAIN, 0), 0, 3)
    again = Block.from_plain(json.loads(json.dumps(found.to_plain())))
    assert (again, again.key, again.work_key) == (found, found.key, found.work_key)


def test_a_block_without_such_nodes_is_refused() -> None:
    for start, stop in ((0, 9), (2, 2), (-1, 2)):
        with pytest.raises(GraphError, match="has no nodes"):
            block(CHAIN, start, stop)


def test_windows_cut_a_graph_into_blocks_of_so_many_calls() -> None:
    assert list(windows(CHAIN)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert list(windows(CHAIN, 2)) == [(0, 2), (2, 4), (4, 5)]
    assert list(windows(CHAIN, 3, 1)) == [(0, 3), (1, 4), (2, 5)]
    assert list(windows(CHAIN, 9)) == [(0, 5)]


def test_windows_of_nothing_are_refused() -> None:
    for size, stride in ((0, None), (2, 0)):
        with pytest.raises(GraphError, match="above 0"):
            list(windows(CHAIN, size, stride))


def test_views_lie_in_a_window_between_two_calls_and_not_at_its_ends() -> None:
    view = ("aten::view", ["a"], None)
    graph = graph_of(("aten::relu", ["x"], "a"), view, ("aten::relu", ["a"], "b"), ("aten::view", ["b"], None))
    assert list(windows(graph)) == [(0, 1), (2, 3)]
    assert list(windows(graph, 2)) == [(0, 3)]


def test_windows_end_with_the_phase_and_hold_no_call_that_cannot_be_run_by_itself() -> None:
    nodes = list(CHAIN.nodes)
    nodes[1] = dataclasses.replace(nodes[1], kind=NodeKind.OPAQUE)
    nodes[4] = dataclasses.replace(nodes[4], phase=Phase.BACKWARD)
    graph = dataclasses.replace(CHAIN, nodes=tuple(nodes))
    assert list(windows(graph, 9)) == [(0, 1), (1, 2), (2, 4), (4, 5)]


def test_a_window_is_not_cut_between_a_value_and_what_changes_it_in_place() -> None:
    graph = graph_of(
        ("aten::relu", ["x"], "a"),
        ("aten::conv", ["a"], "b"),
        ("aten::relu_", ["b!"], None),
        ("aten::conv", ["b"], "c"),
    )
    assert list(windows(graph, 2)) == [(0, 3), (3, 4)]
    assert list(windows(graph, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_where_the_data_flow_is_unknown_each_tensor_stands_for_itself() -> None:
    nodes = tuple(dataclasses.replace(each, reads=(), returns=(), writes=()) for each in CHAIN.nodes)
    graph = dataclasses.replace(CHAIN, nodes=nodes, values=())
    found = block(graph, 0, 2)
    assert [each.reads for each in found.wiring] == [(0,), (2,)]
    assert found.weights == ()
