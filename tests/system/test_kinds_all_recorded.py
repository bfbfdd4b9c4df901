"""A kind of step of which every step was recorded: the time between its steps is unknown, and not 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xsp import account
from xsp.account import entries as names
from xsp.analyses import program_loop
from xsp.ingest.load import load

PROGRAM = """
import sys, time, torch, xsp

net = torch.nn.Linear(8, 8)
with xsp.profile("kinds", out=sys.argv[1], levels="M", samples=False) as profile:
    for step in range(30):
        if step == 2:
            time.sleep(0.25)
        with profile.step():
            net(torch.ones(64 if step in (0, 2) else 2, 8))
"""


def test_of_a_kind_of_which_every_step_was_recorded_the_time_between_is_unknown(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "run")], check=True)
    trace = load(tmp_path / "run")
    rows = [row for row in program_loop(trace).df().to_dict("records") if row["steps"] == row["recorded"]]
    assert rows, "both steps of this kind are among the first ones, which are recorded"
    accounted = account.of(trace)
    assert accounted.violations == ()
    for row in rows:
        assert row["between_ms"] != row["between_ms"], "null"
        assert row["iteration_ms"] != row["iteration_ms"], "null"
        own = accounted.of(0, int(row["kind"]))
        assert own is not None
        assert own.host[names.BETWEEN] is None
