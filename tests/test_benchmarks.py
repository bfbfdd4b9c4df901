"""`make bench` runs every benchmark there is, none for too long, and says how each ended."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import construction
import pytest
import run_all
from realparts import poll

README = Path(run_all.__file__).with_name("README.md").read_text(encoding="utf-8")


def test_every_script_is_a_benchmark_with_a_quick_form_and_a_line_in_the_readme() -> None:
    for script in run_all.scripts():
        text = script.read_text(encoding="utf-8")
        assert "turns.parser(" in text or "pairs.parser(" in text, f"{script.name}: parts stand in benchmarks/parts"
        assert f"| `{script.name}` |" in README


def test_what_is_for_a_gpu_looks_for_one_first() -> None:
    for script in run_all.scripts():
        text = script.read_text(encoding="utf-8")
        looks = "require_gpu()" in text or "gpu_workloads.require_device(" in text
        assert looks == script.name.startswith("gpu_"), script.name


def test_what_takes_minutes_comes_last() -> None:
    names = [script.stem for script in run_all.scripts()]
    assert tuple(names[-len(run_all.SLOW_SCRIPTS) :]) == run_all.SLOW_SCRIPTS


ROOT = Path(run_all.__file__).parents[1]
UNTYPED = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/gpu/**/*.py"), *ROOT.glob("notebooks/*.ipynb")])
"""Code that no type checker reads, and that does not run with the tests, or not without a device."""


@pytest.mark.parametrize("file", UNTYPED, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_a_script_uses_of_xsp_is_there(file: Path) -> None:
    """A function that had another name, or was removed since nothing else used it, was found only by running it."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = (cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        lines = [line for cell in cells for line in "".join(cell).splitlines()]
        text = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    tree = ast.parse(text)
    known: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                alias.asname or alias.name: import_module(alias.name) for alias in node.names if is_ours(alias.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module):
            module = import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")
                if isinstance(found := getattr(module, alias.name), (ModuleType, type)):
                    known[alias.asname or alias.name] = found
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    variables |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    for node in used:
        name = node.value.id
        if name in known and name not in variables:
            assert hasattr(known[name], node.attr), f"line {node.lineno}: {name}.{node.attr}"


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("xsp", "xsp_collectors")


@pytest.mark.slow
def test_how_a_script_ended_and_why(tmp_path: Path) -> None:
    def ended(text: str, seconds: float = 30) -> tuple[str, str]:
        script = tmp_path / "one.py"
        script.write_text(f"import sys, time\nsys.path.append({str(Path(run_all.__file__).parent)!r})\n{text}\n")
        found = run_all.run(script, [], seconds)
        return found.status, found.reason

    assert ended("pass") == ("ran", "")
    assert ended("from parts import turns; turns.skip('needs a moon')") == ("skipped", "needs a moon")
    assert ended("raise KeyError('x')") == ("failed", "exit status 1: KeyError: 'x'")
    assert ended("print('half', file=sys.stderr, flush=True); time.sleep(60)", 2)[0] == "cut off"


def test_what_a_script_started_ends_with_it(tmp_path: Path) -> None:
    script, child = tmp_path / "one.py", tmp_path / "child"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "import os; os._exit(0)\n"
    )
    assert run_all.run(script, [], 30).status == "ran"
    poll(lambda: _ended(Path(f"/proc/{child.read_text()}/status")))


def _ended(status: Path) -> bool:
    try:
        return "\nState:\tZ" in status.read_text()
    except OSError:
        return True


def test_what_is_out_of_time_is_not_run_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import time; time.sleep(60)")
    ended = run_all.run_all([script, script], [], 0.2)
    assert [each.status for each in ended] == ["cut off", "not run"]
    assert all(each.has_failed for each in ended)


def test_figures_of_construction_are_held_against_each_goal() -> None:
    single = {
        "errors": {"a": -0.10, "b": -0.20, "c": 0.02},
        "with_glue": {"a": -0.05, "b": -0.18, "c": 0.06},
        "cross": {"a": {"error": -0.12, "found": 0.95}},
    }
    blocks = {"errors": {"a": 0.01, "b": -0.02}, "with_glue": {}, "cross": {}}
    message = "\n".join(construction.goals({"1": single, "4": blocks, "steps": {}}))
    assert "at the best G (4) at most 5%, met" in message
    assert "G = 1, at most 14%: 12.0 [12.0, 12.0] %, met (1 models)" in message
    assert "G = 4, at most 8%: none (0 models)" in message
    assert "least 0.80 (b; goal 0.7, met)" in message
    assert "closer to 1 for 2 of 3 models (goal two thirds, met)" in message
    assert construction.goals({"1": {"errors": {}, "with_glue": {}, "cross": {}}})[0].startswith("No model")
    many = {"errors": {str(number): 0.1 for number in range(100)}, "with_glue": {}, "cross": {}, "saved": 4.3}
    assert (
        "4.3 times less time than one step of each model, at G = 1 (goal 4.4 over 100 models: missed)"
        in (construction.goals({"1": many})[0])
    )


@pytest.mark.slow
def test_true_times_are_compared_with_another_process() -> None:
    script = Path(run_all.__file__).with_name("true_time.py")
    options = ["--models", "torchvision:squeezenet1_1", "--quick", "--of-seconds", "1"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| squeezenet1_1 |" in done.stdout
    assert "The interval covers the program's own iteration in" in done.stdout
