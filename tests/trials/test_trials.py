"""What each trial changes of a program, and when it says that it changes nothing."""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xsp.errors import UsageError
from xsp.trials import calls, child, folding, outputs, training
from xsp.trials.calls import Autocast, ChannelsLast, Float32, InferenceMode, Sdpa
from xsp.trials.capture import Capture
from xsp.trials.folding import FoldBatchNorm
from xsp.trials.settings import Malloc, OneDnn, Threads, facts
from xsp.trials.training import Foreach, FusedOptimizer, PinMemory, Workers
from xsp.trials.trial import Trial, names, parse

torch = pytest.importorskip("torch")


def network() -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)]
    found = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4 * 12 * 12, 5))
    for _ in range(3):
        found(torch.randn(4, 3, 16, 16) + 1)  # batch norm that is not the identity
    return found.eval()


IMAGES = torch.rand(2, 3, 16, 16)


def tried(trial: Trial, module: Any, *args: Any) -> Any:
    """Apply a trial as a child does, and return what the second call returns."""
    trial.before(module, args, {})
    module(*args)
    trial.after(module, args, {})
    return module(*args)


def test_every_name_is_that_of_a_trial_and_other_names_and_values_are_refused() -> None:
    valued = {"threads": "2", "interop": "2", "num_workers": "1"}
    for name in names():
        assert isinstance(parse(f"{name}={valued[name]}" if name in valued else name)[0], Trial)
    assert [type(each).__name__ for each in parse("channels_last+threads=2")] == ["ChannelsLast", "Threads"]
    for wrong in (
        "channel_last",
        "threads",
        "threads=x",
        "autocast=int8",
        "onednn=maybe",
        "sdpa=fast",
        "malloc=give",
        "",
    ):
        with pytest.raises(UsageError):
            parse(wrong)


def test_channels_last_changes_convolutions_and_inputs_and_keeps_results() -> None:
    module, trial = network(), ChannelsLast()
    wanted = module(IMAGES)
    found = tried(trial, module, IMAGES)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert list(trial.applied) == ["Sequential: 2 weights and 1 inputs made channels-last"]


def test_channels_last_is_for_nothing_where_there_is_no_convolution_or_all_is_so() -> None:
    trial = ChannelsLast()
    tried(trial, torch.nn.Linear(3, 3), torch.rand(2, 3))
    assert not trial.applied
    assert "no convolutions" in next(iter(trial.reasons))
    again = ChannelsLast()
    last = IMAGES.contiguous(memory_format=torch.channels_last)
    tried(again, network().to(memory_format=torch.channels_last), last)
    assert not again.applied
    assert "channels-last already" in next(iter(again.reasons))


def test_batch_norm_is_folded_into_the_layer_that_it_follows_and_results_stay() -> None:
    module, trial = network(), FoldBatchNorm()
    wanted = module(IMAGES)
    found = tried(trial, module, IMAGES)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert list(trial.applied) == ["Sequential: 2 batch norms folded"]
    assert sum(isinstance(each, torch.nn.BatchNorm2d) for each in module.modules()) == 0


def test_what_another_layer_reads_too_is_not_folded() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Any) -> Any:
            before = self.inner[0](x)
            return before + self.inner[1](before)

    module, trial = Reads().eval(), FoldBatchNorm()
    wanted = module(IMAGES)
    assert torch.equal(tried(trial, module, IMAGES), wanted)
    assert not trial.applied
    assert "fold undone" in next(iter(trial.reasons))


def test_what_cannot_be_folded_undoes_what_was_folded_before_it() -> None:
    layers = [torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(6)]
    module = torch.nn.Sequential(*layers).eval()
    module[0].weight.data.fill_(1.0)
    module[3] = torch.nn.Sequential(module[3])
    value, trial = torch.rand(2, 6, 6), FoldBatchNorm()
    weight = module[0].weight
    trial.before(module, (value,), {})
    module(value)
    with pytest.raises(Exception):  # noqa: B017,PT011  as torch's fusion says that sizes differ
        trial.after(module, (value,), {})
    assert module[0].weight is weight
    assert isinstance(module[1], torch.nn.BatchNorm1d)


def test_a_layer_that_returns_more_than_a_tensor_is_no_error() -> None:
    class Own(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x), None

    trial = FoldBatchNorm()
    assert tried(trial, Own(3, 3).eval(), torch.rand(2, 3))[1] is None
    assert not trial.applied


def test_batch_norm_of_training_stays() -> None:
    trial = FoldBatchNorm()
    tried(trial, network().train(), IMAGES)
    assert not trial.applied
    assert "training" in next(iter(trial.reasons))


def test_inference_mode_surrounds_the_calls_and_an_error_in_one_leaves_none_open() -> None:
    module, trial = network(), InferenceMode()
    assert tried(trial, module, IMAGES).is_inference()
    with pytest.raises(RuntimeError):
        module(torch.rand(2, 5, 16, 16))
    assert not torch.is_inference_mode_enabled()
    assert copy.deepcopy(module)(IMAGES).is_inference()
    off = InferenceMode()
    with torch.no_grad():
        tried(off, network(), IMAGES)
    assert not off.applied


def test_autocast_computes_in_its_type() -> None:
    assert tried(Autocast("bfloat16"), network(), IMAGES).dtype == torch.bfloat16


def test_attention_that_has_no_switch_is_said_to_have_none() -> None:
    trial = Sdpa()
    tried(trial, network(), IMAGES)
    assert not trial.applied
    assert "no switch" in next(iter(trial.reasons))


def test_threads_stay_whatever_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before, whole = torch.get_num_threads(), torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", whole)
    try:
        trial = Threads("1")
        trial.start()
        torch.set_num_threads(3)
        assert torch.get_num_threads() == 1
        assert "the program's set_num_threads(3) is ignored" in trial.applied
        assert trial.already_applied(facts())
    finally:
        whole(before)


def test_memory_is_kept_by_a_variable_that_the_process_has_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TOP_PAD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    trial = Malloc()
    trial.start()
    assert "glibc" in " ".join([*trial.applied, *trial.reasons])
    assert trial.already_applied(facts()) is None
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert "jemalloc" in str(trial.already_applied(facts()))
    monkeypatch.delenv("LD_PRELOAD")
    for name, value in trial.environment().items():
        monkeypatch.setenv(name, value)
    assert "MALLOC_TOP_PAD_" in str(trial.already_applied(facts()))


IN_A_THREAD = """
import resource, threading, torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for each in range(40):
        if each == 20:
            before = faults()
        kept = [torch.empty(1 << 20).fill_(1) for _ in range(6)]
        del kept
    print(faults() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_memory_is_kept_in_threads_too() -> None:
    kept = {**os.environ, **Malloc().environment()}
    said = subprocess.run([sys.executable, "-c", IN_A_THREAD], env=kept, capture_output=True, text=True, check=True)
    assert int(said.stdout) < 1000  # with MALLOC_TOP_PAD_ alone 41,000, as installed 100,000


@pytest.mark.parametrize("value", ["on", "off"])
def test_onednn_is_switched_again_in_each_call(value: str) -> None:
    module, trial, is_on = network(), OneDnn(value), value == "on"
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    try:
        torch._C._set_mkldnn_enabled(not is_on)
        assert trial.already_applied(facts()) is None
        trial.before(module, (IMAGES,), {})
        assert trial.already_applied(facts()) == f"oneDNN was already {value}"
        torch._C._set_mkldnn_enabled(not is_on)
        module(IMAGES)
        assert torch._C._get_mkldnn_enabled() == is_on
        assert trial.applied
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize(("made", "switch"), [(Foreach, "foreach"), (FusedOptimizer, "fused")])
def test_an_optimizer_of_torchs_is_switched_before_its_first_step(made: Any, switch: str) -> None:
    from torch.optim import optimizer as module

    hooks = dict(module._global_optimizer_pre_hooks)
    trial = made()
    trial.start()
    try:
        assert trial.reasons
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0][switch]
        assert list(trial.applied) == [f"AdamW: {switch}=True"]
        assert not trial.reasons
    finally:
        module._global_optimizer_pre_hooks.clear()
        module._global_optimizer_pre_hooks.update(hooks)


def test_data_loaders_without_workers_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    trial = Workers("2")
    trial.start()
    assert DataLoader([1, 2, 3], 1).num_workers == 2
    assert DataLoader([1, 2, 3], batch_size=1, num_workers=1).num_workers == 1
    assert list(trial.applied) == ["a data loader with 2 workers"]


def test_a_result_that_is_no_number_differs_from_any_and_arguments_stay_the_programs() -> None:
    torch = pytest.importorskip("torch")
    ones = torch.ones(2)
    assert folding._difference(ones, torch.tensor([float("nan"), 1.0])) == float("inf")
    given = {"x": ones.double()}
    assert calls._convert(torch, given, {torch.float64}, torch.float32)["x"].dtype == torch.float32
    assert given["x"].dtype == torch.float64


# --- the process ----------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, torch
from xsp.trials import child
with child.trial_session(sys.argv[1]):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    value = torch.rand(2, 4)
    for _ in range(4):
        found = model(value)
    print(found.is_inference(), torch.nn.Module.__call__.__name__)
    if {fails}: raise SystemExit(3)
"""


def in_a_process(trial: str, report: Path, fails: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.replace("{fails}", str(fails)), child.encode_options(trial, report)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_process_says_what_was_changed_and_keeps_its_results_also_where_the_program_ends_early(
    tmp_path: Path,
) -> None:
    without, under = tmp_path / "a.json", tmp_path / "b.json"
    assert in_a_process("", without).stdout.split()[0] == "False"
    done = in_a_process("inference_mode", under, fails=True)
    assert done.returncode == 3
    assert done.stdout.split()[0] == "True"
    found = json.loads(under.read_text())
    assert found["applied"] == ["Sequential: called in inference mode"]
    assert found["modules"] == ["Sequential"]
    assert json.loads(without.read_text())["facts"]["gradients"] is True
    assert outputs.error(without, under) == (0.0, True, "")


def test_a_result_that_cannot_be_read_stops_no_program() -> None:
    watch = child.CallObserver([])
    call = watch.wrap(torch.nn.Module.__call__)
    model = torch.nn.Linear(4, 4)
    found = torch.vmap(lambda x: call(model, x))(torch.rand(3, 4))
    assert found.shape == (3, 4)
    call(torch.nn.Identity(), torch.rand(2, device="meta"))
    assert watch.content()["modules"] == ["Linear", "Identity"]


def test_modules_that_are_made_for_one_step_each_have_results_of_their_own() -> None:
    watch = child.CallObserver([])
    call = watch.wrap(torch.nn.Module.__call__)
    for _ in range(outputs.MODULES):
        call(torch.nn.Linear(4, 4), torch.rand(2, 4))  # CPython reuses the address of the one before
    call(torch.nn.ReLU(), torch.rand(2, 4))
    results = watch.content()["outputs"]
    names = [f"Linear {number}" for number in range(1, outputs.MODULES + 1)]
    assert {name: len(calls) for name, calls in results.items()} == dict.fromkeys(names, 1)


def test_results_are_compared_by_their_largest_value(tmp_path: Path) -> None:
    def kept(name: str, values: list[float], kind: str = "torch.float32") -> Path:
        tensors = [{"type": kind, "shape": [len(values)], "values": values}]
        (tmp_path / name).write_text(json.dumps({"outputs": {"Net 1": [{"tensors": tensors}]}}))
        return tmp_path / name

    one = kept("one", [1.0, -4.0])
    assert outputs.error(one, kept("b", [1.0, -4.00001])) == (pytest.approx(2.5e-6), True, "")
    assert outputs.error(one, kept("c", [1.4, -4.0])) == (pytest.approx(0.1), False, "")
    assert outputs.error(one, kept("d", [float("nan"), -4.0]))[1] is False
    assert outputs.error(one, kept("e", [1.0]))[0] is None
    (tmp_path / "none").write_text("{}")
    assert outputs.error(one, tmp_path / "none")[2] == "no outermost module returned a tensor"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_model_of_another_type_computes_in_float32_and_returns_its_type(dtype: str) -> None:
    kind = getattr(torch, dtype)
    model, seen = torch.nn.Sequential(torch.nn.Linear(8, 8)).to(kind), []
    given = torch.rand(2, 8, dtype=kind)
    before = model(given)
    model[0].register_forward_hook(lambda _, at, result: seen.append((at[0].dtype, result.dtype)))
    trial = Float32()
    after = tried(trial, model, given)
    assert seen[-1] == (torch.float32, torch.float32)
    assert after.dtype == kind
    assert torch.allclose(after.float(), before.float(), atol=2e-2)
    assert trial.changes_numbers
    assert trial.applied


def test_autocast_around_a_model_is_left_out() -> None:
    model, trial = torch.nn.Sequential(torch.nn.Linear(8, 8)), Float32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.rand(2, 8)).dtype == torch.bfloat16
        assert tried(trial, model, torch.rand(2, 8)).dtype == torch.float32
    assert trial.applied
    trial = Float32()
    tried(trial, torch.nn.Linear(4, 4), torch.rand(2, 4))
    assert not trial.applied
    assert "float32 already" in next(iter(trial.reasons))


# --- captured calls, and copies without waiting ---------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of the stand-in: what torch has on the processor is then on it."""
    standin = pytest.importorskip("standin")
    standin.install(tmp_path / "site", monkeypatch)
    return standin


def test_captured_calls_are_replayed_for_arguments_of_the_same_form(device: Any) -> None:
    module, trial = network(), Capture()
    with torch.no_grad():
        wanted = [module(images) for images in (IMAGES, IMAGES + 1, IMAGES[:1])]
        first = tried(trial, module, IMAGES)
        assert list(trial.applied) == ["Sequential: captured, and replayed in calls whose arguments have the same form"]
        found = [module(IMAGES), module(IMAGES + 1), module(IMAGES[:1])]
        assert torch.equal(first, found[0])
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
        assert len(module.forward._calls) == 2
    assert module(IMAGES).requires_grad, "with gradients the module computes as before"


def test_what_cannot_be_captured_stays_as_it_is_and_says_why(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(torch.nn.Linear):
        def forward(self, x: Any, kept: Any = None) -> Any:
            return (super().forward(x), object()) if kept is None else super().forward(x)

    line = torch.rand(2, 3)
    for module, args, said in (
        (network(), (IMAGES,), "it records gradients"),
        (network().train(), (IMAGES,), "it is in training mode"),
        (Writes(3, 3).eval(), (line, object()), "an argument is object"),
        (Writes(3, 3).eval(), (line,), "its result has a object"),
    ):
        trial = Capture()
        with torch.set_grad_enabled("gradients" in said):
            tried(trial, module, *args)
        assert said in next(iter(trial.reasons))
        assert not trial.applied
    monkeypatch.setenv(device.VARIABLE, json.dumps({"faults": {"capture": "no"}}))
    trial = Capture()
    with torch.no_grad():
        tried(trial, network(), IMAGES)
    assert next(iter(trial.reasons)) == "Sequential: the step cannot be captured (it reads a value)"


def test_without_a_device_nothing_is_captured_or_pinned() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    trial, pinning = Capture(), PinMemory()
    with torch.no_grad():
        tried(trial, network(), IMAGES)
    pinning.start()
    assert next(iter(trial.reasons)) == "Sequential: its parameters are on cpu, which has no capture and replay"
    assert next(iter(pinning.reasons)) == "there is no GPU to copy to"


def test_data_loaders_pin_what_they_load(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = torch.utils.data.DataLoader
    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(loader, "__init__", loader.__init__)
    trial = PinMemory()
    trial.start()
    assert next(iter(trial.reasons)) == "no data loader without pinned memory was made"
    loader([1], pin_memory=True)
    assert not trial.applied
    assert loader([torch.ones(2)], batch_size=1).pin_memory
    assert list(trial.applied) == ["a data loader with pinned memory, and copies for which the host does not wait"]
    assert not trial.reasons
    asked: list[Any] = []
    copied = training._without_waiting(lambda tensor, *args, **kwargs: asked.append(kwargs))
    for pinned in (True, False):
        tensor = torch.ones(1)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, pinned=pinned: pinned)
        copied(tensor, "meta")
        copied(tensor, "meta", non_blocking=False)
    assert asked == [{"non_blocking": True}, {"non_blocking": False}, {}, {"non_blocking": False}]
