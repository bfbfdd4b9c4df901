"""Several ranks in one trace, with gloo on two processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from realparts import Jaeger, fetch_json  # noqa: E402

import xsp  # noqa: E402
from xsp.cli import main  # noqa: E402
from xsp.health import health  # noqa: E402
from xsp.schema import Kind, Level, Span  # noqa: E402
from xsp.testing import spans, trace_of  # noqa: E402
from xsp_collectors import collectives  # noqa: E402

SCRIPT = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""

OWN_STEPS = """
    import torch, xsp
    model = torch.nn.Linear(4, 2)
    with xsp.profile("own", out="own", warmup=0, levels="M") as prof:
        for _ in range(4):
            with prof.step():
                model(torch.randn(3, 4))
"""


SHARDED = """
    import sys, torch, torch.distributed as dist, xsp
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    how = sys.argv[1]
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)
        def forward(self, x):
            if "checkpoint" not in how:
                return x + torch.relu(self.inner(x))
            return x + checkpoint(self.inner, x, use_reentrant="not" not in how)
    model = nn.Sequential(*[Block() for _ in range(3)])
    if how == "fully_shard":
        from torch.distributed.fsdp import fully_shard
        for block in model:
            fully_shard(block)
        fully_shard(model)
    elif how == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        policy = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xsp.profile("sharded", out="sharded", warmup=1) as prof:
        for _ in range(8):
            with prof.step():
                optimizer.zero_grad()
                model(torch.randn(4, 16, requires_grad=True)).sum().backward()
                optimizer.step()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of two ranks that train together."""
    place = tmp_path_factory.mktemp("job")
    (place / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", "out", "--warmup", "2"]
    command += ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRACEPARENT"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return place / "out"


@pytest.mark.slow
def test_all_ranks_are_in_one_trace(job: Path) -> None:
    trace = xsp.load(job)
    assert trace.sql("SELECT DISTINCT rank FROM spans ORDER BY rank").fetchall() == [(0,), (1,)]
    assert trace.sql("SELECT DISTINCT trace_id FROM spans").fetchall() == [(trace.run["otel"]["trace_id"],)]


@pytest.mark.slow
def test_each_rank_says_who_it_is(job: Path) -> None:
    ranks = xsp.load(job).run["ranks"]
    assert [(run["rank"], run["local_rank"], run["world_size"]) for run in ranks] == [(0, 0, 2), (1, 1, 2)]
    assert len({run["process"] for run in ranks}) == 2
    assert len({run["host"] for run in ranks}) == 1


@pytest.mark.slow
def test_the_runs_of_the_ranks_hang_under_the_launcher(job: Path) -> None:
    launcher = json.loads((job / "run.json").read_text())["otel"]
    ranks = xsp.load(job).run["ranks"]
    assert {run["otel"]["parent_id"] for run in ranks} == {launcher["span_id"]}
    roots = xsp.load(job).sql(f"SELECT DISTINCT rank, parent_id FROM spans WHERE kind = '{Kind.STEP}' ORDER BY rank")
    assert roots.fetchall() == [(run["rank"], run["otel"]["span_id"]) for run in ranks]


@pytest.mark.slow
def test_a_collective_has_the_same_id_on_all_its_ranks(job: Path) -> None:
    rows = xsp.load(job).sql(
        """
        SELECT attributes->>'$."xsp.collective.id"' AS id, list(DISTINCT rank ORDER BY rank), list(DISTINCT step)
        FROM spans WHERE name = 'c10d::allreduce_' GROUP BY id
        """
    )
    result = rows.fetchall()
    assert result
    assert all(identity is not None and ranks == [0, 1] and len(steps) == 1 for identity, ranks, steps in result)


@pytest.mark.slow
def test_what_the_backend_did_hangs_under_its_collective(job: Path) -> None:
    trace = xsp.load(job)
    parts = trace.sql(
        """
        SELECT part.level, part.kind, op.name FROM spans AS part
        LEFT JOIN spans AS op ON op.span_id = part.parent_id WHERE part.name LIKE 'gloo:%'
        """
    ).fetchall()
    assert set(parts) == {(int(Level.LIBRARY), str(Kind.CALL), "c10d::allreduce_")}


@pytest.mark.slow
def test_the_figures_are_of_the_first_rank(job: Path) -> None:
    whole, first = xsp.load(job), xsp.load(job / "rank-0000")
    assert xsp.analyses.A2(whole).fetchall() == xsp.analyses.A2(first).fetchall()
    assert any("figures are those of rank 0" in finding.text for finding in health(whole))


@pytest.mark.slow
def test_ranks_without_a_launcher_load_as_one_too(job: Path, tmp_path: Path) -> None:
    for part in ("rank-0000", "rank-0001"):
        shutil.copytree(job / part, tmp_path / part)
    assert xsp.load(tmp_path).sql("SELECT count(DISTINCT rank) FROM spans").fetchall() == [(2,)]


@pytest.mark.slow
def test_ranks_that_torchrun_alone_started_share_a_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(OWN_STEPS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRACEPARENT"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
    traces = xsp.load(tmp_path / "own").sql("SELECT trace_id, count(DISTINCT rank) FROM spans GROUP BY trace_id")
    assert [ranks for _, ranks in traces.fetchall()] == [2]


@pytest.mark.slow
def test_a_missing_rank_is_said(job: Path, tmp_path: Path) -> None:
    shutil.copytree(job / "rank-0001", tmp_path / "rank-0001")
    assert "missing 1 of 2 ranks: 0" in [finding.text for finding in health(xsp.load(tmp_path))]


@pytest.mark.parametrize("args", [["--no-such-option", "train.py"], ["--no-python", "train.py"], []])
def test_what_torchrun_would_not_take_is_one_error(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "torchrun", *args]) == 2
    assert capsys.readouterr().err.startswith("xsp: error: xsp run torchrun: ")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_go_with_torchrun_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--out", str(tmp_path / "out"), "--once-each", "torchrun", "train.py"]) == 2
    assert "cannot be used with torchrun" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_claim_of_very_many_ranks_is_no_work() -> None:
    ranks = [{"rank": 1, "world_size": 10**15}]
    (text,) = [
        entry.text for entry in health(trace_of(spans("step s 0-9"), {"ranks": ranks})) if entry.subject == "ranks"
    ]
    assert text.startswith("missing 999999999999999 of 1000000000000000 ranks: 0, 2, 3")


# --- which collective it was ----------------------------------------------------------------------------


def op(name: str, start: int) -> Span:
    return Span(level=Level.OP, kind=Kind.OP.value, name=name, start_ns=start, dur_ns=10, thread=1)


def counted(before: dict[str, int], after: dict[str, int]) -> collectives.CollectiveCounts:
    counts = collectives.CollectiveCounts()
    counts.before, counts.after = before, after
    return counts


def test_collectives_are_numbered_in_the_order_of_their_issue() -> None:
    result = collectives.label([op("c10d::broadcast_", 5), op("c10d::allreduce_", 1)], counted({"0": 7}, {"0": 9}))
    assert [json.loads(span.attributes or "")[collectives.ID] for span in result.spans] == ["0:9", "0:8"]
    assert result.note is None


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"0": 8, "1": 1}, "2 communicators counted the collectives of a step"),
        ({"0": 10, "1": 0}, "communicator 0 counted 3 collectives in a step of 2 operators"),
    ],
)
def test_a_number_is_never_guessed(after: dict[str, int], said: str) -> None:
    ops = [op("c10d::broadcast_", 5), op("c10d::allreduce_", 1)]
    result = collectives.label(ops, counted({"0": 7, "1": 0}, after))
    assert result.spans == ops
    assert said in str(result.note)


def test_a_part_that_could_belong_to_two_collectives_belongs_to_none() -> None:
    ops = [op("c10d::allreduce_", 1), op("c10d::allreduce_", 2), op("gloo:all_reduce", 5), op("gloo:all_reduce", 6)]
    result = collectives.label(ops, counted({"0": 0}, {"0": 2})).spans
    assert [span.parent_id for span in result] == [None] * 4


def test_sends_are_no_collectives() -> None:
    result = collectives.label([op("c10d::send", 1)], counted({"0": 0}, {"0": 0}))
    assert result.spans[0].attributes is None


@pytest.mark.jaeger
def test_all_ranks_are_one_trace_in_jaeger_while_they_run(tmp_path: Path, jaeger: Jaeger) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", "out", "--otlp", jaeger.otlp_http]
    command += ["--warmup", "2", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    stored = xsp.load(tmp_path / "out")
    trace_id = stored.run["otel"]["trace_id"]
    (spans,) = stored.sql("SELECT count(*) FROM spans").fetchall()
    back = xsp.load(f"{jaeger.query}/trace/{trace_id}")
    assert back.sql("SELECT count(*) FROM spans").fetchall() == [spans]
    assert back.sql("SELECT DISTINCT rank FROM spans ORDER BY rank").fetchall() == [(0,), (1,)]
    named = {
        span["name"]
        for group in fetch_json(f"{jaeger.query}/api/v3/traces/{trace_id}")["result"]["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    }
    assert {"run train", "run train rank 0", "run train rank 1"} <= named


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["fully_shard", "FullyShardedDataParallel", "checkpoint", "checkpoint, not reentrant", "DDP"]
)
def test_every_span_of_sharded_and_checkpointed_training_has_a_parent(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SHARDED))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    trace = xsp.load(tmp_path / "sharded")
    (parents,) = [finding.text for finding in health(trace) if finding.subject == "parents"]
    assert parents.startswith("all "), parents
