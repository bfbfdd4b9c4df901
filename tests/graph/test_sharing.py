"""Which layers the models of a corpus share; what is missing in the folder is named."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from xsp import terminal
from xsp.cli import main
from xsp.errors import GraphError, UsageError
from xsp.graph import corpus, corpustext, keys, sharing
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Source, Tensor

ASKED = {"batch": 1, "train": False}


def graph(name: str, layers: Sequence[int], views: int = 0) -> Graph:
    """A graph of calls that differ where the numbers do, and of views."""
    nodes = []
    for number in [*layers, *(-1 for _ in range(views))]:
        call = Call("aten::relu", (("self", Tensor("float32", (abs(number), 2))),))
        nodes.append(Node(call, keys.key(call), NodeKind.VIEW if number < 0 else NodeKind.COMPUTE))
    return Graph(name, Source.CAPTURED, tuple(nodes), (), (), KnownBy.STORAGE, "operators of ATen")


def written(out: Path, models: Mapping[str, Sequence[int]]) -> Path:
    """A corpus as `xsp graph --all` writes it."""
    out.mkdir(exist_ok=True)
    lines = []
    for spec, layers in models.items():
        path = corpus.graph_path(out, spec)
        path.parent.mkdir(exist_ok=True)
        graph(spec, layers, views=1).save(path)
        lines.append(json.dumps({"spec": spec, "asked": ASKED, "nodes": len(layers) + 1}))
    (out / corpus.FILE).write_text("".join(f"{line}\n" for line in lines))
    return out


MODELS = {"a:small": [1, 2, 3, 3], "b:other": [7, 8, 9], "a:large": [1, 2, 3, 3, 3, 4], "b:none": []}


def test_the_index_is_of_different_layers_and_views_do_not_count(tmp_path: Path) -> None:
    found = sharing.read(written(tmp_path, MODELS))
    indexes = sharing.jaccard(found.members)
    assert indexes[0, 2] == pytest.approx(3 / 4)
    assert indexes[0, 1] == 0
    assert indexes[0, 0] == 1
    assert np.isnan(indexes[3, 3])
    assert indexes[3, 0] == 0
    assert (np.nan_to_num(indexes) == np.nan_to_num(indexes.T)).all()
    assert sharing.growth(found.members) == [(4, 3), (7, 6), (13, 7), (13, 7)]
    assert sharing.count_new(found.members[2], found.members[:2]) == 1
    assert sharing.count_new(found.members[0], found.members[2:]) == 0


def test_models_that_are_alike_stand_together_and_are_a_group(tmp_path: Path) -> None:
    found = sharing.read(written(tmp_path, MODELS))
    groups = sharing.groups(sharing.jaccard(found.members))
    assert sorted(place for group in groups for place in group.places) == [0, 1, 2, 3]
    assert [(set(group.places), group.similarity) for group in groups if len(group.places) > 1] == [({0, 2}, 0.75)]
    assert sharing.groups(np.ones((1, 1))) == [sharing.SimilarModels((0,), 1.0)]
    assert sharing.groups(np.ones((0, 0))) == []


def test_the_order_of_the_clustering_undoes_a_shuffle() -> None:
    """Models that each share layers with the next ones alone form a chain; the order finds it again."""
    members = [sharing.Member(str(first), tuple(map(str, range(first, first + 12)))) for first in range(0, 48, 2)]
    shuffled = [members[place] for place in np.random.default_rng(3).permutation(len(members))]
    found = sharing.groups(sharing.jaccard(shuffled), threshold=2.0)
    order = [int(shuffled[place].spec) for group in found for place in group.places]
    far = sum(abs(before - after) > 8 for before, after in itertools.pairwise(order))
    assert len(order) == 24
    assert far <= 4


def test_what_is_missing_damaged_or_failed_is_a_named_hole(tmp_path: Path) -> None:
    out = written(tmp_path, MODELS)
    corpus.graph_path(out, "a:small").unlink()
    corpus.graph_path(out, "b:other").write_text('{"xsp_graph": 1, "nam')
    with (out / corpus.FILE).open("a") as file:
        file.write(json.dumps({"spec": "b:fails", "asked": ASKED, "error": "does not build"}) + '\n{"spec": "b:cut')
    found = sharing.read(out)
    assert [member.spec for member in found.members] == ["a:large", "b:none"]
    reasons = dict(found.holes)
    assert set(reasons) == {"a:small", "b:other", "b:fails"}
    assert "cannot be read" in reasons["a:small"]
    assert "damaged" in reasons["b:other"]
    assert reasons["b:fails"] == "does not build"
    text = terminal.page(corpustext.section(found))
    assert "2 of 5 models have a graph" in text
    assert "3 without a graph" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_folder_without_models_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="not a corpus; make one"):
        sharing.read(tmp_path)
    (tmp_path / corpus.FILE).write_text("{}\nnull\n[1]\n")
    with pytest.raises(GraphError, match="lists no models"):
        sharing.read(tmp_path)
    with pytest.raises(UsageError, match="did you mean a:small"):
        sharing.read(written(tmp_path, MODELS), ["a:smal"])


@pytest.mark.parametrize("count", [1, 3, 14])
def test_the_command_shows_groups_and_a_grid_or_pairs_in_80_columns(tmp_path: Path, count: int, capsys) -> None:
    names = [f"torchvision:a_model_with_a_name_that_is_long_{'x' * number}" for number in range(count)]
    written(tmp_path, {name: [place, 50, 51, 52] for place, name in enumerate(names)})
    assert main(["graph", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert ("Jaccard index of distinct layers" in shown) == (count <= terminal.MOST_POSITIONS)
    assert main(["graph", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == count
    assert sorted(found["order"]) == sorted(names)
    assert len(found["jaccard"]) == count
    assert found["growth"][-1]["unique"] == count + 3
    assert found["holes"] == []


def test_the_command_takes_some_of_the_models(tmp_path: Path, capsys) -> None:
    written(tmp_path, MODELS)
    assert main(["graph", str(tmp_path), "--only", "a:*", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == 2


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--only", "c:*"], "no model of"),
        (["--batch", "8"], "not for a folder of graphs"),
        (["--save", "x.json"], "not for a folder of graphs"),
        (["--rewrite"], "--rewrite: only for one model"),
        (["--sequence", "64"], "--sequence: only for one model"),
        (["--by", "export"], "--by: only for one model"),
        (["--decode", "8"], "--decode: only for one model"),
        (["--size", "n=8"], "--size: only for one model"),
        (["--out", "x"], "--out is for --all"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, typed: list[str], says: str, capsys) -> None:
    written(tmp_path, MODELS)
    assert main(["graph", str(tmp_path), *typed]) != 0
    assert says in capsys.readouterr().err


def test_the_page_shows_the_grid_in_the_order_of_the_clustering(tmp_path: Path, capsys) -> None:
    written(tmp_path / "corpus", {**MODELS, "a:</script><b>": [5]})
    page = tmp_path / "page.html"
    assert main(["graph", str(tmp_path / "corpus"), "--html", str(page)]) == 0
    content = page.read_text(encoding="utf-8")
    data = json.loads(re.findall(r'id="data">(.*?)</script>', content, re.DOTALL)[0])
    charts = [part["chart"] for part in data["sections"][0]["parts"] if "chart" in part]
    assert [each["kind"] for each in charts] == ["lines", "grid"]
    grid = charts[1]
    assert [each["name"] for each in grid["series"]] == grid["at"]
    small, large = grid["at"].index("a:small"), grid["at"].index("a:large")
    assert abs(small - large) == 1
    assert grid["series"][small]["values"][large] == 0.75
