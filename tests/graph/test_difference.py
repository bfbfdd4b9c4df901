"""Two graphs held against each other, graphs for Graphviz, and graphs on the page of a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from madegraphs import graph_of

from xsp import rundir, sections, terminal
from xsp.cli import main
from xsp.errors import GraphError
from xsp.graph import difference, dot, section
from xsp.graph.node import Edge, EdgeKind, Graph

ONE = graph_of(("aten::relu", ["x"], "a"), ("aten::exp", ["a"], "b"), ("aten::exp", ["b"], "c"))
OTHER = graph_of(("aten::relu", ["x"], "a"), ("aten::exp", ["a"], "b"), ("aten::tanh", ["b"], "c"))
HOSTILE = 'a"b\\c\n</script><script>'


def named(graph: Graph, name: str, *modules: str) -> Graph:
    nodes = tuple(dataclasses.replace(each, module=module) for each, module in zip(graph.nodes, modules, strict=True))
    return dataclasses.replace(graph, name=name, nodes=nodes)


def test_what_only_one_graph_has_is_counted_by_key_and_module() -> None:
    found = difference.of(named(ONE, "one", "", "a", "b"), named(OTHER, "other", "", "a", "b"))
    assert (found.names, found.shared, found.only) == (("one", "other"), 2, (1, 1))
    assert [(each.op, each.first, each.second) for each in found.calls] == [("aten::exp", 2, 1), ("aten::tanh", 0, 1)]
    assert found.modules == (("b", 1, 1),)
    assert [name for name, *_ in found.measures] == ["unique", "unique_work", "unique_all_nodes"]


def test_a_graph_does_not_differ_from_itself() -> None:
    found = difference.of(ONE, ONE)
    assert (found.shared, found.only, found.calls, found.modules, found.measures) == (3, (0, 0), (), (), ())
    assert "3 calls in both, 0 only in the first" in terminal.page(difference.section(found))


def test_a_sum_that_is_partly_unknown_is_a_lower_limit_in_a_difference() -> None:
    found = dataclasses.replace(
        difference.of(ONE, OTHER), measures=(("flops", 3_100_000_000, 12_345), ("bytes", None, 7), ("nodes", 3, 4)),
        unknown={"flops": (2, 0), "bytes": (3, 1)},
    )  # fmt: skip
    lines = terminal.page(difference.section(found)).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["flops"] == ["≥", "3.10", "G", "12,345"]
    assert rows["bytes"] == ["unknown", "≥", "7"]
    assert rows["nodes"] == ["3", "4"]
    flops, *_, nodes = found.as_json()["measures"]
    assert (flops["first_unknown"], flops["second_unknown"], "first_unknown" in nodes) == (2, 0, False)


def test_a_difference_fits_the_terminal_and_gives_it_no_command() -> None:
    calls = [(f"aten::{'long' * 20}{number}", ["x"], f"y{number}") for number in range(30)]
    long = graph_of(*calls)
    modules = [f"layer{number}.{'deep.' * 30}end" for number in range(30)]
    text = terminal.page(difference.section(difference.of(named(long, HOSTILE + "\x1b[2J", *modules), ONE)))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert "more in --format json" in text


def test_the_command_compares_draws_and_writes_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    rundir.create(run)
    rundir.write_run(run, {"name": "run"})
    for name, graph in (("one", ONE), ("other", OTHER)):
        graph.save(tmp_path / f"{name}.json")
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    assert main(["graph", one, "--compare", other, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["shared"], said["only_first"], said["only_second"]) == (2, 1, 1)
    assert {tuple(each) for each in said["calls"]} == {("op", "key", "shapes", "first", "second")}
    assert main(["graph", one, "--dot", str(tmp_path / "g.dot"), "--section", str(run)]) == 0
    assert (tmp_path / "g.dot").read_text().startswith("digraph")
    assert list(sections.read(run).sections) == ["graph"]
    capsys.readouterr()
    assert main(["graph", one, "--section", str(tmp_path)]) != 0
    assert "not a run directory" in capsys.readouterr().err
    assert main(["graph", one, "--compare", str(tmp_path / "none.json")]) != 0
    capsys.readouterr()
    assert main(["graph", one, "--compare", "micro:path-3", "--by", "export"]) == 2  # it is of the first one alone
    assert "--by cannot change" in capsys.readouterr().err


def test_a_drawing_has_each_call_and_edge_and_text_is_text(tmp_path: Path) -> None:
    graph = dataclasses.replace(graph_of(("aten::relu", ["x"], "a"), (f"aten::{HOSTILE}", ["a"], "b")), name=HOSTILE)
    dot.write(graph, tmp_path / "g.dot")
    text = (tmp_path / "g.dot").read_text()
    assert "n0 -> n1 [color=red];" in text
    assert 'a\\"b\\\\c' in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tplain", str(tmp_path / "g.dot")], check=True, capture_output=True)
    with pytest.raises(GraphError, match="cannot be written"):
        dot.write(graph, tmp_path / "no" / "g.dot")


def test_edges_of_which_only_the_order_is_known_are_dotted(tmp_path: Path) -> None:
    graph = dataclasses.replace(ONE, edges=(Edge(0, 1, EdgeKind.ORDER),))
    dot.write(graph, tmp_path / "g.dot")
    assert "n0 -> n1 [style=dotted];" in (tmp_path / "g.dot").read_text()


def test_the_section_has_the_measures_and_the_modules_with_the_longest_path_marked() -> None:
    graph = named(
        graph_of(("aten::relu", ["x"], "a"), ("aten::exp", ["x"], "b"), ("aten::tanh", ["a"], "c")),
        HOSTILE,
        "l",
        "m",
        "l.k",
    )
    _, table, *_, tree = section.section(graph).parts
    assert isinstance(table, sections.Table)
    assert {name: value for name, value, _ in table.rows}["longest path"] == 2
    assert isinstance(tree, sections.Tree)
    (step,) = tree.branches
    (forward,) = step.inside
    marked = {each.name: each.marked for each in forward.inside}
    assert marked == {"l": True, "m": False}
    assert [each.name for each in forward.inside[0].inside] == ["aten::relu", "k"]


def test_modules_that_nest_very_deeply_still_make_a_section(tmp_path: Path) -> None:
    rundir.write_run(tmp_path, {"name": "run"})
    section.write(named(ONE, "deep", ".".join("a" * 300), "b", "c"), tmp_path)
    assert sections.read(tmp_path).damaged == ()
