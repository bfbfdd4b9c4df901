"""Training steps by phases and layers: what each layer takes, and the gradients that it makes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp import terminal  # noqa: E402
from xsp.bench.environment import Environment  # noqa: E402
from xsp.bench.timings import Timings  # noqa: E402
from xsp.bound import phases, phasestext  # noqa: E402
from xsp.bound.ladder import Rung  # noqa: E402
from xsp.cli import main  # noqa: E402
from xsp.device import ceilings  # noqa: E402
from xsp.device.ceilings import Ceiling  # noqa: E402
from xsp.device.machine import cpu_model  # noqa: E402
from xsp.errors import GraphError  # noqa: E402
from xsp.graph.node import Phase, Tensor  # noqa: E402

nn = torch.nn
HERE = Environment({"cpu": "a cpu", "cores": 2, "torch": "2"})

STEPS = """
import torch

def build(batch, **how):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    kind = how.pop("kind", torch.optim.SGD)
    scaled, passes = how.pop("scaled", False), how.pop("passes", 1)
    optimizer = kind(model.parameters(), lr=0.1, **how)
    data = torch.randn(batch, 8)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def step():
        optimizer.zero_grad()
        for _ in range(passes):
            scaler.scale(model(data).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step

def foreach(batch):
    return build(batch, foreach=True, momentum=0.9)

def single(batch):
    return build(batch, foreach=False, momentum=0.9)

def fused(batch):
    return build(batch, kind=torch.optim.AdamW, fused=True)

def adam(batch):
    return build(batch, kind=torch.optim.Adam, foreach=True)

def accumulated(batch):
    return build(batch, passes=3)

def scaled(batch):
    return build(batch, scaled=True, foreach=True)
"""


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ceilings.store({cpu_model() or "cpu": Ceiling("a cpu", {"fp32": 1e9}, {}, 1e9, "measured")})
    (tmp_path / "steps.py").write_text(STEPS)
    return Timings.open(tmp_path / "timings", HERE)


def training(known: Timings, what, *args, **options) -> phases.Training:
    return phases.of(xsp.bound.of(what, *args, timings=known, **options))


def of_steps(known: Timings, tmp_path: Path, name: str) -> phases.Training:
    return training(known, f"{tmp_path / 'steps.py'}:{name}", batch=2)


def layer(found: phases.Training, name: str) -> phases.TrainedLayer:
    return next(each for each in found.layers if each.module == name)


def test_layers_add_up_to_their_phases_and_gradients_to_the_parameters(known) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    found = training(known, model, torch.zeros(3, 8), train=True)
    totals = {each.phase: each.ns for each in found.phases}
    for phase, name in ((Phase.FORWARD, "forward_ns"), (Phase.BACKWARD, "backward_ns"), (Phase.OPTIMIZER, "update_ns")):
        assert math.fsum(getattr(each, name) for each in found.layers) == pytest.approx(totals[phase])
    sizes = {name: sum(each.numel() * 4 for each in part.parameters()) for name, part in model.named_children()}
    for name, size in sizes.items():
        assert layer(found, name).parameter_bytes == size
        assert (layer(found, name).update_ns > 0) == (size > 0)


def test_frozen_parameters_have_no_gradient_and_no_update(known) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    found = training(known, model, torch.zeros(3, 8), train=True)
    assert (layer(found, "0").parameter_bytes, layer(found, "0").update_ns) == (0, 0)
    assert layer(found, "1").parameter_bytes == (16 * 4 + 4) * 4


@pytest.mark.parametrize("name", ["single", "foreach", "fused", "adam", "scaled", "accumulated"])
def test_an_optimizer_of_any_kind_is_shared_out_to_the_layers(known, tmp_path, name) -> None:
    found = of_steps(known, tmp_path, name)
    first, last = layer(found, "0"), layer(found, "2")
    assert (first.parameter_bytes, last.parameter_bytes) == ((8 * 16 + 16) * 4, (16 * 4 + 4) * 4)
    assert all(each is None or each > 0 for each in (first.update_ns, last.update_ns))


def test_calls_on_lists_are_keyed_by_their_shapes(known, tmp_path) -> None:
    graph = xsp.graph.of(f"{tmp_path / 'steps.py'}:foreach", batch=2)
    lists = [node for node in graph.nodes if node.call.op.startswith("aten::_foreach_")]
    assert lists
    shapes = [each.shape for each in lists[0].call.inputs if isinstance(each, Tensor)]
    assert shapes[:4] == [(16, 8), (16,), (4, 16), (4,)]
    fused = xsp.graph.of(f"{tmp_path / 'steps.py'}:fused", batch=2)
    assert any("_fused_adamw_" in node.call.op for node in fused.nodes if node.phase is Phase.OPTIMIZER)


def test_accumulation_runs_backward_several_times_and_scaling_is_calls_of_the_step(known, tmp_path) -> None:
    once, thrice = (of_steps(known, tmp_path, name) for name in ("single", "accumulated"))
    calls = [next(each.calls for each in found.phases if each.phase is Phase.BACKWARD) for found in (once, thrice)]
    assert calls[1] > 2.5 * calls[0]
    assert layer(thrice, "0").parameter_bytes == layer(once, "0").parameter_bytes
    scaled = xsp.graph.of(f"{tmp_path / 'steps.py'}:scaled", batch=2)
    assert any("_amp_foreach_non_finite_check_and_unscale_" in node.call.op for node in scaled.nodes)


def test_weight_gradients_lie_off_the_longest_path_of_backward(known) -> None:
    layers = [nn.Linear(32, 32, bias=False) for _ in range(4)]
    found = training(known, nn.Sequential(*layers), torch.zeros(32, 32), train=True)
    backward = next(each for each in found.phases if each.phase is Phase.BACKWARD)
    assert 0.3 < backward.off_path_ns / backward.ns < 0.5  # three of seven products, the first layer has but one
    assert backward.path_ns + backward.off_path_ns == pytest.approx(backward.ns)


def test_a_step_without_a_backward_pass_is_refused(known) -> None:
    with pytest.raises(GraphError, match="give --train"):
        training(known, nn.Linear(4, 4), torch.zeros(2, 4))


def test_an_update_of_no_layer_that_is_unknown_is_not_zero() -> None:
    def told(*updates: float | None) -> object:
        layers = [phases.TrainedLayer(phases.NO_LAYER, 0.0, 0.0, each, 0, 0) for each in updates]
        return phasestext.as_json(phases.Training("n", Rung.AS_RUN, (), {}, tuple(layers), 1))["of_no_layer_update_ms"]

    assert (told(None), told(2e6), told()) == (None, 2.0, 0.0)


def test_nobody_is_told_to_time_what_cannot_be_timed_here() -> None:
    found = phases.Training("n", Rung.IN_PLACE, (), {}, (), 3, can_time=False)
    text = terminal.page(phasestext.section(found, "runs/gpu"))
    assert "3 calls have no figure" in text
    assert "--fill" not in text


def test_the_command_prints_tables_within_80_columns_and_json(known, capsys, tmp_path) -> None:
    spec = f"{tmp_path / 'steps.py'}:single"
    assert main(["bound", spec, "--phases", "--timings", str(tmp_path / "timings")]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if spec not in line) <= 80
    assert "backward" in shown
    assert main(["bound", spec, "--phases", "--timings", str(tmp_path / "timings"), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rung"] == "ceiling"
    assert {"module", "forward_ms", "backward_ms", "update_ms", "gradient_bytes", "calls"} == set(told["layers"][0])
    assert phasestext.as_json(of_steps(known, tmp_path, "single"))["phases"]["forward"]["ns"] > 0


@pytest.mark.slow
def test_a_run_tells_no_data_flow_so_that_updates_and_gradients_of_layers_are_unknown(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tmp_path / "run"
    with xsp.profile("train", out=run, samples=False) as prof:
        for _ in range(prof.schedule.steps_for(repeats=2)):
            with prof.step():
                optimizer.zero_grad()
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
    found = phases.of(xsp.bound.of(run, timings=tmp_path / "none"))
    layers = {each.module: each for each in found.layers}
    assert layers["0"].forward_ns
    assert (layers["0"].update_ns, layers["0"].parameter_bytes) == (None, None)
    assert layers[phases.NO_LAYER].update_ns
