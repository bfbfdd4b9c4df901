"""Data flow, keys, paths and files of graphs, without torch."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from madegraphs import IMAGE, add, graph_of

from xsp import sections
from xsp.cli import main
from xsp.errors import GraphError, XspError
from xsp.graph import files, keys, paths, section, sources, work
from xsp.graph.blocks import block
from xsp.graph.measures import as_json, critical, measures
from xsp.graph.node import Call, Edge, EdgeKind, Graph, KnownBy, Node, NodeKind, Source, Tensor
from xsp.graph.values import Flow
from xsp.report import html
from xsp.sections import Tree

# --- edges --------------------------------------------------------------------------------------------


def test_a_read_after_a_write_is_an_edge_of_data() -> None:
    graph = graph_of(("aten::relu", ["x"], "y"), ("aten::relu", ["y"], "z"))
    assert graph.edges == (Edge(0, 1, EdgeKind.DATA),)


def test_what_is_changed_in_place_comes_after_those_who_read_it_before() -> None:
    graph = graph_of(("aten::relu", ["x"], "y"), ("aten::exp", ["y"], "z"), ("aten::add_", ["y!"], None))
    assert graph.edges == (Edge(0, 1, EdgeKind.DATA), Edge(0, 2, EdgeKind.DATA), Edge(1, 2, EdgeKind.REUSE))
    assert [each.version for each in graph.values if each.storage == 1] == [0, 1]


def test_who_reads_a_changed_value_reads_the_change() -> None:
    graph = graph_of(("aten::relu", ["x"], "y"), ("aten::add_", ["y!"], None), ("aten::exp", ["y"], "z"))
    assert Edge(1, 2, EdgeKind.DATA) in graph.edges
    assert all((each.before, each.after) != (0, 2) for each in graph.edges)


def test_a_state_outside_the_tensors_orders_those_who_change_it() -> None:
    flow = Flow()
    for node in (0, 3, 5):
        flow.add_order(node, "random")
    assert flow.edges() == (Edge(0, 3, EdgeKind.ORDER), Edge(3, 5, EdgeKind.ORDER))


# --- paths --------------------------------------------------------------------------------------------


def test_the_heaviest_branch_of_the_published_inception_module_wins() -> None:
    """Figures of Benanza's worked example, in microseconds."""
    weight = [10.228, 30.511, 8.046, 30.719, 8.045, 47.652, 8.122, 30.231, 7.963, 41.912, 8.017, 10.102, 30.465, 8.017]
    earlier = [[], [0], [1], [0], [3], [4], [5], [0], [7], [8], [9], [0], [11], [12]]
    length, path = paths.longest(earlier, [0, *weight[1:]])
    assert round(length, 3) == 94.538
    assert path == [0, 3, 4, 5, 6]


def test_a_skip_connection_shortens_the_diameter_and_not_the_longest_path() -> None:
    steps = [("aten::relu", ["x"], "a"), ("aten::relu", ["a"], "b"), ("aten::relu", ["b"], "c")]
    found = measures(graph_of(*steps, ("aten::add", ["a", "c"], "d")))
    assert (found["longest_path"], found["diameter"]) == (4, 3)


def test_a_view_takes_no_place_on_the_longest_path() -> None:
    steps = [("aten::relu", ["x"], "a"), ("aten::view", ["a"], None), ("aten::relu", ["a"], "b")]
    found = measures(graph_of(*steps))
    assert (found["nodes"], found["views"], found["computing"], found["longest_path"]) == (3, 1, 2, 2)


def test_an_order_that_is_all_that_is_known_has_no_longest_path() -> None:
    found = measures(graph_of(("aten::relu", ["x"], "a"), known_by=KnownBy.ORDER))
    assert found["longest_path"] is None
    assert found["diameter"] is None
    assert critical(graph_of(("aten::relu", ["x"], "a"), known_by=KnownBy.ORDER)) == []


def random_steps(draw: st.DrawFn) -> list[tuple[str, list[str], str | None]]:
    steps: list[tuple[str, list[str], str | None]] = []
    for number in range(draw(st.integers(1, 25))):
        names = st.sampled_from(["x", *(f"v{each}" for each in range(number) if steps[each][2] is not None)])
        reads = draw(st.lists(names, min_size=1, max_size=3))
        kind = draw(st.sampled_from(["new", "place", "view"]))
        if kind == "place":
            reads[0] += "!"
        steps.append((f"aten::{kind}", reads, f"v{number}" if kind == "new" else None))
    return steps


graphs = st.composite(lambda draw: graph_of(*random_steps(draw)))()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graphs)
def test_edges_go_forward_and_each_value_has_one_writer(graph: Graph) -> None:
    assert all(each.before < each.after for each in graph.edges)
    writers = [number for node in graph.nodes for number in node.writes]
    assert len(writers) == len(set(writers))
    assert len({(each.storage, each.version) for each in graph.values}) == len(graph.values)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graphs)
def test_a_graph_is_the_same_after_it_was_written_and_read(graph: Graph) -> None:
    assert files.from_plain(json.loads(json.dumps(files.to_plain(graph)))) == graph


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graphs)
def test_paths_are_those_of_networkx(graph: Graph) -> None:
    networkx = pytest.importorskip("networkx")
    made = networkx.DiGraph()
    made.add_nodes_from(range(len(graph.nodes)))
    made.add_edges_from((each.before, each.after) for each in graph.edges_of(EdgeKind.DATA))
    earlier = paths.predecessors_of(graph)
    length, path = paths.longest(earlier, [1] * len(earlier))
    assert length == networkx.dag_longest_path_length(made) + 1 == len(path)
    assert all(made.has_edge(*pair) for pair in itertools.pairwise(path))
    lengths = dict(networkx.all_pairs_shortest_path_length(made))
    assert paths.diameter(earlier) == 1 + max(each for row in lengths.values() for each in row.values())


def test_a_path_as_long_as_a_graph_may_be_has_its_length() -> None:
    chain = [[number - 1] if number else [] for number in range(paths.MOST_NODES)]
    assert paths._farthest(np.arange(1), chain) == paths.MOST_NODES


# --- keys ---------------------------------------------------------------------------------------------


def test_equal_calls_have_equal_keys_and_others_have_not() -> None:
    one = keys.key(add(IMAGE, alpha=1))
    assert one == keys.key(add(IMAGE, alpha=1))
    others = [
        add(IMAGE, alpha=2), add(IMAGE, alpha=1.0), add(IMAGE, alpha="1"), add(IMAGE, alpha=True), add(IMAGE, beta=1),
        add(IMAGE, IMAGE, alpha=1), add(Tensor("float16", IMAGE.shape), alpha=1), add(IMAGE, alpha=(1,)),
        add(Tensor("float32", IMAGE.shape, (128, 1, 32, 8)), alpha=1), add(IMAGE, alpha=1, op="onnx::add"),
        add(Tensor("float32", None), alpha=1), add(IMAGE, alpha=float("nan")), add(IMAGE, alpha=complex(1, 0)),
    ]  # fmt: skip
    assert len({one, *map(keys.key, others)}) == len(others) + 1


def test_the_key_of_work_leaves_out_what_cannot_change_it() -> None:
    norms = [add(IMAGE, op="aten::batch_norm", eps=eps, training=training) for eps in (1e-5, 1e-3) for training in "ab"]
    assert len(set(map(keys.key, norms))) == 4
    assert len(set(map(keys.work_key, norms))) == 2


def test_the_key_of_a_block_does_not_depend_on_where_it_stands() -> None:
    twice = [("aten::relu", ["x"], "a"), ("aten::add", ["a", "x"], "b"), ("aten::relu", ["b"], "c")]
    graph = graph_of(*twice, ("aten::add", ["c", "b"], "d"))
    assert block(graph, 0, 2).key == block(graph, 2, 4).key
    assert block(graph, 0, 2).key != block(graph, 1, 3).key


def test_an_input_that_the_step_changes_in_place_counts_once() -> None:
    once = measures(graph_of(("aten::relu", ["x"], "y")))["input_elements"]
    assert once == 128
    assert measures(graph_of(("aten::mul_", ["x!"], None), ("aten::relu", ["x"], "y")))["input_elements"] == once
    assert measures(graph_of(("aten::relu", ["x"], "y"), ("aten::mul_", ["x!"], None)))["input_elements"] == once


def test_what_multiplies_matrices_in_one_call_is_counted_or_unknown_and_not_zero() -> None:
    def flops(op: str, output: tuple[int, ...], **given: object) -> int | None:
        call = Call(op, tuple(given.items()), (Tensor("float32", output),))
        return work.flops_of(Node(call, keys.key(call), NodeKind.COMPUTE))

    def made(*shape: int) -> Tensor:
        return Tensor("float32", shape)

    assert flops("aten::inner", (4, 5), self=made(4, 7), other=made(5, 7)) == 2 * 4 * 5 * 7
    assert flops("aten::chain_matmul", (2, 5), matrices=(made(2, 3), made(3, 4), made(4, 5))) == 2 * (24 + 40)
    assert flops("aten::cov", (4, 4), self=made(4, 7)) == 2 * 4 * 4 * 7
    assert flops("aten::linalg_inv", (4, 4), A=made(4, 4)) is None
    assert flops("ai.onnx.ml::LinearClassifier", (4, 3), input0=made(4, 7)) is None
    assert flops("ai.onnx.ml::Normalizer", (4, 3), input0=made(4, 3)) == 0
    weights = {"qkv_weight": made(24, 8), "proj_weight": made(8, 8), "ffn_weight_1": made(32, 8)}
    found = flops("aten::_transformer_encoder_layer_fwd", (2, 5, 8), src=made(2, 5, 8), **weights,
                  ffn_weight_2=made(8, 32))  # fmt: skip
    assert found == 2 * 10 * (3 * 64 + 64 + 2 * 256) + 2 * (2 * 2 * 5 * 5 * 8)


def test_of_a_table_whose_rows_are_summed_only_those_rows_are_read() -> None:
    def moved(rows: int) -> int | None:
        given = {"weight": Tensor("float32", (rows, 16)), "indices": Tensor("int64", (40,))}
        call = Call("aten::embedding_bag", tuple(given.items()), (Tensor("float32", (8, 16)),))
        return work.bytes_of(Node(call, keys.key(call), NodeKind.COMPUTE))

    others = 40 * 8 + 8 * 16 * 4
    assert moved(1_000_000) == 40 * 16 * 4 + others
    assert moved(10) == 10 * 16 * 4 + others


def test_of_a_tensor_that_is_changed_at_indices_only_the_selected_elements_move() -> None:
    cache, rows, at = Tensor("float32", (1000, 16)), Tensor("float32", (5, 16)), Tensor("int64", (5,))

    def moved(op: str, target: Tensor = cache, **given: object) -> int | None:
        call = Call(f"aten::{op}", (("self", target), *given.items()), (target,))
        return work.bytes_of(Node(call, keys.key(call), NodeKind.COMPUTE))

    assert moved("index_put_", indices=(at,), values=rows, accumulate=False) == 40 + 2 * 320
    assert moved("index_put_", indices=(at,), values=rows, accumulate=True) == 40 + 3 * 320
    assert moved("index_put_", indices=(at,), values=Tensor("float32", ()), accumulate=False) == 40 + 4 + 320
    columns = {"indices": (None, Tensor("int64", (3,))), "values": Tensor("float32", (1000, 3))}
    assert moved("index_put_", **columns, accumulate=False) == 24 + 2 * 12_000
    mask = {"indices": (Tensor("bool", (1000,)),), "values": rows}
    assert moved("index_put_", **mask, accumulate=False) == 1000 + 2 * 320
    assert moved("index_add_", dim=0, index=at, source=rows, alpha=1) == 40 + 3 * 320
    assert moved("scatter_", dim=0, index=Tensor("int64", (5, 16)), src=rows) == 640 + 2 * 320
    assert moved("copy_", target=rows, src=rows, non_blocking=False) == 2 * 320, "what is overwritten is not read"


# --- files --------------------------------------------------------------------------------------------


def test_a_graph_of_order_alone_and_one_of_nothing_have_measures() -> None:
    found = as_json(graph_of(("aten::relu", ["x"], "a"), known_by=KnownBy.ORDER))
    assert found["edges_known_by"] == "order"
    empty = Graph("none", Source.ONNX, (), (), (), KnownBy.NAMES, "nodes")
    assert measures(empty)["diameter"] == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"xsp_graph":1', '"xsp_graph":99'), "newer xsp"),
        (lambda text: text.replace('"xsp_graph":1', '"other":1'), "not a graph that xsp saved"),
        (lambda text: text.replace("aten::relu", "aten::gelu"), "the key of a call"),
        (lambda text: text.replace('[0,1,"data"]', '[1,0,"data"]'), "an edge from 1 to 0"),
        (lambda text: text.replace('"nodes":', '"knots":'), "damaged"),
        (lambda text: "[" * 100_000, "damaged"),
    ],
)
def test_a_file_that_was_damaged_or_edited_is_refused_in_one_line(tmp_path: Path, change, says) -> None:
    path = tmp_path / "graph.json"
    files.save(graph_of(("aten::relu", ["x"], "a"), ("aten::relu", ["a"], "b")), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(GraphError, match=says) as caught:
        files.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("parameters",), "many"),
        (("parameters",), -1),
        (("values", 0, 3), "large"),
        (("edges", 0, 0), 0.0),
        (("calls", 0, "outputs", 0), {"tensor": ["float32", ["a"]]}),
        (("calls", 0, "outputs", 0), {"tensor": ["float32", [-4]]}),
        (("calls", 0, "outputs", 0), {"tensor": [["float32"], [4]]}),
        (("calls", 0, "outputs", 0), {"tensor": ["float32", [4, 4], [1]]}),
        (("kept",), [99]),
        (("outputs",), [[99, 0]]),
        (("origins",), [[[-1, 0]], [[0, 0], [0, 0]]]),
        (("problems",), [["where"]]),
    ],
)
def test_a_figure_or_number_that_an_editor_spoiled_is_damage(tmp_path: Path, names: tuple, value: object) -> None:
    content = files.to_plain(graph_of(("aten::relu", ["x"], "a"), ("aten::relu", ["a"], "b")))
    place = content
    for name in names[:-1]:
        place = place[name]
    place[names[-1]] = value
    (tmp_path / "graph.json").write_text(json.dumps(content))
    with pytest.raises(GraphError, match="the graph is damaged"):
        files.load(tmp_path / "graph.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text), indent=2).encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: gzip.compress(text.encode()),
    ],
)
def test_a_saved_graph_stays_a_source_after_it_was_laid_out_marked_or_compressed(tmp_path: Path, change) -> None:
    graph = graph_of(("aten::relu", ["x"], "a"), ("aten::relu", ["a"], "b"))
    path = tmp_path / "graph.json"
    files.save(graph, path)
    path.write_bytes(change(path.read_text()))
    assert sources.of(path) == graph


def test_the_name_of_a_model_may_be_longer_than_that_of_a_file() -> None:
    name = "transformers:gpt2?" + "&".join(f"n_layer={number}" for number in range(60))
    assert sources.supported_options(name) == sources.supported_options("transformers:gpt2")
    assert not sources.is_trace(name)
    assert sections.write_if_run(Path(name), "graph", sections.Section("Graph", ())) is None
    with pytest.raises(GraphError, match="no such file"):
        sources.of("x" * 300)


def test_a_gzip_that_is_damaged_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "graph.json.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + b"no stream of zlib" * 9)
    with pytest.raises(XspError, match="gzip"):
        sources.of(tmp_path / "graph.json.gz")


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be written"):
        files.save(graph_of(("aten::relu", ["x"], "a")), tmp_path / "no" / "graph.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_more_nodes_than_a_diameter_is_computed_of_have_all_other_measures(tmp_path: Path) -> None:
    count = paths.MOST_NODES + 1
    graph = graph_of(*(("aten::relu", [f"v{number}"], f"v{number + 1}") for number in range(count)))
    found = measures(graph)
    assert found["longest_path"] == count
    assert found["diameter"] is None
    graph.save(tmp_path / "large.json")
    assert files.load(tmp_path / "large.json") == graph


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_shows_the_modules_and_gives_no_command_to_a_browser(tmp_path: Path) -> None:
    graph = graph_of(("aten::relu", ["x"], "a"), ("aten::</script><img src=x>", ["a"], "b"))
    shown = section.section(dataclasses.replace(graph, name="<img src=x>"))
    (tree,) = (part for part in shown.parts if isinstance(part, Tree))
    (step,) = tree.branches
    (phase,) = step.inside
    assert step.cells[0] == "2 calls"
    assert [(call.name, call.marked) for call in phase.inside] == [
        ("aten::relu", True), ("aten::</script><img src=x>", True)
    ]  # fmt: skip
    text = html.write_sections(tmp_path / "g.html", "<img src=x>", [shown]).read_text(encoding="utf-8")
    assert "<img src=x>" not in text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_of(("aten::relu", ["x"], "a")).save(tmp_path / "g.json")
    assert main(["graph", str(tmp_path / "g.json"), "--html", str(tmp_path / "no" / "g.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line or "no such folder" in line
