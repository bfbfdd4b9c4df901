"""An analysis of a third party, as the docs show it: found by its entry point, printed, reported, refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xsp
from xsp.analyses import ANALYSES, Table, analysis
from xsp.errors import AnalysisError, UsageError
from xsp.schema import Level
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend" / "plugins.md"
STEP = """
step s 0-100
  module net.a 10-40
  module net.b 50-60
"""


@pytest.fixture
def example() -> str:
    return next(
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        if "@analysis" in block
    )


def test_the_example_is_ten_lines(example: str) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


@pytest.mark.slow
def test_it_is_found_by_its_entry_point_and_shown_as_ours_are(example: str, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "run"
    (site / "mine-1.dist-info").mkdir(parents=True)
    (site / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    points = "[xsp.analyses]\nslowest_layers = slow:slowest_layers\nbroken = not_there:at_all\n"
    (site / "mine-1.dist-info" / "entry_points.txt").write_text(points)
    (site / "slow.py").write_text(example)
    with xsp.profile("small", out=out, collectors=[], levels="M", warmup=0) as prof:
        for _ in range(4):
            with prof.step():
                pass

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    listed = ran("-m", "xsp.cli", "analyze", str(out), "--list")
    assert "slowest-layers" in listed.stdout, listed.stderr
    refused = ran("-m", "xsp.cli", "analyze", str(out), "slowest-layers")
    assert "slowest-layers (The slowest layers) needs the layer level" in refused.stderr
    assert "broken" in ran("-m", "xsp.cli", "doctor").stdout
    first = (
        "import slow, xsp; print(xsp.analyses.slowest_layers is slow.slowest_layers, list(xsp.analyses.ANALYSES)[-1])"
    )
    assert ran("-c", first).stdout == "True slowest-layers\n"


def test_an_analysis_answers_and_refuses_by_the_levels_that_it_needs() -> None:
    try:

        @analysis("longest", "The longest layer", Level.LAYER)
        def longest_layer(trace: Trace) -> Table:
            """The longest layer."""
            return trace.sql(f"SELECT name FROM merged WHERE level = {int(Level.LAYER)} ORDER BY dur_ns DESC LIMIT 1")

        assert longest_layer.name == "longest_layer"
        assert xsp.analyses.longest_layer is longest_layer is ANALYSES["longest"]
        assert longest_layer(trace_of(spans(STEP))).fetchall() == [("net.a",)]
        with pytest.raises(AnalysisError, match=r"longest \(The longest layer\) needs the layer level"):
            longest_layer(trace_of(spans("step s 0-10")))
    finally:
        ANALYSES.pop("longest", None)


@pytest.mark.parametrize(("identity", "name"), [("a2", "mine"), ("Phases", "mine"), ("mine", "layer_information")])
def test_a_taken_name_is_refused(identity: str, name: str) -> None:
    def mine(trace: Trace) -> Table:
        """Mine."""
        return trace.sql("SELECT 1")

    mine.__name__ = name
    with pytest.raises(UsageError, match="there already is an analysis"):
        analysis(identity, "Mine")(mine)
    assert identity not in ANALYSES


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no analysis 'slowest'"):
        xsp.analyses.slowest  # noqa: B018
