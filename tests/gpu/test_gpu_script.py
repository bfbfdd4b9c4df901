"""What runs on a machine with a GPU, as far as it can be run without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import entry_points
import pytest

GPU = Path(__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_checkout_has_its_plugins_without_being_installed(tmp_path):
    entry_points.register(tmp_path)
    asked = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
        "from importlib.metadata import entry_points\n"
        "print(sorted(point.name for point in entry_points(group='xsp.collectors')))"
    )
    found = subprocess.run([sys.executable, "-I", "-c", asked], capture_output=True, text=True, check=True).stdout
    assert "'cupti'" in found
    assert "'torchops'" in found


def test_wheels_of_what_is_missing_are_unpacked_and_others_left_alone(tmp_path, capsys):
    for name in ("pytest", "surely_missing"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    entry_points.unpack(tmp_path, tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["surely_missing"]
    assert "pytest: " in capsys.readouterr().out


def test_recorded_text_names_no_host_no_user_and_no_folder(monkeypatch):
    pytest.importorskip("torch")
    import record

    monkeypatch.setattr(record.socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(record, "_user", lambda: "ann")
    text = '{"Host Name": "node-17", "user": "ann", "file": "/home/ann/net.py", "url": "https://a.b/c", "banner": 1}'
    assert record.scrubbed(text) == (
        '{"Host Name": "scrubbed", "user": "scrubbed", "file": "net.py", "url": "https://a.b/c", "banner": 1}'
    )


def parts() -> dict[str, int]:
    """Return the limit in seconds of each part of the script, by name, in order."""
    text = (GPU / "run.sh").read_text(encoding="utf-8")
    return {name: int(seconds) for name, seconds in re.findall(r"^(?:part|bench) (\w+) (\d+)", text, re.MULTILINE)}


def default_plan() -> list[str]:
    (names,) = re.findall(r'^DEFAULT="(.*)"$', (GPU / "run.sh").read_text(encoding="utf-8"), re.MULTILINE)
    return names.split()


def test_the_parts_of_the_default_plan_fit_nine_minutes_together():
    limits, plan = parts(), default_plan()
    assert {*plan} <= {*limits}
    assert sum(limits[name] for name in plan) <= 540
    assert [name for name in limits if name in plan] == plan, "it is listed in the order in which it runs"


def ran(tmp_path: Path, body: str, **variables: str) -> tuple[list[str], str]:
    """Run the script with another program in place of Python, and return its summary and the commands."""
    python, log = tmp_path / "python", tmp_path / "commands.txt"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{body}\n')
    python.chmod(0o755)
    (tmp_path / "wheels").mkdir(exist_ok=True)
    words = ["bash", str(GPU / "run.sh"), str(tmp_path / "wheels"), str(tmp_path / "out")]
    env = {**os.environ, "PYTHON": str(python), **variables}
    subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    return (tmp_path / "out" / "summary.txt").read_text().splitlines(), log.read_text()


def test_without_a_choice_the_default_plan_runs_and_with_one_what_it_names(tmp_path):
    summary, commands = ran(tmp_path, "exit 0")
    assert [line.partition(":")[0] for line in summary] == default_plan()
    assert f"benchmarks/gpu_tiles.py --save --partial {tmp_path}/out/parts" in commands
    summary, _ = ran(tmp_path, "exit 0", PARTS="counters doctor")
    assert [line.partition(":")[0] for line in summary] == ["doctor", "counters"]
    summary, _ = ran(tmp_path, "exit 0", PARTS="all")
    assert [line.partition(":")[0] for line in summary] == [*parts()]


def test_a_part_that_fails_is_said_and_the_others_run(tmp_path):
    summary, _ = ran(
        tmp_path, 'case "$*" in *doctor*) echo "no such thing"; exit 3;; esac', PARTS="machine doctor bare"
    )
    assert summary[1].startswith("doctor: exit status 3 after 0 s: no such thing")
    assert [line.partition(",")[0] for line in (summary[0], summary[2])] == ["machine: well", "bare: well"]


def test_the_script_runs_every_benchmark_that_needs_a_gpu():
    text = (GPU / "run.sh").read_text(encoding="utf-8")
    scripts = {path.stem for path in BENCHMARKS.glob("gpu_*.py")}
    assert {name for name in scripts if f"bench {name} " not in text} == set()
