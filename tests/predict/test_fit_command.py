"""`xsp predict fit | at | next`: tables and runs of any kind, a fit that is kept, and one line for what is none."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from receivers import write_run

from xsp import table
from xsp.cli import main

pytest.importorskip("scipy", reason="the generic model needs SciPy")

ROWS = [
    {"kind": kind, "batch": batch, "threads": threads, "step_ms": scale * batch**0.9 * threads**-0.5 + 2.0}
    for kind, scale in (("cnn", 1.0), ("mlp", 0.3)) for batch in (1, 4, 16, 64) for threads in (1, 2)
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same table in four forms, and a fit."""
    made = tmp_path_factory.mktemp("fit")
    with (made / "t.csv").open("w", newline="") as file:
        written = csv.DictWriter(file, list(ROWS[0]))
        written.writeheader()
        written.writerows(ROWS)
    (made / "t.json").write_text(json.dumps(ROWS))
    (made / "t.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    con = table.connect()
    source, target = table.path_literal(made / "t.json"), table.path_literal(made / "t.parquet")
    con.execute(f"COPY (SELECT * FROM read_json({source})) TO {target}")
    con.close()
    assert main(["predict", "fit", str(made / "t.csv"), "--resamples", "20", "-o", str(made / "fit.json")]) == 0
    return made


def told(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    return commands.shown(capsys, "predict", *typed)


def refused(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    return commands.refused(capsys, "predict", *typed)


def test_all_forms_of_a_table_are_the_same_rows(place: Path) -> None:
    from xsp.predict import configurations

    tables = [configurations.of_rows(configurations.read(place / f"t.{end}")) for end in
              ("csv", "json", "jsonl", "parquet")]  # fmt: skip
    for each in tables[1:]:
        assert each.factors == tables[0].factors
        assert each.seconds == pytest.approx(tables[0].seconds)


def test_a_fit_is_shown_kept_and_asked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = json.loads(told(capsys, "at", "batch=8,1024", "threads=2", "kind=mlp", "--fit", str(place / "fit.json"),
                         "--format", "json"))  # fmt: skip
    near, far = at["points"]
    assert at["model"] == "generic"
    assert near["step_s"] == pytest.approx((0.3 * 8**0.9 * 2**-0.5 + 2.0) / 1e3, rel=0.1)
    assert near["low_s"] <= near["step_s"] <= near["high_s"]
    assert near["extrapolated"] == []
    assert far["extrapolated"] == ["batch is 16 times above the recorded values (64)"]
    page = told(capsys, "at", "batch=1024", "threads=2", "kind=mlp", "--fit", str(place / "fit.json"))
    assert "extrapolated (!): batch is 16 times above" in page
    assert max(map(len, page.splitlines())) < 80


@pytest.mark.slow
def test_the_page_of_a_fit_has_all_models_and_fits_a_terminal(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = told(capsys, "fit", str(place / "t.csv"), "--intrinsic", "kind", "--resamples", "20")
    for name in ("generic", "power law", "linear", "nearest", "mean", "exponent of batch", "a of kind=cnn"):
        assert name in page
    assert max(map(len, page.splitlines())) < 80
    assert (tmp_path / "xsp-fit.json").is_file()
    assert "kind=mlp" in told(capsys, "at", "batch=8", "threads=2", "kind=mlp")


@pytest.mark.slow
def test_what_to_record_next_was_not_recorded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has been recorded: record other values" in told(capsys, "next", "--fit", str(place / "fit.json"))
    some = place / "some.csv"
    lines = (place / "t.csv").read_text().splitlines()
    some.write_text("\n".join(lines[:8] + lines[9:]))
    told(capsys, "fit", str(some), "--resamples", "20", "-o", str(place / "some.json"))
    found = json.loads(told(capsys, "next", "--fit", str(place / "some.json"), "--format", "json"))
    kind, batch, threads, _ = lines[8].split(",")
    assert [each["configuration"] for each in found["next"]] == [
        {"kind": kind, "batch": float(batch), "threads": float(threads)}
    ]


@pytest.mark.slow
def test_a_value_may_have_a_unit_as_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "memory,step_ms\n" + "".join(f"{size} GiB,{3 * size}\n" for size in (1, 2, 3, 4, 6, 8, 12, 16))
    (tmp_path / "t.csv").write_text(text)
    fit = str(tmp_path / "fit.json")
    told(capsys, "fit", str(tmp_path / "t.csv"), "--resamples", "20", "-o", fit)
    points = json.loads(told(capsys, "at", "memory=5120 MiB,5 GiB,5", "--fit", fit, "--format", "json"))["points"]
    assert [point["step_s"] for point in points] == pytest.approx([points[2]["step_s"]] * 3)
    assert "not a number above 0, or one with a unit such as GiB" in refused(capsys, "at", "memory=5 h", "--fit", fit)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("at", "batch=8"), "no value is given for kind, threads"),
        (("at", "batch=8", "threads=1", "kind=rnn"), "kind=rnn was never recorded; there are cnn, mlp"),
        (("at", "batch=8", "threads=1", "kind=cnn", "lr=1"), "lr is not in the fit"),
        (("at", "batch=0", "threads=1", "kind=cnn"), "not a number above 0"),
        (("at", "batch=x", "threads=1", "kind=cnn"), "batch=x is not a number above 0"),
        (("at", "batch=8 GiB", "threads=1", "kind=cnn"), "batch=8 GiB is not a number above 0"),
        (("at", "batch=nan", "threads=1", "kind=cnn"), "not a number above 0"),
        (("at", "batch=1", "batch=2", "threads=1", "kind=cnn"), "batch is given twice"),
        (("at", "batch=" + ",".join(map(str, range(1, 1002))), "threads=1", "kind=cnn"), "combinations"),
        (("next", "batch=8"), "no value is given for kind, threads"),
        (("next", "batch=1,2", "threads=1", "kind=cnn"), "one configuration"),
    ],
)
def test_what_was_never_recorded_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *typed, "--fit", str(place / "fit.json"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.csv", None, "does not exist"),
        ("a.txt", "batch", "not a known kind of table"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "3", "not a list of objects"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv, line 3: has more values than there are names"),
        ("a.csv", "", "a.csv: there are no rows"),
        ("a.csv", "batch,step_ms\n", "a.csv: there are no rows"),
        ("a.csv", "batch;step_ms\n1;0,5\n", "columns are separated by ';'"),
        ("a.tsv", "batch,step_ms\n1,2\n", "columns are separated by ','"),
        ("a.csv", "batch,batch,ms\n1,2,3\n", "two columns are called batch"),
        ("a.parquet", "no", "not Parquet"),
        ("a.csv", "batch,step_ms\n" + "1,1\n" * 5, "no column has more than one value"),
        ("a.csv", "batch,step_ms\n1,1\n2,2\n", "2 groups of configurations"),
    ],
)
def test_what_is_no_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert said in refused(capsys, "fit", str(tmp_path / name), "-o", str(tmp_path / "fit.json"))


def test_spaces_around_names_and_values_of_a_table_are_none_of_them(tmp_path: Path) -> None:
    from xsp.predict import configurations

    (tmp_path / "a.csv").write_text("batch , kind, step_ms\n8 , one, 1.5 \n16, two, 2.5\n")
    found = configurations.of_rows(configurations.read(tmp_path / "a.csv"))
    assert [each.name for each in found.factors] == ["batch", "kind"]
    assert found.seconds.tolist() == pytest.approx([1.5e-3, 2.5e-3])
    assert sorted(found.factor("kind").levels) == ["one", "two"]


def test_a_file_that_is_no_fit_is_neither_read_nor_replaced(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    for content in ("{}", "[]", "no", '{"xsp_fit": 1}', (place / "fit.json").read_text().replace('"rows"', '"r"')):
        mine.write_text(content)
        assert "not a fit of xsp" in refused(capsys, "at", "batch=8", "--fit", str(mine))
    mine.write_text("{}")
    assert "is not a fit of xsp: name another" in refused(capsys, "fit", str(place / "t.csv"), "-o", str(mine))
    assert mine.read_text() == "{}"
    assert "no such fit: make one" in refused(capsys, "at", "batch=8", "--fit", str(tmp_path / "no.json"))


@pytest.mark.slow
def test_runs_are_rows_with_the_options_of_their_programs(tmp_path: Path) -> None:
    from xsp.predict import fromruns

    told: dict[str, Any] = {"typed": ["run", "train.py", "--width", "64", "--fast", "--lr=0.1", "--out", "x",
                                     "--shift", "-1.5", "--name="]}  # fmt: skip
    for number, batch in enumerate((8, 16), 1):
        write_run(tmp_path / "runs" / f"r{batch}", number=number, batch_size=batch, **told)
    write_run(tmp_path / "runs" / "empty", steps=0, number=3)
    rows, left = fromruns.rows([str(tmp_path / "runs")])
    assert [each["batch"] for each in rows] == [16, 8]
    assert {name: rows[0][name] for name in ("width", "fast", "lr", "ranks", "shift", "name")} == {
        "width": "64", "fast": "yes", "lr": "0.1", "ranks": 1, "shift": "-1.5", "name": ""
    }  # fmt: skip
    assert rows[0]["step_s"] == pytest.approx(1e-3)
    assert "out" not in rows[0]
    assert len(left) == 1
    typed = ["run", "torchrun", "--nproc-per-node", "2", "--master-port=29501", "train.py", "--width", "64"]
    write_run(tmp_path / "runs" / "slow", number=4, batch_size=8, typed=typed)
    rows, _ = fromruns.rows([str(tmp_path / "runs")])
    assert sorted(each["fast"] for each in rows) == ["no", "yes", "yes"]
    assert not any("nproc" in name or "port" in name for each in rows for name in each)
    assert "empty" in left[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda fit: fit["split"].update(extrinsic=["sort"]),
        lambda fit: fit["fits"][0].update(extrinsic=["sort", "batch", "threads"]),
        lambda fit: fit["split"].update(each="kind"),
        lambda fit: fit["rows"]["values"]["batch"].__setitem__(0, -1.0),
        lambda fit: fit["factors"][1].update(low=0.0),
        lambda fit: fit.update(residuals=[]),
        lambda fit: fit.update(seed=-1),
    ],
)
def test_a_fit_that_somebody_edited_is_refused_in_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[dict[str, Any]], None]
) -> None:
    content = json.loads((place / "fit.json").read_text())
    edit(content)
    (tmp_path / "fit.json").write_text(json.dumps(content))
    said = refused(capsys, "at", "batch=8", "threads=1", "kind=cnn", "--fit", str(tmp_path / "fit.json"))
    assert "not a fit of xsp" in said


@pytest.mark.slow
def test_texts_with_commas_are_asked_and_what_has_one_value_may_be_omitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"layers": layers, "batch": batch, "tokens": 1048577 if layers == "64,64" else 2097151, "cpu": "one",
         "step_ms": len(layers) * batch**0.5}
        for layers in ("64,64", "128, 128,128") for batch in (1, 2, 4, 8, 16)
    ]  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(rows))
    fit = str(tmp_path / "fit.json")
    named = ["--extrinsic", "layers,batch,batch,tokens,cpu", "--resamples", "20"]
    assert "batch follows" not in told(capsys, "fit", str(tmp_path / "t.json"), *named, "-o", fit)
    typed = ["batch=2", "tokens=1048577", "--fit", fit]
    page = told(capsys, "at", "layers=64,64", *typed)
    assert "tokens=1048577" in page
    assert "layers=64,64" in page
    assert "cpu=one" in page
    assert "layers=128, 128,128" in told(capsys, "at", "layers=128,128,128", *typed)
    assert "layers=64 was never recorded" in refused(capsys, "at", "layers=64,128", *typed)


def test_an_index_without_a_name_and_lines_within_texts_are_no_obstacle(tmp_path: Path) -> None:
    from xsp.predict import configurations

    (tmp_path / "a.csv").write_text(",batch,step_ms,\n0,8,1.5,\n1,16,2.5,\n")
    found = configurations.of_rows(configurations.read(tmp_path / "a.csv"))
    assert [each.name for each in found.factors] == ["batch"]
    lines = [json.dumps({"kind": f"a\u2028{n}\x85", "step_ms": n}, ensure_ascii=False) for n in (1, 2)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    assert len(configurations.read(tmp_path / "a.jsonl")) == 2


def test_without_scipy_a_configuration_is_refused_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    typed = ("at", "batch=8", "threads=1", "kind=cnn", "--fit", str(place / "fit.json"))
    assert "needs SciPy" in refused(capsys, *typed)


def test_the_model_that_a_program_was_told_to_train_is_not_the_name_of_its_run(tmp_path: Path) -> None:
    from xsp.predict import fromruns

    for number, model in enumerate(("resnet50", "vgg16"), 1):
        write_run(tmp_path / "runs" / f"train-{number}", number=number, typed=["run", "train.py", "--model", model])
    write_run(tmp_path / "runs" / "zero", number=3, typed=["run", "train.py"])
    rows, _ = fromruns.rows([str(tmp_path / "runs")])
    assert [each["model"] for each in rows] == ["resnet50", "vgg16", "zero"]


@pytest.mark.slow
def test_a_damaged_run_is_left_out_and_the_ranks_of_a_job_are_one_row(tmp_path: Path) -> None:
    from xsp.predict import fromruns

    runs = tmp_path / "runs"
    write_run(runs / "good", batch_size=8)
    write_run(runs / "cut", number=2, batch_size=16)
    (runs / "cut" / "run.json").write_text('{"format": 1, "na')
    write_run(runs / "gone", number=3, batch_size=16)
    (runs / "gone" / "run.json").unlink()
    for rank in (0, 1):  # as torchrun alone leaves them
        write_run(runs / "job" / f"rank-000{rank}", number=4 + rank, batch_size=32, rank=rank, world_size=2)
    rows, left = fromruns.rows([str(runs)])
    assert sorted((each["batch"], each["ranks"]) for each in rows) == [(8, 1), (32, 2)]
    assert sorted(Path(each.split()[0]).name for each in left) == ["cut", "gone"]
    assert [each["ranks"] for each in fromruns.rows([str(runs / "job")])[0]] == [2]
