"""What is to be run, as one would type it after `xsp run`."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import exit_code
from depth import deep

import xsp
from xsp.cli import __main__ as entry
from xsp.errors import UsageError
from xsp.launch import program, ranks
from xsp.launch import run as launched
from xsp.launch.program import LaunchedProgram, OtherInterpreter, parse_program
from xsp.launch.run import Launch
from xsp.record.settings import Settings

PROGRAM = """
import json, sys

def train():
    pass

def main():
    for _ in range(12):
        train()
    print(json.dumps([sys.argv, sys.path[0], __name__, __package__, __spec__ and __spec__.name, sys.flags.optimize]))

if __name__ == "__main__":
    main()
"""
OPTIONS = ("run", "-q", "--step", "train", "--levels", "M", "--warmup", "0", "--no-samples", "--out", "out")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same program in all forms that Python runs."""
    place = tmp_path_factory.mktemp("programs")
    for name in ("train.py", "pkg/train.py", "pkg/sub/__main__.py", "app/__main__.py", "sub dir/train.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(PROGRAM)
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py"):
        (place / name).touch()
    with zipfile.ZipFile(place / "app.pyz", "w") as packed:
        packed.writestr("__main__.py", PROGRAM)
    (place / "script").write_text(f"#!/usr/bin/env python3\n{PROGRAM}")
    (place / "script").chmod(stat.S_IRWXU)
    return place


def path() -> str:
    """Return a PATH on which this Python comes first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def ran(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path()}
    return subprocess.run(words, cwd=place, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "-m pkg.train -m --out mine",
        *(
            deep(words)
            for words in (
                "train.py --epochs 1",
                "train.py -- -m x",
                "-m pkg.sub 1",
                "app 1",
                "app.pyz 1",
                "./script 1",
                "-O -m pkg.train 1",
                "-uOO -W ignore -Xutf8 train.py -O",
                "-mpkg.train",
            )
        ),
    ],
)
def test_a_program_finds_all_as_it_does_under_python(place: Path, words: str) -> None:
    bare = ran(place, sys.executable, *words.split())
    typed = (["python"] if words.startswith(("-O", "-u", "-mp")) else []) + words.split()
    done = ran(place, sys.executable, "-m", "xsp.cli", *OPTIONS, "--overwrite", *typed)
    assert (done.returncode, done.stdout, done.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert xsp.load(place / "out").run["steps"]["seen"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train", "pkg.train:train"])
def test_a_function_of_the_module_that_is_run_is_that_of_the_main_module(place: Path, step: str) -> None:
    done = ran(place, sys.executable, "-m", "xsp.cli", *OPTIONS, "--overwrite", "--step", step, "-m", "pkg.train")
    assert done.returncode == 0, done.stderr
    assert xsp.load(place / "out").run["steps"]["seen"] == 12


@pytest.mark.slow
def test_the_options_of_python_hold_for_the_runs_that_follow(place: Path) -> None:
    words = ("--overwrite", "--once-each", "--levels", "M/L", "python", "-O", "train.py")
    done = ran(place, sys.executable, "-m", "xsp.cli", *OPTIONS, *words)
    assert [line.rpartition(", ")[2] for line in done.stdout.splitlines()] == ["1]"] * 3, done.stderr


def test_what_the_package_of_a_module_raises_is_the_programs_own_error(place: Path) -> None:
    (place / "broken").mkdir()
    (place / "broken" / "__init__.py").write_text("import gone_for_good\n")
    (place / "broken" / "train.py").touch()
    done = ran(place, sys.executable, "-m", "xsp.cli", *OPTIONS, "-m", "broken.train")
    assert done.returncode == 1
    assert done.stderr.endswith("\nModuleNotFoundError: No module named 'gone_for_good'\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("missing.py", "cannot be read (no such file or directory); give the path of a Python file"),
        ("pkg.train", "for a module type `xsp run -m pkg.train`"),
        ("python python -O train.py", "python: another interpreter, python, follows; name one of them"),
        ("-m train.py", "this is a file; type `xsp run train.py`"),
        ("notebook.ipynb", "jupyter nbconvert --to script notebook.ipynb"),
        ("job.sh", "for /bin/bash, not Python; put `xsp run` before the Python command"),
        ("uv run train.py", "type `uv run xsp run train.py`"),
        ("poetry run python train.py --lr 1", "type `poetry run xsp run python train.py --lr 1`"),
        ("mpirun -n 2 python train.py", "type `mpirun -n 2 xsp run python train.py`"),
        ("LR=1 python train.py", "put variables before xsp: `LR=1 xsp run python train.py`"),
        ("ls", "is not a Python program"),
        ("python", "name the program"),
        ("python -c pass", "python -c: this names no program to profile"),
        ("python -V", "python -V: this names no program to profile"),
        ("python -", "xsp does not read a program from standard input; write it to a file"),
        ("-", "xsp does not read a program from standard input; write it to a file"),
        ("/no/such/python train.py", "/no/such/python: there is no such interpreter"),
        ("python9.9 train.py", "python9.9 has no xsp; install it there, or type `xsp run train.py`"),
        ("accelerate config", "only `accelerate launch … train.py` runs a program"),
        (
            "torchrun --no-python python train.py",
            "--no-python is not supported; give a Python file",
        ),
    ],
)
def test_what_is_no_program_is_refused_in_one_line_that_says_what_to_type(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("it was taken for a program")

    if words.startswith("torchrun"):
        pytest.importorskip("torch")
    (place / "notebook.ipynb").write_text("{}")
    (place / "job.sh").write_text("#!/bin/bash\npython train.py\n")
    for module, name in ((os, "execv"), (launched, "launch"), (ranks, "launch")):
        monkeypatch.setattr(module, name, unexpected)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", path())
    code = exit_code("run", "--out", "never", *words.split())
    printed, said = capsys.readouterr()
    assert (code, printed) == (2, "")
    assert said.startswith("xsp: error: ")
    assert len(said.splitlines()) == 1
    assert says in said
    assert not (place / "never").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-m missing.train", "No module named 'missing'; the search starts in "),
        deep("-m pkg.missing", "there is no module of this name"),
        deep("-m pkg", "a package without __main__.py; name a module in it"),
        ("pkg", "has no __main__.py"),
    ],
)
def test_what_python_finds_no_program_in_is_refused_in_one_line(place: Path, words: str, says: str) -> None:
    done = ran(place, sys.executable, "-m", "xsp.cli", "run", "--out", "never", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("xsp: error: ")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert not (place / "never").exists()


def test_a_command_of_this_environment_is_the_script_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "trains"
    monkeypatch.setenv("PATH", str(tmp_path))
    for interpreter in (sys.executable, f"/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"):
        command.write_text(f"#!{interpreter}\n{PROGRAM}")
        command.chmod(stat.S_IRWXU)
        assert parse_program(["trains", "-x"]) == LaunchedProgram(str(command), ("-x",))
    command.write_text("#!/other/python\n")
    with pytest.raises(UsageError, match="runs in /other/python"):
        parse_program(["trains"])


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('#!/bin/sh\n\'\'\'exec\' "/a b/python3" "$0" "$@"\n', "/a b/python3"),
        ("#!/bin/sh\n'''exec' \"/a b\n", "/bin/sh"),
        ("#! /usr/bin/env -S python3\n", "python3"),
        ("#!\n", None),
        ("#!/usr/bin/env\n", None),
    ],
)
def test_the_interpreter_of_a_script_is_read_from_its_first_lines(
    tmp_path: Path, lines: str, named: str | None
) -> None:
    script = tmp_path / "s"
    script.write_text(lines)
    assert program._shebang(script) == named


def test_an_interpreter_without_xsp_is_said_and_another_with_it_is_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(place)
    assert parse_program([sys.executable, "train.py"]) == LaunchedProgram("train.py")
    fake = tmp_path / "python3"
    monkeypatch.setenv("PATH", str(tmp_path))
    for has, found in (
        (False, LaunchedProgram("train.py")),
        (True, OtherInterpreter(str(fake), (), LaunchedProgram("train.py"))),
    ):
        fake.write_text(f"#!/bin/sh\necho /other\necho {has}\n")
        fake.chmod(stat.S_IRWXU)
        assert parse_program(["python3", "train.py"]) == found
    said = capsys.readouterr().err
    assert said == f"xsp: {fake} has no xsp: the program runs in {sys.executable}\n"


def test_a_long_option_of_python_takes_its_value(place: Path) -> None:
    option = ("--check-hash-based-pycs", "always")
    script = LaunchedProgram(str(place / "train.py"), ("--lr", "1"))
    assert parse_program([sys.executable, *option, *script.words]) == OtherInterpreter(sys.executable, option, script)
    joined = ("--check-hash-based-pycs=always",)
    assert parse_program([sys.executable, *joined, *script.words]) == OtherInterpreter(sys.executable, joined, script)


def test_a_directory_that_is_named_by_dots_has_the_name_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "app" / "sub")
    assert [LaunchedProgram(each).name for each in (".", "..", "../sub/..", "../x.py")] == ["sub", "app", "app", "x"]
    how = Launch(LaunchedProgram(".", ("--lr", "1")), Settings())
    assert launched._typed_command(how) == ("run", ".", "--lr", "1")


def test_a_name_that_no_file_can_have_is_refused_as_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_program(["x" * 5000])


def test_a_launcher_that_cannot_be_imported_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('no compiler')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"deepspeed: cannot be imported \(RuntimeError: no compiler\)"):
        ranks.parse_job(["deepspeed", "train.py"])


# --- launchers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "program"),
    [
        (
            "torchrun --nproc-per-node 2 train.py --lr 1",
            "--nproc-per-node 2 --module",
            LaunchedProgram("train.py", ("--lr", "1")),
        ),
        ("torchrun -m --nnodes=1 pkg.train -m", "-m --nnodes=1", LaunchedProgram("pkg.train", ("-m",), True)),
        ("torchrun --nnodes 1 -- train.py", "--nnodes 1 --module", LaunchedProgram("train.py")),
        ("torchrun train.py -- train.py", "--module", LaunchedProgram("train.py", ("--", "train.py"))),
        ("-m torch.distributed.run train.py train.py", "--module", LaunchedProgram("train.py", ("train.py",))),
        ("-m torch.distributed.launch --use-env train.py", "--use-env --module", LaunchedProgram("train.py")),
    ],
)
def test_a_launchers_options_end_where_its_own_parser_says(words: str, options: str, program: LaunchedProgram) -> None:
    pytest.importorskip("torch")
    job = ranks.parse_job(words.split())
    assert job is not None
    assert (list(job.options), job.program) == (options.split(), program)


@pytest.mark.parametrize(
    ("words", "module", "options", "program"),
    [
        ("accelerate launch --num_processes 1 train.py 1", "accelerate.commands.launch", "--num_processes 1", ("1",)),
        ("accelerate-launch train.py", "accelerate.commands.launch", "", ()),
        ("deepspeed --num_gpus 1 train.py --a", "deepspeed.launcher.runner", "--num_gpus 1", ("--a",)),
    ],
)
def test_other_launchers_are_read_by_their_own_parsers_too(
    words: str, module: str, options: str, program: tuple[str, ...]
) -> None:
    pytest.importorskip(module.split(".")[0])
    job = ranks.parse_job(words.split())
    assert job is not None
    assert (job.module, list(job.options)) == (module, [*options.split(), "--module"])
    assert job.program == LaunchedProgram("train.py", program)


def test_a_launcher_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match=r"accelerate launch: not installed in .*; pip install accelerate"):
        ranks.parse_job(["accelerate", "launch", "train.py"])


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_what_a_launcher_puts_first_is_the_programs_first_argument(place: Path, spelling: str) -> None:
    assert entry._with_rank_option(["run", "train.py"]) == ["run", "train.py"]
    words = (spelling, *OPTIONS, "--overwrite", "train.py", "--lr", "1")
    done = ran(place, sys.executable, "-m", "xsp.cli", *words)
    assert f'["train.py", "{spelling}", "--lr", "1"]' in done.stdout, done.stderr


@pytest.mark.slow
def test_a_single_process_of_a_job_is_its_first_rank(place: Path, tmp_path: Path) -> None:
    words = ("--out", str(tmp_path / "job"), "train.py")
    command = [sys.executable, "-m", "xsp.cli", *OPTIONS, *words]
    done = subprocess.run(command, cwd=place, env={**os.environ, "XSP_JOB": "job"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [part.name for part in (tmp_path / "job").iterdir()] == ["rank-0000"]
