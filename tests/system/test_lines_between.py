"""Lines between steps, in whole programs: found by `xsp run`, with workers that fork, and in a block of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import xsp
from xsp.errors import AnalysisError
from xsp.testing import spans, trace_of

pytest.importorskip("torch")

PROGRAM = """
import sys, time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.rand(64, 64), batch_size=2, num_workers=WORKERS)
slept_s = []
def train(batch):
    model(batch).square().mean().backward()
    optimizer.step(); begun = time.perf_counter()
    time.sleep(0.004)
    slept_s.append(time.perf_counter() - begun)

for _ in range(3):
    for batch in loader:
        train(batch)
        optimizer.zero_grad()
assert sys.gettrace() is None or "between" in sys.gettrace().__func__.__module__
print(1e3 * sum(slept_s) / len(slept_s))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_line_that_takes_the_time_between_steps_is_named(workers: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("WORKERS", str(workers)), encoding="utf-8")
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--budget", "off", "--every", "3", "--out"]
    found = subprocess.run([*command, str(tmp_path / "run"), str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    rows = xsp.analyses.between(xsp.load(tmp_path / "run")).fetchall()
    scope, line, calls, ms, percent, seen, gaps, function = rows[0]
    assert (scope, line, calls, function) == ("program", "train.py:10", "time.sleep", "train")
    assert ms == pytest.approx(float(found.stdout), rel=0.3)  # on a busy machine it sleeps longer
    assert percent > 50
    assert 10 <= seen <= gaps
    assert not any("xsp" in row[1] for row in rows)


@pytest.mark.parametrize(("run", "why"), [({}, "did not continue after"), ({"imported": {}}, "only runs")])
def test_a_trace_without_them_says_why(run: dict[str, object], why: str) -> None:
    with pytest.raises(AnalysisError, match=why):
        xsp.analyses.between(trace_of(spans("step s 0-10"), run=run))
