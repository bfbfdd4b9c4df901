"""Programs that xsp runs in turns itself: what is typed, what fails, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from realparts import poll

from xsp.cli import main, options
from xsp.comparison import commands, turns
from xsp.errors import UsageError

STEPS = """
import sys, time

def work():
    inner(float(sys.argv[1]))

def inner(seconds):
    time.sleep(seconds)

for _ in range(14):
    work()
"""

NET = """
import sys, time, torch

class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(float(sys.argv[1]))
        return torch.relu(x)

net = torch.nn.Sequential(torch.nn.Linear(64, 64), Slow(), torch.nn.Linear(64, 64))
with torch.no_grad():
    for _ in range(24):
        net(torch.ones(8, 64))
"""

TYPED = "xsp run --step work steps.py"
SHORT, LONG = 0.002, 0.1
"""Seconds of a step before and after: so far apart that no load of the machine hides it in a few turns."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program whose steps take as long as it is told, and which needs no torch."""
    (tmp_path / "steps.py").write_text(STEPS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what is typed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "verb", "args"),
    [
        ("python train.py --epochs 1", "run", ("train.py", "--epochs", "1")),
        ("python3.12 -m pkg.train -x", "run", ("-m", "pkg.train", "-x")),
        ("train.py", "run", ("train.py",)),
        ("torchrun --nproc-per-node 2 train.py", "run", ("torchrun", "--nproc-per-node", "2", "train.py")),
        ("xsp run --step work train.py --out x", "run", ("--step", "work", "train.py", "--out", "x")),
        ("xsp run -m pkg.train -o mine", "run", ("-m", "pkg.train", "-o", "mine")),
        ("xsp run train.py -omine", "run", ("train.py", "-omine")),
        ("xsp run python -Wignore train.py", "run", ("python", "-Wignore", "train.py")),
        ("xsp run mytool -q data", "run", ("mytool", "-q", "data")),
        ("xsp run --every 3 mytool --out x", "run", ("--every", "3", "mytool", "--out", "x")),
        ("xsp run -- mytool --levels 3", "run", ("--", "mytool", "--levels", "3")),
        ("mytool -o x", "run", ("mytool", "-o", "x")),
        ("torchvision:resnet18 --batch 8", "profile", ("torchvision:resnet18", "--batch", "8")),
        ("nets/mine.py:build", "profile", ("nets/mine.py:build",)),
        ("xsp profile timm:vit_tiny", "profile", ("timm:vit_tiny",)),
        ("xsp profile --batch 8 -- timm:vit_tiny", "profile", ("--batch", "8", "--", "timm:vit_tiny")),
    ],
)
def test_a_command_or_a_model_is_read_as_it_is_typed(typed: str, verb: str, args: tuple[str, ...]) -> None:
    result = commands.program(typed)
    assert (result.verb, result.args, result.python) == (verb, args, (sys.executable,))
    options.check_in_turns(result)


def test_an_interpreter_with_its_place_its_options_and_variables_before_it_are_kept() -> None:
    result = commands.program("A=1 B='x y' bin/python -u -X dev 'my train.py' 2")
    assert result.settings == (("A", "1"), ("B", "x y"))
    assert result.python == (str(Path("bin/python").absolute()), "-u", "-X", "dev")
    assert result.args == ("my train.py", "2")
    assert result.name == "my-train"
    assert commands.program("torchvision:resnet18").name == "resnet18"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "no command"),
        ("A=1", "no command"),
        ("python", "names no script"),
        ("python -m", "names no script"),
        ("python -c 'print(1)'", "put the program into a file"),
        ("python 'train.py", "No closing quotation"),
        ("xsp run --out here train.py", "omit --out"),
        ("torchvision:resnet18 --levels=M", "omit --levels"),
        ("xsp run -oruns/x train.py", "omit -o;"),
        ("xsp run -o=runs/x train.py", "omit -o;"),
        ("torchvision:resnet18 -oruns/x", "omit -o;"),
        ("xsp profile -qoruns/x micro:mlp", "omit -q;"),
        ("xsp run --every 3 -q mytool", "omit -q;"),
        ("xsp run --lev M train.py", "unrecognized arguments: --lev; see `xsp run --help`"),
        ("torchvision:resnet18 --lev M", "omit --levels;"),
        ("xsp run --every", "--every: expected one argument"),
    ],
)
def test_what_cannot_be_run_in_turns_is_said(typed: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options.check_in_turns(commands.program(typed))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--turns", "5", "python a.py"], "takes two commands"),
        (["--turns", "5", "--revisions", "a", "b", "x.py", "y.py"], "takes one command"),
        (["--turns", "5", "x.py", "--with", "y.py"], "omit one of them"),
        (["--revisions", "a", "b", "x.py"], "needs --turns"),
        (["a", "b", "--levels", "M"], "needs --turns"),
        (["--turns", "2", "x.py", "y.py"], "at least 3"),
        (["--turns", "5", "xsp run -q x.py", "y.py"], "omit -q"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    typed: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *typed]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "runs").exists()


# --- what is run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slower_program_is_found_after_a_few_turns_and_its_runs_are_kept(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = f"{TYPED} {SHORT}", f"{TYPED} {LONG}"
    typed = ["compare", "--turns", "5", before, after, "--levels", "M", "--fail-if-slower", "5%"]
    assert main([*typed, "--format", "json"]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    turns = result["runs"]["a"]  # three, unless the machine is so loaded that they do not tell
    assert (result["repeats"], result["runs"]) == ("turn", {"a": turns, "b": turns})
    assert 3 <= turns <= 5
    assert result["rows"][0]["verdict"] == "slower"
    assert f"known after {turns} turns" in printed.err
    out = here / "runs" / "compare-steps"
    of_a, of_b = ([str(out / f"{side}-{k:02d}") for k in range(1, turns + 1)] for side in "ab")
    assert sorted(str(path) for path in out.glob("[ab]-*")) == [*of_a, *of_b]
    assert json.loads((out / "run.json").read_text())["sides"]["b"] == after
    assert main(["compare", *of_a, "--with", *of_b, "--fail-if-slower", "5%"]) == 1


@pytest.mark.slow
def test_a_program_that_fails_ends_it_with_the_end_of_what_it_printed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.py").write_text("print('so far', flush=True)\nraise SystemExit(3)\n", encoding="utf-8")
    (here / "none.py").write_text("print('no step')\n", encoding="utf-8")
    assert main(["compare", "--turns", "3", "python bad.py", "python bad.py"]) == 2
    message = capsys.readouterr().err
    assert "'python bad.py' ended with exit code 3" in message
    assert "  so far" in message
    assert main(["compare", "--turns", "3", "python none.py", "python none.py", "--out", "runs/compare-bad"]) == 2
    assert "a run is there already" in capsys.readouterr().err
    assert main(["compare", "--turns", "3", "python none.py", "python none.py", "--out", "x", "-q"]) == 2
    assert "left no run to compare" in capsys.readouterr().err
    assert main(["compare", "--turns", "3", "no/python a.py", "no/python b.py", "-q"]) == 2
    assert "cannot be started" in capsys.readouterr().err


def interrupted(process: subprocess.Popen[str], begun: Callable[[], bool], number: int) -> str:
    """Send a signal once it has begun, and return what the process said on stderr."""
    poll(begun)
    process.send_signal(number)
    message = process.communicate(timeout=90)[1]
    assert process.returncode == 130, message
    return message


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_program_and_removes_the_trees_of_revisions(here: Path, number: int) -> None:
    repository(here)
    sleeping = here / "steps.py"
    sleeping.write_text(STEPS + "\nprint('slept', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    git(here, "commit", "-qam", "after")
    command = [sys.executable, "-m", "xsp.cli", "compare", "--turns", "3", "--revisions", "HEAD", "HEAD"]
    command += [f"{TYPED} 0.001", "--levels", "M"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(here)}
    ) as process:
        output = here / "runs" / "compare-steps" / "output"

        def slept() -> bool:
            return any("slept" in path.read_text() for path in output.glob("*.txt"))

        assert "interrupted" in interrupted(process, slept, number)
    assert list(here.glob("xsp-revisions-*")) == []
    assert len(git(here, "worktree", "list").splitlines()) == 1
    assert git(here, "status", "--porcelain", "--untracked-files=no") == ""


SPAWNS = """
import subprocess, sys, time

child = '''
import signal, time

signal.signal(signal.SIGINT, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(20)
print("went on", flush=True)
'''
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""


def test_a_subprocess_that_ignores_interrupts_ends_with_the_program() -> None:
    command = [sys.executable, "-c", SPAWNS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        turns._end(process)
        assert process.stdout.read() == b""  # until the subprocess has ended, too


# --- revisions --------------------------------------------------------------------------------------------


def git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path) -> None:
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "steps.py")
    git(folder, "commit", "-qm", "before")


@pytest.mark.slow
def test_two_revisions_run_in_trees_of_their_own_and_the_checkout_stays_as_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module that the program imports is that of the revision, also where the checkout stands in the path."""
    (here / "slowness.py").write_text(f"SECONDS = {SHORT}\n", encoding="utf-8")
    text = STEPS.replace("import sys, time", "import sys, time, slowness").replace(
        "float(sys.argv[1])", "slowness.SECONDS"
    )
    (here / "bench").mkdir()
    (here / "bench" / "steps.py").write_text(text, encoding="utf-8")
    git(here, "init", "-q", "-b", "main")
    git(here, "add", "slowness.py", "bench")
    git(here, "commit", "-qm", "before")
    (here / "slowness.py").write_text(f"SECONDS = {LONG}\n", encoding="utf-8")
    git(here, "commit", "-qam", "after")
    (here / "slowness.py").write_text("SECONDS = 'not this one'\n", encoding="utf-8")
    monkeypatch.chdir(here / "bench")
    monkeypatch.setenv("PYTHONPATH", str(here))
    typed = ["compare", "--turns", "3", "--revisions", "HEAD~1", "main", TYPED, "--levels", "M", "--format", "json"]
    assert main([*typed, "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["a"], result["b"]) == (f"HEAD~1: {TYPED}", f"main: {TYPED}")
    assert result["rows"][0]["verdict"] == "slower"
    assert "not this one" in (here / "slowness.py").read_text()
    assert len(git(here, "worktree", "list").splitlines()) == 1


def test_what_is_no_revision_or_no_repository_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["compare", "--turns", "3", "--revisions", "HEAD", "nowhere", TYPED]
    assert main(typed) == 2
    assert "not a git repository" in capsys.readouterr().err
    repository(here)
    assert main(typed) == 2
    assert "'nowhere' is not a revision" in capsys.readouterr().err


# --- a planted layer --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_planted_slow_layer_is_found_by_name_in_turns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    (here / "net.py").write_text(NET, encoding="utf-8")
    typed = ["compare", "--turns", "5", f"python net.py {SHORT}", f"python net.py {LONG}", "--format", "json", "-q"]
    assert main(typed) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    slow = [row for row in rows if row["section"] == "layer" and row["verdict"] == "slower" and row["change_ms"] > 50]
    assert [(row["name"], row["type"]) for row in slow] == [("1", "Slow")]
