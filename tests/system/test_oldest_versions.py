"""The analyser with the oldest versions that it declares: the same tables, with the same holes.

The engine read masked arrays without their masks before its version 2, so that each hole became a zero, in silence.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import dependencies
import pytest

import xsp

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
TABLES = ("A1", "A2", "A3", "A8", "A10", "A11", "A15", "phases", "ops", "layers", "operators", "loop", "health")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UV.exists(), reason="uv, which `make` installs, is not here")]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("oldest")
    venv.create(place, symlinks=True)
    found = place / "bin" / "python"
    wanted = [f"{name}{since}" for extra, name, since in dependencies.declared() if extra == "core"]
    asked = [str(UV), "pip", "install", "--quiet", "--python", str(found), "--resolution", "lowest-direct"]
    subprocess.run([*asked, *wanted], check=True)
    return found


def test_tables_are_those_of_the_newest_versions(oldest: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with xsp.profile("small", out=tmp_path / "run", samples=False) as profile:
        for _ in range(profile.schedule.steps_for(repeats=2)):
            with profile.step(batch_size=2):
                net(torch.randn(2, 3, 8, 8)).sum().backward()
                optimizer.step()
    for source in (tmp_path / "run", ROOT / "notebooks" / "gpt_forward.json.gz"):
        newest, old = (_tables(python, source) for python in (Path(sys.executable), oldest))
        assert old == newest


def _tables(python: Path, source: Path) -> str:
    """Return the tables of a source, each with the reason where it has none."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XSP_CACHE": ""}
    found = [
        subprocess.run(
            [str(python), "-m", "xsp.cli", "analyze", str(source), name, "--format", "json"],
            capture_output=True, text=True, timeout=120, env=environment, check=False,
        )
        for name in TABLES
    ]  # fmt: skip
    assert any(each.returncode == 0 and "null" in each.stdout for each in found)  # there are holes to be kept
    said = "\n".join(each.stdout + each.stderr for each in found)
    return re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.9g}", said)  # sums are in another order
