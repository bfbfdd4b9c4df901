"""Timing blocks for real: in a process beside, which may crash, hang or run out of memory without a figure made up.

Nothing here depends on how fast a machine is: figures are above 0, and statuses are as they must be.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from depth import deep
from madegraphs import graph_of

from xsp import bench, graph
from xsp.bench import plan, turns, variants
from xsp.bench.environment import Environment
from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import CacheState, Spec, Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.errors import BenchError
from xsp.graph.blocks import block
from xsp.graph.node import Tensor
from xsp.version import __version__

HERE = Environment({"cpu": "test"})
PLENTY_S = 120.0
"""More than any of these takes: a budget that does not decide what is timed."""

RUNTIME = """
import os, signal, sys, time
from xsp.bench.inputs import NotTimeable
from xsp.bench.torchcalls import Torch

class Unruly(Torch):
    def prepare(self, spec, rotated_bytes, limit_bytes):
        op = spec.block.op
        if op == "aten::exp":
            os._exit(7)
        if op == "aten::sin":
            time.sleep(1000)
        if op == "aten::cos":
            return bytearray(limit_bytes + (2 << 30))
        if op == "aten::tan":
            os.kill(os.getpid(), 9)
        if op == "aten::erf":
            os.kill(os.getpid(), signal.SIGSEGV)
        if op == "aten::atan":
            from xsp.bench import rounds
            rounds.CANARIES_EVERY_NS = 1 << 62  # they run before the rounds, and after all of them
            real, times = rounds.Canaries.run, iter([False])
            rounds.Canaries.run = lambda self: os._exit(9) if next(times, True) else real(self)
        if op == "aten::neg":
            raise NotTimeable(f"loaded: {sorted({'duckdb', 'pandas', 'rich'} & set(sys.modules))}")
        return super().prepare(spec, rotated_bytes, limit_bytes)
"""


@pytest.fixture
def unruly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a runtime of a third party that misbehaves for some operators; return its name."""
    (tmp_path / "site" / "unruly-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "unruly_runtime.py").write_text(RUNTIME)
    (tmp_path / "site" / "unruly-1.0.dist-info" / "entry_points.txt").write_text(
        "[xsp.runtimes]\nunruly = unruly_runtime:Unruly\n"
    )
    (tmp_path / "site" / "unruly-1.0.dist-info" / "METADATA").write_text("Name: unruly\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return "unruly"


def taken(specs: list[Spec], folder: Path, seconds: float = PLENTY_S, **others: object) -> list[Timing]:
    """Time specs, and return what is kept of each."""
    timings = Timings.open(folder, HERE)
    made = bench.fill(specs, timings, seconds, **others)  # type: ignore[arg-type]
    kept = set(Timings.open(folder, HERE))
    assert set(made) == {each for each in kept if each.key in {spec.key for spec in specs}}
    assert {each.op for each in kept - set(made)} <= set(plan.OVERHEADS)
    assert all(each.taken_ns and each.xsp for each in kept)
    assert all(each.environment == HERE.hash for each in made)
    return made


def filled(specs: list[Spec], folder: Path, **others: object) -> dict[str, Timing]:
    """Time specs, and return what is kept of each by operator."""
    return {each.op: each for each in taken(specs, folder, **others)}  # type: ignore[arg-type]


def of(module: torch.nn.Module, *args: torch.Tensor, train: bool = False, granularity: int = 1) -> list[Spec]:
    found = graph.of(module, *args, train=train)
    return [spec for spec, _ in bench.specs(found, granularity=granularity, threads=1)]


def is_whole(timing: Timing) -> bool:
    figures = (timing.low_ns, timing.trimmed_ns, timing.high_ns, timing.least_ns, timing.host_ns)
    return timing.is_timed and timing.samples >= 5 and all(each is not None and each > 0 for each in figures)


class Lists(torch.nn.Module):
    """Changes tensors in place that it hands over as lists."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_([x, y], 0.5)
        torch._foreach_add_([x, y], [y, x], alpha=0.1)
        return torch.stack(torch._foreach_sqrt([x, y]))


class Once(NamedTuple):
    """What was timed in one process, for several tests: each start imports torch, which takes seconds."""

    folder: Path
    specs: dict[str, list[Spec]]
    made: dict[str, Timing]

    def of(self, name: str) -> dict[str, Timing]:
        """Return what is kept of the specs of a name, by operator."""
        return {found.op: found for spec in self.specs[name] if (found := self.made.get(spec.key)) is not None}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True))
    trained = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
    absent = graph_of(("onnx::Conv", ["x"], "a"), ("aten::no_such", ["a"], "b"), ("other::op", ["b"], "c"))
    specs = {
        "module": [*of(net.eval(), torch.ones(1, 3, 16, 16)), *plan.overheads(1)],
        "training": of(trained, torch.ones(4, 8), train=True, granularity=3),
        "lists": of(Lists(), torch.ones(64), torch.ones(64)),
        "absent": [spec for spec, _ in bench.specs(absent, threads=1)],
    }
    folder = tmp_path_factory.mktemp("once")
    made = taken([spec for those in specs.values() for spec in those], folder, 2 * PLENTY_S)
    return Once(folder, specs, {each.key: each for each in made})


def test_the_calls_of_a_module_are_timed_and_the_folder_keeps_them(once: Once) -> None:
    found = once.of("module")
    assert set(found) == {
        "aten::conv2d", "aten::batch_norm", "aten::relu_", "overhead/module_call", "overhead/op_call"
    }  # fmt: skip
    assert all(map(is_whole, found.values()))
    assert all(each.canary_ratio >= 1 for each in found.values() if each.canary_ratio)


def test_blocks_of_several_calls_and_training_steps_are_timed(once: Once) -> None:
    found = once.of("training")
    assert {spec.key for spec in once.specs["training"]} <= once.made.keys()
    assert all(map(is_whole, found.values())), {op: each.reason for op, each in found.items() if not is_whole(each)}


def test_lists_of_tensors_that_are_changed_in_place_are_timed(once: Once) -> None:
    found = once.of("lists")
    assert set(found) == {"aten::_foreach_mul_", "aten::_foreach_add_", "aten::_foreach_sqrt", "aten::stack"}
    assert all(map(is_whole, found.values()))


@pytest.mark.slow
def test_what_is_known_is_not_timed_again_unless_asked_for(once: Once, tmp_path: Path) -> None:
    specs = once.specs["lists"][:1]
    timings = Timings.open(shutil.copytree(once.folder, tmp_path / "kept"), HERE)
    assert bench.fill(specs, timings, PLENTY_S) == []
    assert len(bench.fill(specs, timings, PLENTY_S, again=True)) == 1


def test_what_costs_most_of_a_step_is_timed_first() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 512), torch.nn.Linear(512, 512)
    )
    pairs = bench.specs(graph.of(net, torch.ones(64, 4)), threads=1)
    ordered = plan.missing(pairs, None)
    assert [ordered[0].block.calls[0].outputs[0].shape, ordered[0].block.external[0].shape] == [(64, 512), (64, 512)]
    assert plan.missing([(pairs[0][0], 1), (pairs[1][0], 1000)], None)[0] == pairs[1][0]


# --- what is refused or fails -------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_a_budget_of_nothing_is_one_error(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(BenchError, match="is too short"):
        bench.fill(of(torch.nn.ReLU(), torch.ones(4)), Timings.open(tmp_path, HERE), seconds)


@pytest.mark.slow
def test_however_short_a_budget_something_is_timed_and_no_figure_is_made_up(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in ("relu", "exp", "sin", "cos", "tan", "neg", "tanh", "sigmoid", "sqrt", "abs"):
                x = getattr(torch, name)(x)
            return x

    specs, took, kept = of(Net(), torch.ones(512, 512)), [], Timings.open(tmp_path, HERE)
    for _ in range(2):
        before = len(kept)
        bench.fill(specs, kept, 0.001, on_start=took.append)
        assert len(kept) > before
    assert all(map(is_whole, kept))
    assert {each.op for each in kept} & {each.op for each in specs}, "not what is empty alone"
    assert len(took) == 2
    assert min(took) > 0


def test_as_many_take_turns_as_there_is_time_for() -> None:
    specs = plan.overheads(1) * 20
    assert [len(plan._sitting(specs, 1 << 30, seconds)) for seconds in (0.1, 2.0, 60.0)] == [1, 5, 16]


def test_a_call_that_torch_does_not_have_is_failed_with_the_reason(once: Once) -> None:
    kept = once.of("absent")
    assert set(kept) == {"onnx::Conv", "aten::no_such", "other::op"}
    assert {each.status for each in kept.values()} == {Status.FAILED}
    assert kept["onnx::Conv"].reason == "onnx::Conv is an ONNX node, not an operator of torch"
    assert all(each.trimmed_ns is None and each.reason for each in kept.values())


def test_what_no_process_could_time_fails_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "Turns", None)
    nodes = graph_of(("onnx::Conv", ["x"], "a"), ("onnx::Relu", ["a"], "b"))
    one = nodes.nodes[0]
    call = dataclasses.replace(one.call, op="aten::relu", arguments=(("self", Tensor("float32", None)),))
    told = dataclasses.replace(nodes, nodes=(dataclasses.replace(one, call=call), nodes.nodes[1]))
    assert plan.refusal(bench.specs(told, threads=1, runtime="transfers")[0][0]) == ""
    kept = filled([spec for spec, _ in bench.specs(told, threads=1)], tmp_path)
    assert {op: each.status for op, each in kept.items()} == {"aten::relu": Status.FAILED, "onnx::Relu": Status.FAILED}
    assert kept["aten::relu"].reason == "shapes or types of its tensors are not known"
    assert plan.missing([(spec, 1) for spec, _ in bench.specs(told, threads=1)], Timings.open(tmp_path, HERE)) == []


@pytest.mark.slow
def test_a_block_that_is_too_large_is_not_tried(tmp_path: Path) -> None:
    limits = turns.TurnLimits(memory_bytes=1 << 20)
    kept = filled(of(torch.nn.ReLU(), torch.ones(1 << 20)), tmp_path, limits=limits)
    assert kept["aten::relu"].status is Status.TOO_LARGE
    assert kept["aten::relu"].reason == "its tensors take 8 MiB of 1 MiB allowed"


UNRULY = {
    "aten::exp": (Status.FAILED, "exit code 7"),
    "aten::sin": (Status.TIMED_OUT, "more than 3 s"),
    "aten::cos": (Status.TOO_LARGE, ""),
    "aten::tan": (Status.TOO_LARGE, "killed"),
    "aten::erf": (Status.FAILED, "SIGSEGV"),
    "aten::neg": (Status.FAILED, "loaded: []"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", ["exp sin cos neg", deep("exp sin cos tan erf neg")])  # each but `neg` ends a process
def test_what_crashes_hangs_or_takes_all_memory_is_marked_and_the_others_are_timed(
    tmp_path: Path, unruly: str, names: str
) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in ("relu", *names.split(), "tanh"):
                x = getattr(torch, name)(x)
            return x

    specs = [dataclasses.replace(each, runtime=unruly) for each in of(Net(), torch.ones(4))]
    kept = filled(specs, tmp_path, limits=turns.TurnLimits(seconds=3.0, memory_bytes=1 << 28))
    for op in (f"aten::{name}" for name in names.split()):
        status, reason = UNRULY[op]
        assert (kept[op].status, kept[op].trimmed_ns) == (status, None)
        assert reason in kept[op].reason
    assert is_whole(kept["aten::relu"])
    assert is_whole(kept["aten::tanh"])


@pytest.mark.slow
def test_a_process_that_ends_after_its_figures_loses_none_of_them(tmp_path: Path, unruly: str) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.atan(torch.tanh(x)))

    specs = [dataclasses.replace(each, runtime=unruly) for each in of(Net(), torch.ones(4))]
    kept = filled(specs, tmp_path)
    partial = {each.op: (each.status, each.reason, each.samples) for each in kept.values() if not is_whole(each)}
    assert not partial, partial
    assert set(kept) == {"aten::tanh", "aten::atan", "aten::relu"}


def test_what_failed_under_another_version_is_tried_again(tmp_path: Path) -> None:
    (spec,) = of(torch.nn.ReLU(), torch.ones(4))
    timings = Timings.open(tmp_path, HERE)
    for version, again in ((__version__, []), ("0.0.1", [spec])):
        timings.add([dataclasses.replace(untimed(spec, Status.FAILED, "no way"), xsp=version)])
        assert plan.missing([(spec, 1)], timings) == again


def test_what_needed_too_much_memory_is_tried_again_after_all_others(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.relu(x @ x))

    product, other, last = of(Net(), torch.ones(256, 256))
    timings = Timings.open(tmp_path, HERE)
    timings.add([dataclasses.replace(untimed(product, Status.TOO_LARGE, "killed"), xsp=__version__)])
    assert plan.missing([(each, 1) for each in (product, other, last)], timings)[2:] == [product]


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_timed(tmp_path: Path) -> None:
    timings = Timings.open(tmp_path / "t", HERE)
    (tmp_path / "t").write_text("in the way")
    with pytest.raises(BenchError, match="cannot be written there"):
        bench.fill(of(torch.nn.ReLU(), torch.ones(4)), timings, PLENTY_S)


def test_where_all_is_known_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = of(torch.nn.ReLU(), torch.ones(4))
    timings = Timings.open(tmp_path, HERE)
    timings.add([dataclasses.replace(untimed(spec, Status.FAILED, "no way"), xsp=__version__)])
    monkeypatch.setattr("os.access", lambda *_: False)
    assert bench.fill([spec], timings, PLENTY_S) == []


def test_a_runtime_that_is_not_there_is_one_error_and_nothing_is_kept(tmp_path: Path) -> None:
    specs = [dataclasses.replace(each, runtime="torhc") for each in of(torch.nn.ReLU(), torch.ones(4))]
    with pytest.raises(BenchError, match="no runtime 'torhc'; did you mean torch"):
        bench.fill(specs, Timings.open(tmp_path, HERE), PLENTY_S)
    assert not list(tmp_path.iterdir())


# --- specs of a graph ---------------------------------------------------------------------------------


def test_equal_calls_are_one_spec_with_how_often_it_occurs() -> None:
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.ReLU())
    found = bench.specs(graph.of(net, torch.ones(2, 4)), threads=1)
    assert [(spec.block.op, count) for spec, count in found] == [("aten::linear", 3), ("aten::relu", 1)]
    assert bench.specs(graph.of(net, torch.ones(2, 4)), threads=2)[0][0].key != found[0][0].key


def test_small_weights_stay_in_the_caches_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "private_bytes", lambda: 1 << 20)
    for width, state in ((8, CacheState.WARM), (1024, CacheState.CHAIN)):
        ((spec, _),) = bench.specs(graph.of(torch.nn.Linear(width, width), torch.ones(2, width)))
        assert spec.state is state
    ((spec, _),) = bench.specs(graph.of(torch.nn.Linear(8, 8), torch.ones(2, 8)), state="cold")
    assert spec.state is CacheState.COLD


@pytest.mark.slow
def test_a_graph_of_a_hundred_thousand_nodes_is_cut_in_seconds() -> None:
    one = graph_of(("aten::relu", ["x"], "a"), ("aten::exp", ["a"], "b"))
    many = dataclasses.replace(one, nodes=one.nodes * 50_000, edges=())
    began = time.process_time()
    found = bench.specs(many, threads=1)
    assert [count for _, count in found] == [50_000, 50_000]
    assert time.process_time() - began < 60


# --- states, inputs, variants -------------------------------------------------------------------------


def prepared(spec: Spec, rotated_bytes: int = 1 << 20) -> variants.Prepared:
    return variants.prepare(spec, rotated_bytes, 1 << 30)[0]


def test_weights_are_rotated_through_copies_and_activations_are_shared() -> None:
    (spec,) = of(torch.nn.Linear(64, 64), torch.ones(2, 64))
    warm, chain, cold = (prepared(dataclasses.replace(spec, state=state)) for state in CacheState)
    assert (len(warm.sets), len(cold.sets), warm.flush, chain.flush) == (1, 1, None, None)
    assert len(chain.sets) > 50
    assert len({each[0].data_ptr() for each in chain.sets}) == 1
    assert len({each[1].data_ptr() for each in chain.sets}) == len(chain.sets)
    assert torch.equal(chain.sets[0][1], chain.sets[1][1])
    assert cold.flush is not None
    assert cold.most == 1


class Positions(torch.nn.Module):
    """Calls whose integers are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        rows = torch.arange(2)[:, None].expand(2, 6)
        x = x[rows, ids % 4]
        x = torch.gather(x, 1, ids[:, :2, None].expand(2, 2, 8) % 3)
        x = x.index_select(1, ids[0, :2] % 2)
        scores = x.reshape(-1, 8)
        return torch.nn.functional.cross_entropy(scores, ids.reshape(-1)[:4] % 8)


def test_integers_lie_within_what_they_are_positions_of() -> None:
    for spec in of(Positions(), torch.ones(2, 6, dtype=torch.int64)):
        found = prepared(spec)
        with torch.inference_mode():
            found.function(*found.sets[0])
        assert found.notes == ""
    (spec,) = of(torch.nn.Embedding(50, 8), torch.ones(200, dtype=torch.int64))
    ids = next(each for each in prepared(spec).sets[0] if not each.is_floating_point())
    assert len(ids.unique()) > 20
    assert 0 <= int(ids.min()) <= int(ids.max()) < 50


def test_inputs_that_a_block_changes_are_put_back() -> None:
    class Halved(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0.5)

    (spec,) = of(Halved(), torch.ones(64))
    found = prepared(spec)
    before = found.sets[0][0].clone()
    for _ in range(100):
        for given in found.arguments(10):
            found.function(*given)
        assert float(found.sets[0][0].abs().max()) > 1e-20
    found.restore()
    assert torch.equal(found.sets[0][0], before)


def test_a_block_computes_what_its_calls_do() -> None:
    class Split(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x.mul(1).chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).add_(1)

    x = torch.ones(1, 2, 4, 24)
    found = graph.of(Split(), x)
    made = prepared(Spec(block(found, 0, len(found.nodes))))
    (given,) = made.sets[0]
    assert torch.allclose(made.function(given), Split()(given))


def test_parts_of_one_storage_that_come_from_outside_are_different_tensors() -> None:
    class Split(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x.chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    (spec,) = of(Split(), torch.ones(1, 2, 4, 24))
    assert len({each.data_ptr() for each in prepared(spec).sets[0]}) == 3


CONVOLUTION = torch.nn.Conv2d(8, 8, 3)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", ["channels-last", "onednn-off"])
def test_a_variant_is_checked_against_float64(name: str) -> None:
    (spec,) = of(CONVOLUTION, torch.ones(1, 8, 12, 12))
    found, error = variants.prepare(dataclasses.replace(spec, variant=name), 1 << 20, 1 << 30)
    assert error is not None
    assert 0 <= error < 1e-4
    if name == "channels-last":
        assert found.sets[0][0].is_contiguous(memory_format=torch.channels_last)


def test_attention_has_its_back_ends() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    (spec,) = of(Attention(), torch.ones(1, 2, 16, 8))
    for name in ("attention-math", "attention-flash"):
        variants.prepare(dataclasses.replace(spec, variant=name), 1 << 20, 1 << 30)


def test_a_variant_with_other_results_is_different_and_enters_no_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.arange(4, dtype=torch.float64)
    right = exact.float()
    assert variants.check(right, right, exact) == 0
    for wrong in (right + 0.1, right[:2], right * float("nan")):
        with pytest.raises(variants.ResultMismatch):
            variants.check(right, wrong, exact)
    with pytest.raises(variants.ResultMismatch, match="integer results"):
        variants.check(torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), None)
    nan = torch.tensor([float("nan"), 1.0])
    assert variants.check(nan, nan.clone(), nan.double()) == 0


def test_a_variant_that_changes_nothing_is_not_timed_twice() -> None:
    (spec,) = of(torch.nn.Linear(4, 4), torch.ones(2, 4))
    for name in ("channels-last", "attention-math", "contiguous", "no-such"):
        with pytest.raises(NotTimeable):
            variants.prepare(dataclasses.replace(spec, variant=name), 1 << 20, 1 << 30)
