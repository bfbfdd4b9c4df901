"""The main module of a program, and the functions whose calls are steps."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from depth import deep

from xsp import plugins, rundir
from xsp.cli import main
from xsp.errors import UnwritableError, UsageError
from xsp.launch import children, models, ranks, script
from xsp.launch.program import LaunchedProgram
from xsp.launch.run import Launch
from xsp.models import Settings
from xsp.record.settings import Settings as RunSettings

LOOP = """
import functools

RATE = 0.1

class Trainer:
    @staticmethod
    def fixed(x):
        return x + 1
    @classmethod
    def made(cls, x):
        return cls.__name__, x
    def own(self, x):
        return self, x
    @property
    def size(self):
        return 3

@functools.lru_cache
def cached(x):
    return 2 * x

def batches():
    yield 1

async def waits():
    return 1
"""


class _Session:
    """Counts steps in place of a profile."""

    def __init__(self) -> None:
        self.steps = 0
        self.has_explicit_steps = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count a step."""
        self.steps += 1
        yield


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module whose functions may be steps."""
    (tmp_path / "loop_of_mine.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    yield "loop_of_mine"
    sys.modules.pop("loop_of_mine", None)


def test_static_and_class_methods_stay_what_they_are_when_their_calls_are_steps(loop: str) -> None:
    session: Any = _Session()
    for name in ("Trainer.fixed", "Trainer.made", "Trainer.own", "cached"):
        script._step_in_module(session, f"{loop}:{name}")
    module = sys.modules[loop]
    trainer = module.Trainer()
    assert (trainer.fixed(1), module.Trainer.fixed(1)) == (2, 2)
    assert (trainer.made(1), module.Trainer.made(1)) == (("Trainer", 1), ("Trainer", 1))
    assert trainer.own(1) == (trainer, 1)
    assert module.cached(2) == 4
    assert session.steps == 6


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{}:RATE", "RATE is not a function"),
        ("{}:Trainer", "Trainer is not a function"),
        ("{}:Trainer.size", "Trainer.size is not a function"),
        ("{}:Trainer.none", "has no attribute 'none'"),
        ("{}:batches", "whose call returns before its work begins"),
        ("{}:waits", "whose call returns before its work begins"),
        ("builtins:list.append", "write module:function"),
        ("{}:", "write module:function"),
        (":batches", "write module:function"),
        (".{}:batches", "write module:function"),
    ],
)
def test_what_can_be_no_step_is_refused(loop: str, name: str, says: str) -> None:
    session: Any = _Session()
    with pytest.raises(UsageError, match=says), script.function_steps(session, name.format(loop)):
        pass
    assert not hasattr(builtins, script._STEP)


def test_a_generator_of_the_script_is_refused_and_a_function_around_one_is_not() -> None:
    with pytest.raises(UsageError, match="--step f: it is a generator or a coroutine"):
        script._compile_code("def f():\n    for x in y:\n        z = yield x\n", "f.py", "f.py", "f")
    script._compile_code("def f():\n    def g():\n        yield 1\n    return list(g())\n", "f.py", "f.py", "f")


AT_EXIT = """
import atexit, pickle
class Result:
    number = 3
    def __del__(self): print("gone", double(self.number))
def double(number): return 2 * number
kept = Result()
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(kept))).__module__))
def train(): pass
for _ in range(3): train()
"""


@pytest.mark.slow
def test_an_exit_handler_of_the_program_pickles_what_the_program_defines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AT_EXIT)
    options = ("--step", "train", "--levels", "M", "--warmup", "0", "--no-samples")
    said = []
    for command in ((), ("-m", "xsp.cli", "run", "-q", *options)):
        done = subprocess.run((sys.executable, *command, "train.py"), cwd=tmp_path, capture_output=True, text=True)
        said.append((done.returncode, done.stdout, done.stderr))
    assert said == [(0, "gone 6\n__main__\ngone 6\n", "")] * 2


def test_the_main_module_of_another_program_is_put_back(tmp_path: Path) -> None:
    before, argv = sys.modules["__main__"], sys.argv
    (tmp_path / "s.py").write_text("import pickle, sys\nclass A: pass\nassert pickle.dumps(A())\n")
    main = script.Main(compile((tmp_path / "s.py").read_text(), "s.py", "exec"), "s.py", None)
    try:
        assert script.execute(main, ()) == 0
    finally:
        sys.argv = argv
    assert sys.modules["__main__"] is before
    assert pickle.loads(pickle.dumps(SimpleNamespace(a=1))).a == 1


def test_a_child_that_a_signal_ends_has_the_code_that_a_shell_gives_it() -> None:
    for code, expected in (("os.kill(os.getpid(), 9)", 137), ("sys.exit(-1)", 255), ("sys.exit(3)", 3)):
        assert children.run([sys.executable, "-c", f"import os, sys; {code}"], os.environ) == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_second_run_of_a_language_model_does_the_same_of_its_two_steps(phase: str) -> None:
    settings: dict[str, Any] = {phase: 16}
    assert models._model_options(Settings(**settings))[-2:] == [f"--{phase}", "16"]
    assert not {"--prefill", "--decode"} & set(models._model_options(Settings()))


# --- what is printed after the program -------------------------------------------------------------------------------

ENDED = """
import os, shutil, sys
def train(): pass
for _ in range(3): train()
if "remove" in sys.argv: shutil.rmtree("out")
if "close" in sys.argv: sys.stdout.close()
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "words"),
    [
        deep('exec "$@" 2>&-', ""),
        deep('exec "$@" >&-', ""),
        ('exec "$@" >/dev/full', ""),
        ('{ "$@"; echo $? >code; } | true; exit $(cat code)', ""),
        deep('exec "$@"', "close"),
        ('exec "$@"', "remove"),
        deep('exec "$@"', "-q remove"),
    ],
)
def test_whatever_keeps_the_tables_from_being_printed_the_exit_code_is_the_programs(
    tmp_path: Path, around: str, words: str
) -> None:
    (tmp_path / "train.py").write_text(ENDED)
    quiet = ["-q"] if "-q" in words else []
    options = [*quiet, "--step", "train", "--levels", "M", "--warmup", "0", "--no-samples", "--out", "out"]
    command = [sys.executable, "-m", "xsp.cli", "run", *options, "train.py", *words.removeprefix("-q").split()]
    done = subprocess.run(["sh", "-c", around, "sh", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


def test_a_run_in_parts_is_not_run_again_to_find_parents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resolve", "--once-each", "train.py"]) == 2
    assert "--resolve needs the steps of one run: omit --once-each" in capsys.readouterr().err


def test_the_command_that_is_named_after_an_interrupt_takes_a_path_with_blanks(tmp_path: Path) -> None:
    (tmp_path / "my run" / "steps").mkdir(parents=True)
    (tmp_path / "my run" / "steps" / "000001.parquet").touch()
    assert children._interrupt_message(tmp_path / "my run").endswith(f": `xsp report '{tmp_path}/my run'`")


def test_a_job_whose_own_span_cannot_be_delivered_ends_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> None:
        raise UnwritableError("run: cannot be written (No space left on device)")

    monkeypatch.setattr(plugins, "sender", lambda: refuses)
    how = Launch(LaunchedProgram("train.py"), RunSettings(otlp="http://localhost:4318"))
    ranks._finish(how, tmp_path, {"kind": "ranks"}, 3)
    said = f"(run: cannot be written (No space left on device)); `xsp export {tmp_path} --to WHERE` sends the run"
    assert capsys.readouterr().err == f"xsp: the job's own span was not delivered {said}\n"


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_the_end_of_a_program_without_an_optimizer_loads_no_compiler(tmp_path: Path, trains: bool) -> None:
    step = "net(x).sum().backward()" if trains else "net(x)"
    (tmp_path / "program.py").write_text(f"""
import atexit, sys, torch
atexit.register(lambda: print("torch._dynamo" in sys.modules))
net, x = torch.nn.Linear(8, 8).train({trains}), torch.ones(4, 8)
with torch.set_grad_enabled({trains}):
    for _ in range(400):
        {step}
""")
    command = [sys.executable, "-m", "xsp.cli", "run", "-q", "--out", str(tmp_path / "run"), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False"], "loading it takes a second"
    costs = rundir.read_run(tmp_path / "run").costs
    assert costs["modules"].ns_per_span > 0
