"""What runs on a machine with a GPU, as far as it can be run without one."""

from __future__ import annotations

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


def test_the_script_runs_every_benchmark_that_needs_a_gpu():
    text = (GPU / "run.sh").read_text(encoding="utf-8")
    scripts = {path.stem for path in BENCHMARKS.glob("gpu_*.py")}
    assert {name for name in scripts if f"bench {name} " not in text} == set()
