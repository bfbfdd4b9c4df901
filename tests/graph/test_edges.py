"""Edges of captured steps, against a plain reader of memory: who wrote the elements that a call reads."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from depth import deep
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp.graph import files, regions
from xsp.graph.draft import Draft
from xsp.graph.measures import measures
from xsp.graph.node import EdgeKind, Graph, Source

torch = pytest.importorskip("torch")
from graphruns import graph_of  # noqa: E402

nn = torch.nn


def longest(function: Callable[..., object], *tensors: Any) -> int:
    return int(graph_of(function, *tensors).measures()["longest_path"])


# --- by hand ------------------------------------------------------------------------------------------


def test_what_overwrites_a_tensor_does_not_wait_for_its_content() -> None:
    def clears(x: Any) -> Any:
        y = torch.relu(x)
        z = torch.exp(y)
        y.zero_()
        return y, z

    graph = graph_of(clears, torch.zeros(4))
    assert graph.measures()["longest_path"] == 2
    assert [(edge.before, edge.after) for edge in graph.edges_of(EdgeKind.REUSE)] == [(0, 2), (1, 2)]


def test_writes_to_different_slices_are_independent() -> None:
    def fills(x: Any) -> Any:
        out = torch.empty(4, 8)
        for row in range(4):
            out[row].copy_(torch.relu(x[row]))
        return out.sum()

    assert longest(fills, torch.zeros(4, 8)) == 3

    def by_columns(x: Any) -> Any:
        out = torch.zeros(8, 4)
        for column in range(4):
            out[:, column] = torch.exp(x[column])
        return torch.relu(out[:, 1])

    assert longest(by_columns, torch.zeros(4, 8)) == 3


def test_a_slice_depends_on_its_own_writer() -> None:
    def reads_one(x: Any) -> Any:
        out = torch.empty(2, 8)
        whole = out.view(16)
        out[0].copy_(x)
        out[1].copy_(torch.relu(torch.relu(torch.relu(x))))
        return torch.exp(out[0]), whole

    assert longest(reads_one, torch.zeros(8)) == 4
    graph = graph_of(reads_one, torch.zeros(8))
    (exp,) = [place for place, node in enumerate(graph.nodes) if node.call.op == "aten::exp"]
    path = [0] * len(graph.nodes)
    for edge in graph.edges_of(EdgeKind.DATA):
        path[edge.after] = max(path[edge.after], path[edge.before] + graph.nodes[edge.before].computes)
    assert path[exp] == 1


def test_what_writes_at_indices_leaves_the_rest_and_reads_nothing_of_it() -> None:
    def cache(x: Any, at: Any) -> Any:
        kept = torch.relu(torch.relu(x))
        kept.index_copy_(0, at, torch.exp(x[:1]))
        return kept.sum()

    graph = graph_of(cache, torch.zeros(4, 8), torch.tensor([2]))
    assert graph.measures()["longest_path"] == 3, "relu, relu, sum; and exp, index_copy_, sum"

    def adds(x: Any, at: Any) -> Any:
        kept = torch.relu(torch.relu(x))
        return kept.index_add_(0, at, torch.exp(x[:1])).sum()

    assert longest(adds, torch.zeros(4, 8), torch.tensor([2])) == 4


def test_an_output_argument_is_not_read() -> None:
    def into(x: Any) -> Any:
        out = torch.exp(torch.exp(torch.exp(x)))
        torch.add(x, 1, out=out)
        return torch.relu(out)

    assert longest(into, torch.zeros(4)) == 3, "of the three exponentials; the sum and relu are two"


# --- against memory -----------------------------------------------------------------------------------


class Plain:
    """A reader of memory: elements of storages, their last writers, and all orders that the elements require."""

    def __init__(self) -> None:
        self.last_writer: dict[tuple[int, int], int] = {}
        self.readers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.depth: list[int] = []
        self.orders: set[tuple[int, int]] = set()

    @staticmethod
    def elements(tensor: Any) -> set[tuple[int, int]]:
        # without torch, whose calls would be recorded
        steps = [step * np.arange(length) for length, step in zip(tensor.shape, tensor.stride(), strict=True)]
        places = tensor.storage_offset() + sum(map(np.asarray, np.meshgrid(*steps))) if steps else [0]
        offset = 0 if steps else tensor.storage_offset()
        return {(tensor.untyped_storage()._cdata, offset + int(place)) for place in np.ravel(places)}

    def call(self, reads: list[Any], writes: list[Any], weight: int = 1) -> None:
        """Add a call that reads and writes all elements of tensors."""
        number = len(self.depth)
        read = set().union(*map(self.elements, reads)) if reads else set()
        written = set().union(*map(self.elements, writes))
        before = {self.last_writer[element] for element in read if element in self.last_writer}
        self.depth.append(weight + max((self.depth[each] for each in before), default=0))
        after = before | {self.last_writer[element] for element in written if element in self.last_writer}
        after |= {reader for element in written for reader in self.readers[element]}
        self.orders |= {(each, number) for each in after if each != number}
        for element in read:
            self.readers[element].add(number)
        for element in written:
            self.last_writer[element] = number
            self.readers[element] = set()


def view_of(data: st.DataObject, one: Any) -> Any:
    axis = data.draw(st.integers(0, one.dim() - 1))
    start = data.draw(st.integers(0, one.shape[axis] - 1))
    kind = data.draw(st.sampled_from("every-second select transpose unsqueeze narrow".split()))
    if kind == "every-second":
        return one[(slice(None),) * axis + (slice(start, None, 2),)]
    if kind == "narrow":
        return one.narrow(axis, start, one.shape[axis] - start)
    if kind == "select":
        return one.select(axis, start)
    return one.transpose(0, axis) if kind == "transpose" else one.unsqueeze(axis)


def step(data: st.DataObject, plain: Plain, places: list[int], nodes: list[Any]) -> list[Any]:
    """Do a random step of views, writes and reads on small tensors; `places` gets the node of each call."""

    def called(reads: list[Any], writes: list[Any], weight: int = 1) -> None:
        places.append(len(nodes) - 1)
        plain.call(reads, writes, weight)

    held = [torch.zeros(4, 6)]
    called([], held)
    for _ in range(data.draw(st.integers(3, 14))):
        one = held[data.draw(st.integers(0, len(held) - 1))]
        kind = data.draw(
            st.sampled_from(["view"] * 4 + ["zero", "zero", "copy", "copy", "add", "new", "empty", "split"])
        )
        if kind == "view" and one.dim():
            held.append(view_of(data, one))
        elif kind == "split" and one.dim() and one.shape[0] > 1:
            held += one.split(1)
        elif kind == "zero":
            one.zero_()
            called([], [one])
        elif kind == "copy":
            others = [each for each in held if each.shape == one.shape]
            other = others[data.draw(st.integers(0, len(others) - 1))]
            if plain.elements(one) & plain.elements(other) and other is not one:
                continue  # torch refuses to copy between overlapping tensors
            one.copy_(other)
            called([other], [one])
        elif kind == "add":
            one.add_(1)
            called([one], [one])
        elif kind == "new":
            held.append(torch.exp(one))
            called([one], [held[-1]])
        elif kind == "empty":
            held.append(torch.empty(4, 6))
            called([], [held[-1]], 0)
    return held


@pytest.mark.parametrize("examples", [50, deep(300)])
def test_the_longest_path_is_that_of_the_reads_after_writes_in_memory(examples: int) -> None:
    from xsp.graph.recorder import Recorder

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        recorder, plain, places = Recorder(), Plain(), []
        with torch.inference_mode(), recorder.recording():
            held = step(data, plain, places, recorder.nodes)
        if not recorder.nodes:
            return
        graph = recorder.finish(held).graph("made", Source.CAPTURED, {})
        assert measures(graph)["longest_path"] == max(plain.depth, default=0)
        assert all(graph.nodes[place].kind.value != "view" for place in places)
        after = reachable(graph)
        assert all(places[second] in after[places[first]] for first, second in plain.orders), "an order has no edge"
        assert files.from_plain(files.to_plain(graph)) == graph
        again = Draft(graph).finish()[0]
        assert measures(again)["longest_path"] == measures(graph)["longest_path"]
        after = reachable(again)
        assert all(places[second] in after[places[first]] for first, second in plain.orders), "an order has no edge"

    holds()


def reachable(graph: Graph) -> list[set[int]]:
    """Return the nodes that come after each node by any edges."""
    after: list[set[int]] = [set() for _ in graph.nodes]
    for edge in sorted(graph.edges, key=lambda edge: -edge.before):
        after[edge.before] |= {edge.after} | after[edge.after]
    return after


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 5), st.data())
def test_a_region_is_the_bytes_of_the_elements(dims: Any, offset: int, data: st.DataObject) -> None:
    def drawn() -> tuple[Any, set[int]]:
        some = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4))
        return made(some, data.draw(st.integers(0, 5)))

    def made(dims: Any, offset: int) -> tuple[Any, set[int]]:
        shape, strides = zip(*dims, strict=True)
        places = [offset + sum(map(int.__mul__, each, strides)) for each in itertools.product(*map(range, shape))]
        bytes_ = {4 * place + each for place in places for each in range(4)}
        return regions.of_tensor(offset, shape, strides, 4, None), bytes_

    def bytes_of(region: Any) -> set[int]:
        return {each for start, end in region.tolist() for each in range(start, end)}

    (first, expected), (second, others) = made(dims, offset), drawn()
    assert bytes_of(first) == expected
    assert all(a[1] < b[0] for a, b in itertools.pairwise(first.tolist()))
    assert regions.overlap(first, second) == bool(expected & others)
    assert regions.covers(first, second) == (others <= expected)
    assert bytes_of(regions.union([first, second])) == expected | others


def test_a_tensor_of_too_many_pieces_counts_as_one_that_is_not_replaced() -> None:
    count = regions.MOST_RANGES + 1
    region = regions.of_tensor(0, (count,), (2,), 4, 8 * count)
    assert region is not None
    assert region.tolist() == [[0, 8 * count - 4]]
    assert not regions.is_exact(region, count, 4)
    assert regions.of_tensor(0, (2, 3), (3, 1), 4, 24) is None
    assert np.array_equal(regions.of_tensor(3, (), (), 4, 24), [[12, 16]])
