"""The commands as a user types them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from xsp import plugins
from xsp.cli import COMMANDS, main, names, progress
from xsp.report import firstscreen

pytest.importorskip("torch")

MODEL = """
import torch
def build(batch):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.zeros(batch, 8)
"""


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run of a small model, recorded by the command itself."""
    place = tmp_path_factory.mktemp("cli")
    (place / "small.py").write_text(MODEL)
    assert main(["profile", f"{place}/small.py:build", "--repeats", "3", "--quiet", "--out", f"{place}/run"]) == 0
    return place / "run"


@pytest.fixture(scope="module")
def sweep_directory(run_directory) -> Path:
    place = run_directory.parent
    command = ["profile", f"{place}/small.py:build", "--batch", "1,2", "--levels", "M", "--repeats", "3", "--quiet"]
    assert main([*command, "--out", f"{place}/sweep"]) == 0
    return place / "sweep"


def test_profile_prints_what_one_wants_first_and_what_to_type_next(run_directory, capsys, monkeypatch):
    place = run_directory.parent
    monkeypatch.setattr(plugins, "remarks", lambda trace: [f"advice: of {trace.name}"])
    assert main(["profile", f"{place}/small.py:build", "--repeats", "3", "--out", f"{place}/shown"]) == 0
    out, err = capsys.readouterr()
    for word in ("an iteration", "forward", "grade", "stored in", "xsp advise", "xsp report", "xsp analyze"):
        assert word in out
    assert len(out.strip().splitlines()) <= firstscreen.MOST_LINES
    assert "small batch 1" in err
    assert err.endswith("\nadvice: of small\n")


@pytest.mark.parametrize("name", ["report", "predict", "predict fit"])
def test_a_command_does_not_import_the_others(name):
    """Importing all of them takes 0.2 s, which each command would pay before its work."""
    code = (
        f"import sys\nfrom xsp.cli import main\ntry:\n    main({[*name.split(), '--help']})\n"
        "except SystemExit:\n    print(*(each for each in sys.modules if each.startswith('xsp.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # the module of `import` is import_, since the name is a keyword
    imported = {each.removeprefix("xsp.cli.").rstrip("_") for each in done.stdout.splitlines()[-1].split()}
    assert imported & set(names()) == {name.split()[0]}


def test_an_interrupt_before_anything_was_done_is_one_line(monkeypatch, capsys):
    """As while torch is imported, where no run has a place yet."""

    def interrupted(_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("xsp.cli.profile"), "run", interrupted)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert main(["profile", "torchvision:resnet18"]) == 130
    assert capsys.readouterr().err == "xsp: interrupted\n"


def test_no_advice_is_given_where_none_is_wanted(run_directory, capsys, monkeypatch):
    monkeypatch.setattr(plugins, "remarks", lambda _: pytest.fail("asked for remarks"))
    progress.show_result(run_directory, remarks=False)
    assert "stored in" in capsys.readouterr().out


def test_analyze_lists_what_can_be_asked(run_directory, capsys):
    assert main(["analyze", str(run_directory), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:4] == ["account", "phases", "phases-over-time", "loop"]


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_analyze_prints_in_each_format(run_directory, capfd, form):
    assert main(["analyze", str(run_directory), "a5", "--format", form]) == 0
    out, _ = capfd.readouterr()
    if form == "json":
        assert [row["type"] for row in json.loads(out)] == ["Linear", "ReLU"]
    else:
        assert "Linear" in out


def test_options_stand_before_behind_and_between_names(run_directory, capsys):
    assert main(["analyze", "--format", "csv", str(run_directory), "--limit", "3", "a5"]) == 0
    assert "Linear" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["analyze", str(run_directory), "a5", "--limit", "0"])
    assert capsys.readouterr().err.startswith("xsp: error: argument --limit: '0': give a number above 0")


def test_analyze_writes_a_file(run_directory, tmp_path):
    target = tmp_path / "layers.parquet"
    assert main(["analyze", str(run_directory), "A2", "--format", "parquet", "--out", str(target)]) == 0
    import duckdb

    assert duckdb.sql(f"SELECT name FROM '{target}' ORDER BY layer_index").fetchall() == [
        ("Sequential",),
        ("0",),
        ("1",),
    ]


@pytest.mark.slow
def test_analyze_goes_over_the_runs_of_a_sweep(sweep_directory, capfd):
    assert main(["analyze", str(sweep_directory), "A1", "--format", "csv"]) == 0
    out, _ = capfd.readouterr()
    assert [line.split(",")[:2] for line in out.splitlines()] == [
        ["run", "batch_size"], ["batch-0001", "1"], ["batch-0002", "2"],
    ]  # fmt: skip
    assert main(["analyze", str(sweep_directory), "A1", "--format", "json"]) == 0
    assert [row["batch_size"] for row in json.loads(capfd.readouterr().out)] == [1, 2]


@pytest.mark.slow
def test_analyze_writes_several_tables_so_that_each_can_be_read(run_directory, tmp_path, capfd):
    assert main(["analyze", str(run_directory), "A5", "health", "ops", "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found) == ["A5", "health", "ops"]
    assert {"severity", "subject", "finding", "best_grade"} == set(found["health"][0])
    for form in ("csv", "json", "parquet"):
        command = ["analyze", str(run_directory), "A5", "health", "--format", form, "--out", f"{tmp_path}/{form}"]
        assert main(command) == 0
        assert sorted(path.name for path in (tmp_path / form).iterdir()) == [f"A5.{form}", f"health.{form}"]
    assert (tmp_path / "csv" / "A5.csv").read_text().startswith("type,layers,percent_of_layers\n")
    assert json.loads((tmp_path / "json" / "A5.json").read_text()) == found["A5"]
    capfd.readouterr()


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_what_is_doubtful_can_be_asked_as_any_table(run_directory, capfd, form):
    assert main(["analyze", str(run_directory), "health", "--format", form]) == 0
    assert " ".join(capfd.readouterr().out.split()).count("spans of the merged") == 1


def test_a_refused_analysis_says_why_and_fails(sweep_directory, capsys):
    assert main(["analyze", f"{sweep_directory}/batch-0001", "A2"]) == 1
    assert "needs the layer level" in capsys.readouterr().err


@pytest.mark.slow
def test_sweep_names_the_optimum_by_each_reading_and_by_a_target(run_directory, tmp_path, capsys):
    model = f"{run_directory.parent}/small.py:build"
    # so far apart that noise cannot turn the order of the throughputs
    words = ["--batch", "1,64", "--repeats", "3", "--latency-target", "1000", "--out", f"{tmp_path}/s"]
    command = ["sweep", model, *words]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "optimal batch size" in out
    assert "latency target 1000 ms: batch size 64" in out


@pytest.mark.slow
def test_report_writes_one_page(run_directory, tmp_path, capsys):
    assert main(["report", str(run_directory), "--out", f"{tmp_path}/page.html"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_doctor_lists_every_collector(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("modules", "torchops", "onednn", "training", "dataloading"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["profile", "torchvision:resnet5"], "did you mean"),
        (["profile", "small", "--batch", "0"], "--batch '0'"),
        (["profile", "small", "--input", "3by3"], "--input '3by3'"),
        (["profile", "x.py:y", "--levels", "L/M"], "write M, M/L or M/L/G"),
        (["profile", "x.py:y", "--repeats", "0"], "--repeats 0"),
        (["analyze", "nowhere"], "no such file or directory"),
        (["analyse", "{run}"], "did you mean analyze?"),
        (["analyze", "{run}", "leger"], "did you mean ledger"),
        (["analyze", "{run}", "zzz"], "there is no analysis 'zzz'; there are account, phases"),
        (["analyze", "{run}", "--format", "csv"], "need the name of an analysis"),
        (["export", "{run}", "--format", "chrom", "-o", "x"], "did you mean chrome?"),
        (["export", "{run}", "--format", "csv", "--table", "merge", "-o", "x"], "did you mean merged"),
        (["analyze", "{run}", "A2", "--format", "parquet"], "--out FILE"),
        (["analyze", "{run}", "A2", "A6", "--format", "csv"], "give --out FOLDER for a file each"),
        (["analyze", "{run}", "A2", "A6", "--format", "csv", "--out", "{run}/run.json"], "go into a folder"),
        (["report", "{run}", "--out", "/proc/nowhere/page.html"], "cannot be written"),
        (["analyze", "{run}", "A2", "--format", "csv", "--out", "/proc/nowhere/x.csv"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(run_directory, tmp_path, monkeypatch, capsys, command, says):
    monkeypatch.chdir(tmp_path)
    assert main([part.format(run=run_directory) for part in command]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("xsp: ")]
    assert len(err) == 1
    assert says in err[0]
    assert not (tmp_path / "runs").exists()


def test_without_a_command_it_shows_what_there_is(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_that_fits_a_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"xsp {name}" in out.partition("examples:")[2]
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_a_wrong_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", "run", "--format", "xml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[0].startswith("xsp: error: argument --format")


def test_an_unknown_option_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, prog in [(["bench", "torchvision:resnet18", "--devise", "cpu"], "xsp bench"), (["--devise"], "xsp")]:
        assert main(typed) == 2
        assert f"see `{prog} --help`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "commands"),
    [
        ("--batch", ("graph", "bench", "bound", "advise")),
        *((each, ("graph", "bench", "bound", "advise", "profile", "sweep")) for each in ("--train", "--input")),
        ("--sequence", ("graph", "bench", "bound", "advise", "profile", "sweep")),
    ],
)
def test_an_option_of_a_models_step_is_the_same_in_every_command(option: str, commands: tuple[str, ...]) -> None:
    """Same help, type and metavar; the default too, but that `advise` leaves a run its own length."""
    found = {}
    for name in commands:
        parser = argparse.ArgumentParser()
        import_module(f"xsp.cli.{name}").arguments(parser)
        action = next(each for each in parser._actions if option in each.option_strings)
        default = 128 if name == "advise" and option == "--sequence" else action.default
        found[name] = action.help, action.type, action.metavar, default
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["--nosuch"], "unrecognized arguments: --nosuch; see `xsp --help`"),
        (["-x", "--nosuch=3"], "unrecognized arguments: -x --nosuch=3; see `xsp --help`"),
    ],
)
def test_an_unknown_option_before_any_command_is_named(command: list[str], says: str, capsys) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err == f"xsp: error: {says}\n"


def test_an_interrupt_is_one_line_and_the_code_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xsp.graph.sources.of", interrupted)
    assert main(["graph", "torchvision:resnet18"]) == 130
    assert capsys.readouterr().err == "xsp: interrupted\n"
    monkeypatch.setattr("xsp.graph.corpus.collect", interrupted)
    assert main(["graph", "--all", "micro", "--out", str(tmp_path / "corpus")]) == 130
    assert "run it again to continue" in capsys.readouterr().err


def test_spark_reads_all_kinds_of_steps_and_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "runs/none", "stragglers", "--engine", "spark", "--kind", "1"]) == 2
    assert "omit --kind and --skip-damaged" in capsys.readouterr().err
