"""Whether sharing pays: the verdict from figures, and a measurement of real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from xsp import cli, terminal
from xsp.errors import DeviceError, ShareError, UsageError
from xsp.share import loadworker, measuring, savings
from xsp.share.loadworker import ATTACH, MMAP, PICKLE, WAYS
from xsp.share.measuring import COLD, WARM, Measurement, ProcessMemory, WayTimes

MIB = 1 << 20


def made(mmap_ms: list[float], attach_ms: list[float]) -> Measurement:
    """Return a measurement of 100 MiB in which loading took 1 ms and the first call the rest."""
    found = Measurement("m.safetensors", "", 100 * MIB, 10, turns=len(mmap_ms))
    for way, totals in ((MMAP, mmap_ms), (PICKLE, [3 * each for each in mmap_ms]), (ATTACH, attach_ms)):
        found.times[way, WARM] = WayTimes([1e6 for _ in totals], [(each - 1) * 1e6 for each in totals])
    return found


NOISE = (0.06, -0.04, 0.02, -0.08, 0.04, 0.0)


@pytest.mark.parametrize(
    ("attach", "verdict", "says"),
    [
        (10.0, savings.PAYS, "attach saves 10.0 ms"),
        (19.7, savings.PAYS_NOT, "less than 5 %"),
        (20.0, savings.PAYS_NOT, "as long as load_file or longer"),
        (25.0, savings.PAYS_NOT, "longer than load_file"),
    ],
)
def test_the_verdict_is_against_load_file(attach: float, verdict: str, says: str) -> None:
    said = savings.verdict_of(made([20 + each for each in NOISE], [attach + each for each in reversed(NOISE)]))
    assert (said.verdict, said.sentence.startswith(verdict)) == (verdict, True)
    assert says in said.sentence


def test_few_and_noisy_turns_cannot_tell() -> None:
    said = savings.verdict_of(made([20, 40, 25, 31], [18, 22, 35, 30]))
    assert said.verdict == savings.CANNOT_TELL
    assert "cannot tell: 4 turns do not show" in said.sentence


def test_it_is_said_where_the_store_has_few_large_pages() -> None:
    found = made([20 + each for each in NOISE], [19 + each for each in NOISE])
    for large, said in ((0, True), (20 * MIB, True), (98 * MIB, False), (None, False)):
        found.large_bytes = large
        assert ("pages of 4 KiB" in terminal.page(savings.document(found))) == said
        assert savings.as_json(found)["large_bytes"] == large


def test_memory_pays_from_the_first_count_at_which_it_is_less() -> None:
    found = made([20 + each for each in NOISE], [20 + each for each in reversed(NOISE)])
    assert savings.break_even_processes(found, MMAP) is None  # nothing was measured
    assert "not reported by the system" in terminal.page(savings.document(found))
    found.memory = {
        MMAP: ProcessMemory(150 * MIB, 50.0 * MIB, 300 * MIB),
        PICKLE: ProcessMemory(150 * MIB, 150.0 * MIB, 400 * MIB),
        ATTACH: ProcessMemory(180 * MIB, 51.0 * MIB, 300 * MIB),
    }
    assert savings.break_even_processes(found, MMAP) is None  # one more process takes as much
    count = savings.break_even_processes(found, PICKLE)
    assert count == 2
    assert found.memory[ATTACH].of(count) < found.memory[PICKLE].of(count)
    assert found.memory[ATTACH].of(count - 1) >= found.memory[PICKLE].of(count - 1)
    found.memory[ATTACH] = ProcessMemory(150 * MIB + 198 * MIB, 51.0 * MIB, 300 * MIB)  # equal at 3
    assert savings.break_even_processes(found, PICKLE) == 4
    found.memory[ATTACH] = ProcessMemory(100 * MIB, 51.0 * MIB, 300 * MIB)
    assert savings.break_even_processes(found, PICKLE) == 1
    text = terminal.page(savings.document(found))
    assert "less than load_file for no number of processes" in text
    assert "less than torch.load from 1 process on" in text


def test_memory_of_this_process_is_told() -> None:
    told = loadworker.memory_of("self")
    if not told:
        pytest.skip("this system does not tell proportional set sizes")
    assert 0 < told["libraries"] < told["pss"]
    assert told["weights"] == 0
    assert loadworker.memory_of(2**30) == {}


def test_which_part_of_a_file_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(1 << 20))
    assert measuring.resident_share(path) == 1.0  # it was just written
    path.write_bytes(b"")
    assert measuring.resident_share(path) is None


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("none.safetensors",), ShareError, "no such file; give a safetensors file, or a model"),
        (("torchvision:resnet18", "torchvision:resnet18"), ShareError, "omit MODULE"),
        (("torchvision:resnet18", "", 2), UsageError, "at least 3"),
    ],
)
def test_what_cannot_be_measured_is_one_error(words: tuple[str, ...], error: type[Exception], says: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    with pytest.raises(error, match=says):
        measuring.measure(*words)  # type: ignore[arg-type]


_TIED = """
import torch

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3000, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 3000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))

def build(batch_size):
    return Tied().eval(), torch.arange(batch_size)
"""


@pytest.mark.slow
def test_real_processes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    (tmp_path / "tied.py").write_text(_TIED)
    monkeypatch.chdir(tmp_path)
    words = ["share", "measure", "tied.py:build", "--turns", "3", "--quiet", "--format", "json"]
    assert cli.main(words) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["verdict"] in (savings.PAYS, savings.PAYS_NOT, savings.CANNOT_TELL)
    assert found["tensors"] == 6  # one of the two that are tied
    states = [WARM] if found["not_cold"] else [WARM, COLD]
    assert {(each["way"], each["state"]) for each in found["times"]} == {
        (way, state) for way in WAYS for state in states
    }
    assert all(len(each["load_ns"]) == 3 and min(each["load_ns"] + each["call_ns"]) > 0 for each in found["times"])
    assert 0 <= found["large_bytes"] <= found["nbytes"] + (1 << 21)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["tied.py"]


@pytest.mark.slow
def test_a_file_that_does_not_fit_its_module_is_one_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    (tmp_path / "tied.py").write_text(_TIED)
    with pytest.raises(ShareError, match=r"the file lacks \w+"):
        measuring.measure(str(tmp_path / "m.safetensors"), f"{tmp_path}/tied.py:build", 3)


_ENDING = """
import os, signal, threading, torch

class Ending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2000, 2000))
        torch.mm(torch.ones(2000, 2000), torch.ones(2000, 2000))  # computes while it is built, on all threads

    def forward(self, x):
        ends = os.environ.get("ENDS")
        if ends == "quietly" and not self.w.requires_grad:
            os._exit(0)
        if ends == "always" or ends == "loaded" and not self.w.requires_grad:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.mm(x, self.w)

def build(batch_size):
    return Ending().eval(), torch.ones(2000, 2000)
"""


@pytest.mark.slow
def test_a_model_that_computes_while_it_is_built_is_measured_and_one_that_crashes_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    (tmp_path / "ending.py").write_text(_ENDING)
    found = measuring.measure(f"{tmp_path}/ending.py:build", turns=3, states=[WARM], concurrent=0)
    assert found.turns == 3
    assert not found.memory
    for ends, who, how in (
        ("loaded", "(attach|load_file|torch.load): the process", "SIGSEGV"),
        ("quietly", "(attach|load_file|torch.load): the process", "exit code 0"),
        ("always", "the process for 'prepare'", "SIGSEGV"),
    ):
        monkeypatch.setenv("ENDS", ends)
        with pytest.raises(ShareError, match=rf"{who} ended \({how}\)"):
            measuring.measure(f"{tmp_path}/ending.py:build", turns=3, states=[WARM], concurrent=0)


# --- onto a device --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_ways_load_onto_a_device_and_some_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    import gpu_share
    import standin

    standin.install(tmp_path / "site", monkeypatch, held_bytes=0)
    (tmp_path / "tied.py").write_text(_TIED)
    model = f"{tmp_path}/tied.py:build"
    found = measuring.measure(model, turns=3, states=[WARM], concurrent=2, device="standin:0")
    assert (found.device, found.device_name, found.concurrent) == ("standin:0", standin.PRODUCT, 2)
    assert {key: len(times.call_ns) for key, times in found.together.items()} == {
        (way, count): count for way in WAYS for count in (1, 2)
    }
    least = 3 * standin.ISSUE_NS + standin.LAUNCH_NS
    assert all(min(times.call_ns) >= least for times in (*found.times.values(), *found.together.values()))
    assert found.memory[ATTACH] == ProcessMemory(0, 0.0, 0)
    text = terminal.page(savings.document(found))
    for said in (f"onto standin:0 ({standin.PRODUCT})", "load at once", "2 processes", "standin:0: tensors"):
        assert said in text, said
    plain = savings.as_json(found)
    assert (plain["device"], len(plain["together"])) == ("standin:0", 6)
    assert gpu_share.row("tied", found)[-2:] == ["0.00", "met"]
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: found)
    gpu_share.main(["--device", "standin:0", "--models", model, "--rounds", "3", "--processes", "2", "--minutes", "9"])
    assert "| build |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_device_that_cannot_be_loaded_onto_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    import standin

    standin.install(tmp_path / "site", monkeypatch)
    with pytest.raises(DeviceError, match="there is no device standin:4 here"):
        measuring.measure("torchvision:resnet18", device="standin:4")
    monkeypatch.setenv(standin.VARIABLE, json.dumps({"sharing_obstacle": "its memory is its own"}))
    with pytest.raises(ShareError, match="standin:0: its memory is its own"):
        measuring.measure("torchvision:resnet18", device="standin:0")
    (tmp_path / "tied.py").write_text(_TIED)
    monkeypatch.setenv(standin.VARIABLE, json.dumps({"obstacle": "standin:0 is busy: choose another --device"}))
    with pytest.raises(ShareError, match="standin:0 is busy"):
        measuring.measure(f"{tmp_path}/tied.py:build", turns=3, device="standin:0")
    assert cli.main(["share", "measure", "x.safetensors", "--processes", "1"]) == 2
    assert "--processes: 2 or more" in capsys.readouterr().err
    assert cli.main(["share", "measure", str(tmp_path / "none.safetensors")]) != 0
    note = f"weights are loaded into the host's memory, not onto {standin.PRODUCT}: --device standin:0"
    assert note in capsys.readouterr().err
