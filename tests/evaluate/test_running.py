"""Evaluations that run: what is put to a model, what is kept, and that every way gives the same."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from depth import deep
from evaluations import FACTS, PROGRAM, show_nothing
from queues import md1_rate

from xsp.cli import main
from xsp.errors import ManifestError, XspError
from xsp.evaluate import agents, conformance, extras, jsonlines, predictors, reading, results, running, transports
from xsp.evaluate.agents import Options
from xsp.evaluate.manifest import Manifest


def manifest(**of: Any) -> Manifest:
    model = {"name": "board", "command": [sys.executable, "board.py"], **of.pop("model", {})}
    return reading.of_plain({"model": model, "dataset": {"samples": 4}, **of}).manifest


def evaluated(asked: Manifest, folder: Path, **options: Any) -> results.Result:
    given = Options(**{"store": folder / "store", "trusted": True, **options})
    return results.read(running.evaluate(asked, folder, given, FACTS, show_nothing))


# --- the contract -----------------------------------------------------------------------------------------------------


def test_a_program_that_speaks_json_lines_holds_the_contract(board: Path) -> None:
    conformance.check(jsonlines.Command(), manifest(), board)


def test_models_of_pytorch_hold_the_contract() -> None:
    pytest.importorskip("torch")
    asked = reading.of_plain({"model": {"name": "path", "source": "micro:path-3"}}).manifest
    conformance.check(predictors.Torch(), asked)


@pytest.mark.slow
def test_heads_that_are_zero_by_initialisation_are_drawn_from_the_seed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("timm")

    def answers(seed: int) -> results.Result:
        model = {"name": "mixer", "source": "timm:mixer_s32_224", "seed": seed}
        asked = {"model": model, "dataset": {"samples": 2}, "scenario": {"requests": 1, "warmup": 0}}
        return evaluated(reading.of_plain(asked).manifest, tmp_path)

    one, again, other = answers(0), answers(0), answers(1)
    first, second = one.outputs()["output0"]
    assert np.abs(first - second).max() > 1e-3
    assert one.content["outputs"]["digest"] == again.content["outputs"]["digest"] != other.content["outputs"]["digest"]
    assert "head is initialised with zeros" in " ".join(one.content["notes"])
    trained = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(trained.weight[0])
    assert predictors.draw_zero_weights(torch, trained, 0) == []


def test_outputs_that_are_constant_are_said_to_tell_nothing(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (board / "board.py").write_text(PROGRAM.replace("2 * sum(", "0 * sum("), encoding="utf-8")
    one, other = evaluated(manifest(), board), evaluated(manifest(), board)
    assert "outputs are constant" in " ".join(one.content["notes"])
    assert main(["evaluate", "compare", one.name, other.name, "--store", str(board / "store")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "outputs: equal, and constant, so they cannot be compared: output0 is 0.0 everywhere" in said
    assert "cannot tell" in said


TELLS = """\
import base64, json, struct, sys
takes = {"x": {"shape": [4, 4, 3], "dtype": "float32"}}
for line in sys.stdin:
    asked = json.loads(line)
    said = {"takes": takes}
    if "predict" in asked:
        given = asked["predict"]["inputs"]["x"]
        count, values = given["shape"][0], base64.b64decode(given["base64"])
        scores = []
        for row in range(count):  # the mean of red, green and blue are the scores of three classes
            pixels = struct.unpack("<48f", values[192 * row : 192 * row + 192])
            scores += [sum(pixels[channel::3]) for channel in range(3)]
        said = {"outputs": [{"shape": [count, 3], "dtype": "float32",
                             "base64": base64.b64encode(struct.pack(f"<{3 * count}f", *scores)).decode()}]}
    print(json.dumps(said), flush=True)
"""


def coloured(folder: Path, wrong: int = 0, names: tuple[str, ...] = ("a red", "b green", "c blue")) -> None:
    """Write five images of each colour, of the first class `wrong` in another colour."""
    from PIL import Image

    for kind, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            colour = [30 + number] * 3
            colour[(kind + (kind == 0 and number < wrong)) % 3] = 220
            Image.new("RGB", (8, 8), tuple(colour)).save(folder / name / f"{number}.png")


def told(folder: Path, **of: Any) -> results.Result:
    (folder / "board.py").write_text(TELLS, encoding="utf-8")
    steps = ["decode", {"resize": {"size": [4, 4]}}, {"cast": {"to": "float32"}}]
    model = {"inputs": [{"steps": of.pop("steps", steps)}], "outputs": [{"steps": of.pop("after", [])}]}
    return evaluated(manifest(model=model, dataset={"samples": 99, **of}), folder)


def test_a_folder_by_class_gives_an_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coloured(tmp_path / "data", wrong=2)
    one = told(tmp_path, source="folder:data")
    assert one.accuracy is not None
    assert (one.accuracy["top1"], one.accuracy["top5"]) == (13 / 15, None)  # three classes have no best five
    assert (one.accuracy["samples"], one.accuracy["classes"]) == (15, 3)
    low, high = one.accuracy["top1_interval"]
    assert low == pytest.approx(0.6212, abs=1e-4)  # Wilson's interval of 13 of 15
    assert high == pytest.approx(0.9626, abs=1e-4)
    swapped = [{"decode": {"color_mode": "BGR"}}, {"resize": {"size": [4, 4]}}, {"cast": {"to": "float32"}}]
    other = told(tmp_path, source="folder:data", steps=swapped)
    assert other.accuracy is not None
    assert other.accuracy["top1"] == 5 / 15  # green alone stays where it was
    where = ["--store", str(tmp_path / "store")]
    assert main(["evaluate", "list", *where]) == 0
    out = capsys.readouterr().out
    assert "top-1 %" in out
    assert "top-1 86.7 % (62.1 to 96.3) of 15 samples of 3 classes" in out
    assert main(["evaluate", "compare", one.name, other.name, *where]) == 0
    assert "86.7" in capsys.readouterr().out
    assert main(["evaluate", "leaderboard", "--by", "top1", *where, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["result"] for row in rows] == [one.name, other.name]


def test_the_first_samples_of_a_folder_by_class_are_of_all_classes(tmp_path: Path) -> None:
    coloured(tmp_path / "data")
    few = told(tmp_path, source="folder:data", samples=3).accuracy
    assert few is not None
    assert (few["top1"], few["samples"], few["classes"]) == (1.0, 3, 3)
    ranked = told(tmp_path, source="folder:data", after=[{"argsort": {"k": 2}}]).accuracy
    assert ranked is not None
    assert ranked["top1"] == 1


@pytest.mark.slow
def test_folders_that_are_numbers_are_those_classes_and_others_have_no_accuracy(tmp_path: Path) -> None:
    coloured(tmp_path / "numbered", names=("0", "2", "10"))
    wrong = told(tmp_path, source="folder:numbered").accuracy
    assert wrong is not None
    assert "labels are whole numbers from 0 to 2" in wrong["error"]
    coloured(tmp_path / "deep" / "more")
    assert told(tmp_path, source="folder:deep").accuracy is None
    assert told(tmp_path, source="synthetic:images").accuracy is None


def test_synthetic_images_of_classes_have_labels_from_the_seed(tmp_path: Path) -> None:
    made = told(tmp_path, source="synthetic:classes", samples=9, classes=3, height=8, width=8)
    assert made.accuracy is not None
    assert (made.accuracy["samples"], made.accuracy["classes"]) == (9, 3)
    assert 0 <= made.accuracy["top1"] <= 1


def test_a_predictor_that_answers_late_is_named(board: Path) -> None:
    class Hoarder(jsonlines.Command):
        def predict(self, handle: Any, batches: Any) -> Any:
            yield from list(super().predict(handle, list(batches)))

    with pytest.raises(AssertionError, match="before it takes the next one"):
        conformance.check(Hoarder(), manifest(), board)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('hello', flush=True)", "not JSON"),
        ("print('{\"opened\": true}', flush=True)", "does not describe the inputs"),
        ('print(\'{"takes": {"x": {"shape": [-3]}}}\', flush=True)', "not a shape"),
        ('print(\'{"takes": {"x": {"shape": [Infinity]}}}\', flush=True)', "does not describe the inputs"),
        ('print(\'{"takes": {"x": {"shape": [3], "dtype": "int8", "high": "x"}}}\', flush=True)', "high is 'x'"),
        ("raise SystemExit(7)", "exit code 7"),
    ],
)
def test_programs_that_speak_otherwise_are_refused(program: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text(f"import sys\nsys.stdin.readline()\n{program}\n", encoding="utf-8")
    with pytest.raises(ManifestError, match=said):
        evaluated(manifest(), tmp_path)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("said", ["10**400", "1e300", "float('nan')", "-1"])
def test_times_that_no_program_can_take_are_refused(said: str, board: Path) -> None:
    (board / "board.py").write_text(PROGRAM.replace("1_000_000 * count", said), encoding="utf-8")
    with pytest.raises(ManifestError, match="its answer to predict is invalid"):
        evaluated(manifest(), board)


def test_what_a_program_has_started_ends_with_it(board: Path) -> None:
    (board / "run.sh").write_text(
        f'sleep 600 < /dev/null > /dev/null &\necho $! > started\n"{sys.executable}" board.py\n', encoding="utf-8"
    )
    evaluated(manifest(model={"command": ["sh", "run.sh"]}), board)
    process = int((board / "started").read_text())
    until = time.monotonic() + 60
    while state_of(process) not in ("", "Z"):
        assert time.monotonic() < until
        time.sleep(0.01)


def state_of(process: int) -> str:
    """Return the state of a process as Linux names it; nothing if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_nothing_of_a_manifest_that_is_not_trusted_runs(board: Path) -> None:
    with pytest.raises(ManifestError, match="not run for untrusted manifests"):
        evaluated(manifest(), board, trusted=False)
    pytest.importorskip("torch")
    elsewhere = {"model": {"name": "path", "source": "micro:path-3"}, "dataset": {"source": "folder:/etc"}}
    with pytest.raises(ManifestError, match="leads out of the folder"):
        evaluated(reading.of_plain(elsewhere).manifest, board, trusted=False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": {"name": "x", "source": "../x.pt2"}}, "model.source"),
        ({"model": {"name": "x", "source": "/etc/x.onnx"}}, "model.source"),
        ({"model": {"name": "x", "source": "transformers:../x.json?vocab_size=9"}}, "model.source"),
        ({"model": {"name": "x", "source": "x.py:f"}}, "names a program"),
        ({"model": {"name": "x", "source": "micro:path-3"}, "dataset": {"source": "folder:~/x"}}, "dataset.source"),
        ({"model": {"name": "x", "source": "micro:path-3"}, "software": {"environment": {"LD_PRELOAD": "x.so"}}},
         "software.environment"),
    ],
)  # fmt: skip
def test_who_does_not_trust_a_manifest_refuses_it_before_anything_starts(
    asked: dict[str, object], said: str, tmp_path: Path
) -> None:
    manifest = reading.of_plain(asked).manifest
    for agent in transports.local_agents("all"):
        with pytest.raises(ManifestError, match=said):
            agent.submit(manifest, tmp_path, Options(tmp_path / "store"), show_nothing)
    assert not list(tmp_path.rglob("*.json"))
    facts = agents.local_facts(devices=False)
    assert any(said in each for each in agents.unmet_requirements(manifest, replace(facts, trusts=False)))
    assert not any(said in each for each in agents.unmet_requirements(manifest, facts))


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_result_has_the_manifest_the_requests_and_the_outputs(board: Path) -> None:
    asked = manifest(scenario={"kind": "batched", "batches": [1, 4], "requests": 6, "warmup": 1})
    found = evaluated(asked, board)
    assert found.name == f"{asked.identity[:12]}-0001"
    assert reading.read(found.path / "manifest.yaml").manifest.identity == asked.identity
    assert [part["batch"] for part in found.parts] == [1, 4]
    assert [len(found.requests(size)) for size in (1, 4)] == [6, 6]
    assert found.outputs()["output0"].shape == (4, 1, 1)
    assert found.content["outputs"]["digest"] == results.digest(found.outputs())
    assert {each.name for each in found.path.iterdir()} == {
        "manifest.yaml", "result.json", "requests.parquet", "evaluation.parquet", "outputs.npz",
    }  # fmt: skip
    assert evaluated(asked, board).name == f"{asked.identity[:12]}-0002"
    assert results.find(asked.identity[:6], board / "store").name.endswith("-0002")


def test_the_energy_of_an_input_is_that_of_the_device_while_it_serves(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import standin

    standin.install(tmp_path / "site", monkeypatch)
    begun = time.monotonic()
    monkeypatch.setattr(standin.StandIn, "energy_joules", lambda self: 100 * (time.monotonic() - begun))
    monkeypatch.setattr(running, "LEAST_ENERGY_NS", 1_000)
    scenario = {"kind": "batched", "batch": 2, "requests": 8}
    model = {"name": "path", "source": "micro:path-3"}
    asked = reading.of_plain({"model": model, "hardware": {"gpu": "any"}, "scenario": scenario}).manifest
    facts, given = replace(FACTS, gpus=(standin.PRODUCT,)), Options(store=board / "store", trusted=True)

    def measured() -> Any:
        (part,) = results.read(running.evaluate(asked, board, given, facts, show_nothing)).content["parts"]
        return part

    part = measured()
    assert 0 < part["joules_per_input"] < 100 * (time.monotonic() - begun) / 16
    monkeypatch.setattr(running, "LEAST_ENERGY_NS", 1 << 62)
    assert "joules_per_input" not in measured(), "the counter is updated too seldom for so short a time"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["no driver"], r"cannot be read \(RuntimeError: no driver\)"),
        ([5.0, "stand-in error: gone"], r"cannot be read \(RuntimeError: stand-in error: gone\); standin:0 is lost"),
        ([5.0, 3.0], "went from 5 to 3 J"),
        ([5.0, float("nan")], "went from 5 to nan J"),
        ([b"much"], "cannot be read .ValueError: "),
    ],
)
def test_an_energy_counter_that_fails_is_a_hole_with_its_reason(
    values: list[Any], says: str, board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import standin

    def read(self: object) -> Any:
        value = values.pop(0)
        if isinstance(value, str):
            raise RuntimeError(value)
        return value

    standin.install(tmp_path / "site", monkeypatch)
    monkeypatch.setattr(standin.StandIn, "energy_joules", read)
    monkeypatch.setattr(running, "LEAST_ENERGY_NS", 1)
    model = {"name": "path", "source": "micro:path-3"}
    asked = reading.of_plain({"model": model, "hardware": {"gpu": "any"}, "scenario": {"requests": 4}}).manifest
    facts, given = replace(FACTS, gpus=(standin.PRODUCT,)), Options(store=board / "store", trusted=True)
    found = results.read(running.evaluate(asked, board, given, facts, show_nothing))
    assert "joules_per_input" not in found.parts[0]
    (note,) = (note for note in found.content["notes"] if note.startswith("no energy"))
    assert re.search(f"^no energy: the counter of standin:0 {says}", note)
    assert values == []


def test_what_precedes_the_load_has_progress(board: Path) -> None:
    asked: list[tuple[str, int, int]] = []
    given = Options(store=board / "store", trusted=True)
    running.evaluate(manifest(), board, given, FACTS, lambda *said: asked.append(said))
    stages = list(dict.fromkeys(stage for stage, *_ in asked))
    assert stages == ["opening", "outputs", "warm-up", "board-online"]
    assert [said for said in asked if said[0] == "outputs"] == [("outputs", number, 4) for number in range(4)]


def test_times_that_a_simulator_says_are_the_latencies(board: Path) -> None:
    found = evaluated(manifest(scenario={"kind": "constant", "rate": 2000, "requests": 20}), board)
    part = found.parts[0]
    assert found.content["simulated"]
    assert part["service_ms"] == 1.0
    assert part["p99_ms"] == pytest.approx(10.5, abs=0.01)  # one each 0.5 ms, each takes 1 ms: the 20th waits 9.5 ms
    requests = found.requests()
    assert (np.diff(requests.due_ns) == 500_000).all()


@pytest.mark.parametrize("kind", ["online", "offline", "multi-stream", "replay", "poisson", "burst", "cold-start"])
def test_every_scenario_that_is_named_runs(kind: str, board: Path) -> None:
    more = {
        "replay": {"times_s": [0, 0.1, 0.3]},
        "poisson": {"rate": 100},
        "burst": {"rate": 9, "together": 3},
        "multi-stream": {"streams": 2},
    }
    found = evaluated(manifest(scenario={"kind": kind, "requests": 3, **more.get(kind, {})}), board)
    assert found.parts[0]["requests"] == 3
    assert found.parts[0]["p50_ms"] > 0


@pytest.mark.parametrize(
    ("scenario", "samples"),
    [
        ({"kind": "online", "requests": 40, "warmup": 3}, 40),
        ({"kind": "replay", "times_s": [number / 1000 for number in range(90)]}, 90),
        ({"kind": "multi-stream", "streams": 8, "requests": 20}, 160),
        ({"kind": "max-rate", "latency_ms": 5, "percentile": 90, "requests": 10}, 112),
    ],
)
def test_requests_have_samples_of_their_own_as_far_as_there_are_some(
    scenario: dict[str, Any], samples: int, board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_PROBES", 1)
    found: list[Any] = []
    inner = running.PreparedModel.batch
    monkeypatch.setattr(running.PreparedModel, "batch", lambda *given: found.append(made := inner(*given)) or made)
    evaluated(manifest(scenario=scenario, dataset={"samples": samples}), board)
    batches = [each["x"] for each in found]
    assert len({row.tobytes() for batch in batches for row in batch}) == samples
    outputs = min(samples, running.MOST_OUTPUTS)  # one by one, before the load
    assert {len(each) for each in batches[outputs:]} == {scenario.get("streams", 1)}  # warm-up is as the load


def test_a_cold_start_has_the_time_that_a_simulator_says(board: Path) -> None:
    text = PROGRAM.replace("1_000_000 * count", "60_000_000_000 * count")
    (board / "board.py").write_text(text, encoding="utf-8")
    found = evaluated(manifest(scenario={"kind": "cold-start", "requests": 2}), board)
    assert found.content["simulated"]
    assert 60_000 < found.parts[0]["p50_ms"] < 120_000


def test_the_highest_rate_is_an_interval_with_the_requests_at_its_lower_end(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_PROBES", 5)
    asked: list[tuple[str, int, int]] = []
    load = {"kind": "max-rate", "latency_ms": 3, "percentile": 50, "requests": 60}
    options = Options(store=board / "store", trusted=True)
    place = running.evaluate(manifest(scenario=load), board, options, FACTS, lambda *said: asked.append(said))
    found = results.read(place)
    (part,) = found.parts
    assert part["rate_low"] < md1_rate(3, 0.5) < part["rate_high"]  # its requests take 1 ms each
    assert {each["held"] for each in part["probes"]} >= {"held", "broken"}
    requests = found.requests()
    assert len(requests) == 60
    rate = 60e9 / (requests.due_ns[-1] - requests.due_ns[0])
    assert rate == pytest.approx(part["rate_low"], rel=0.5)  # of 60 arrivals that come independently
    tried = [each["rate"] for each in part["probes"]]
    named = {what for what, _, _ in asked if "per second" in what}
    assert named == {f"board-max-rate, {r:.3g} per second" for r in tried}
    assert asked[-1] == ("board-max-rate", 5, 5)


def test_a_limit_that_no_rate_holds_ends_the_search_with_the_reason(board: Path) -> None:
    load = {"kind": "max-rate", "latency_ms": 0.5, "percentile": 90, "requests": 10}
    found = evaluated(manifest(scenario=load), board)
    assert found.parts[0]["rate_low"] is None
    assert "takes at least 1 ms" in found.content["notes"][0]
    assert len(found.requests())


@pytest.mark.slow
def test_the_highest_rate_of_a_program_is_found_within_five_percent(
    board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {"kind": "max-rate", "latency_ms": 4, "percentile": 90, "requests": 300}
    found = evaluated(manifest(scenario=load), board)
    assert found.parts[0]["rate_estimate"] == pytest.approx(md1_rate(4, 0.9), rel=0.05)
    evaluated(manifest(), board)
    where = ["--store", str(board / "store")]
    assert main(["evaluate", "leaderboard", "--by", "rate", *where]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2  # of the search alone
    assert f"{found.parts[0]['rate_low']:.0f} to" in shown[1]
    assert main(["evaluate", "list", *where]) == 0
    assert "highest rate per second" in (out := capsys.readouterr().out)
    assert main(["evaluate", "compare", found.name, found.name, *where]) == 0
    assert "rate low" in (out := capsys.readouterr().out)
    assert "without waiting" in out


def test_an_evaluation_that_fails_leaves_nothing(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "drive", fails)
    with pytest.raises(KeyboardInterrupt):
        evaluated(manifest(), board)
    assert list((board / "store").iterdir()) == []


def of_text(*steps: Any) -> dict[str, Any]:
    return {"model": {"inputs": [{"steps": list(steps)}]}, "dataset": {"source": "synthetic:text", "samples": 2}}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"model": {"name": "none"}}, "no board"),
        ({"hardware": {"cores": 999}}, "999 cores"),
        ({"software": {"environment": {"XSP_OF_A_TEST": "1"}}}, "a separate process"),
        ({"dataset": {"source": "synthetic:images"}}, "need steps"),
        ({"dataset": {"source": "http://x"}}, "there is no"),
        ({"model": {"inputs": [{"steps": ["decode"]}]}}, "steps need samples from files: dataset.source"),
        ({"model": {"inputs": [{"steps": [{"resize": {"sise": 3}}]}]}}, "did you mean size"),
        ({"scenario": {"kind": "server", "rate": 5, "batch": 2}}, "scenario.batch: requests of server have one input"),
        ({"scenario": {"kind": "multi-stream", "batch": 2}}, "scenario.batch: requests of multi-stream have one"),
        ({"scenario": {"streams": 2}}, "scenario.streams: online has none"),
        ({"scenario": {"kind": "constant", "rate": 1e-9}}, "scenario: the last request would be due after"),
        ({"scenario": {"kind": "offline", "batch": 10**6, "requests": 10**6, "warmup": 0}}, "scenario: 10000000000"),
        (of_text("decode", {"resize": 8}), r"resize: raises \w+ on|decode: "),
        (of_text({"normalise": {"mean": 1}}), "normalise: raises AttributeError on str"),
        (of_text("tokenise", {"cast": {"to": "float31"}}), r"cast: raises TypeError on an array of \(128,\)"),
        ({"model": {"outputs": [{"steps": [{"reshape": {"shape": [7]}}]}]}}, "reshape: raises ValueError on an"),
        ({"model": {"files": [{"path": "board.py", "checksum": "md5:" + "0" * 32}]}}, "board.py has the checksum md5:"),
        ({"model": {"files": [{"path": "./board.py", "checksum": "0" * 64}]}}, "board.py has the checksum"),
        ({"dataset": {"source": "folder:none"}}, "dataset.source: there is no folder 'none'"),
        ({"model": {"command": ["./no-program"]}}, "no-program"),
        ({"model": {"command": [], "source": "torchvsion:resnet18"}}, "there is no source 'torchvsion'"),
        ({"model": {"command": [], "source": "none.onnx"}}, "model.source: there is no file 'none.onnx'"),
        ({"model": {"command": [], "source": "none.py:f"}}, "none.py: there is no such file"),
        ({"model": {"preprocess": {"function": "board.py:f"}}}, "model.preprocess: board.py:f"),
        (
            of_text({"resize": {"size": "big"}}),
            r"inputs\[0\].steps\[0\]: resize: size is 'big'; write a whole number or",
        ),
        (of_text({"crop": {"size": [2, 2], "fraction": "half"}}), "crop: fraction is 'half'; write a number"),
    ],
)
def test_what_cannot_be_carried_out_says_why(of: dict[str, Any], said: str, board: Path) -> None:
    with pytest.raises(ManifestError, match=said):
        evaluated(manifest(**of), board)
    with pytest.raises(ManifestError, match=said):
        checked(manifest(**of), board)


def checked(asked: Manifest, folder: Path) -> list[str]:
    return running.check(asked, folder, Options(store=folder / "store", trusted=True), FACTS, show_nothing)


def test_what_can_run_is_checked_without_a_result(board: Path) -> None:
    assert checked(manifest(scenario={"kind": "batched", "batches": [1, 4]}), board) == []
    assert not (board / "store").exists()


def test_a_folder_with_fewer_images_than_are_asked_for_is_noted(board: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (board / "images").mkdir()
    for number in range(3):
        image.new("RGB", (1, 1), (number, 0, 0)).save(board / "images" / f"{number}.png")
    steps = ["decode", {"cast": {"to": "float32"}}, {"reshape": {"shape": [3]}}]
    asked = manifest(model={"inputs": [{"steps": steps}]}, dataset={"source": "folder:images", "samples": 999_999})
    said = "dataset.samples: 999,999 are asked for, and 'images' has 3 images"
    assert said in " ".join(checked(asked, board))
    result = evaluated(asked, board)
    assert result.content["samples"]["count"] == 3
    assert said in " ".join(result.content["notes"])
    (board / "images" / "2.png").write_bytes(b"not an image")
    with pytest.raises(ManifestError, match=r"Pillow cannot read it \(cannot identify image file\), in 2.png$"):
        checked(asked, board)


def test_answers_with_different_numbers_of_outputs_are_refused(board: Path) -> None:
    growing = PROGRAM.replace("for line", "calls = 0\nfor line", 1).replace(
        "    print(", '    if "predict" in asked:\n        calls += 1\n        said["outputs"] *= calls\n    print('
    )
    (board / "board.py").write_text(growing, encoding="utf-8")
    with pytest.raises(ManifestError, match="the number of outputs differs between samples: 1 and 4"):
        evaluated(manifest(), board)


def test_damaged_results_are_named_and_do_not_hide_others(board: Path) -> None:
    good, bad = evaluated(manifest(), board), evaluated(manifest(), board)
    (bad.path / "result.json").write_text('{"format": 1}', encoding="utf-8")
    found, wrong = results.read_all(board / "store")
    assert [each.name for each in found] == [good.name]
    assert len(wrong) == 1
    assert "damaged" in wrong[0]


@pytest.mark.parametrize("lacks", ["agent", "parts", "outputs", "p50_ms", "xsp"])
def test_a_result_that_lacks_a_field_is_damaged(lacks: str, board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = evaluated(manifest(), board), evaluated(manifest(), board)
    content = json.loads((bad.path / "result.json").read_text(encoding="utf-8"))
    (content["parts"][0] if lacks == "p50_ms" else content).pop(lacks)
    (bad.path / "result.json").write_text(json.dumps(content), encoding="utf-8")
    where = ["--store", str(board / "store")]
    assert main(["evaluate", "list", *where]) == 0
    said = capsys.readouterr()
    assert good.name in said.out
    assert f"{lacks}: Field required)" in said.err
    assert main(["evaluate", "compare", good.name, bad.name, *where]) == 2


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04N."])
def test_outputs_that_are_damaged_are_one_error(
    content: bytes, board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = evaluated(manifest(), board), evaluated(manifest(), board)
    (bad.path / "outputs.npz").write_bytes(content)
    assert main(["evaluate", "compare", good.name, bad.name, "--store", str(board / "store")]) == 2
    assert "outputs.npz: damaged" in capsys.readouterr().err


# --- images -----------------------------------------------------------------------------------------------------------

IMAGES = {
    "model": {
        "name": "squeezenet", "source": "torchvision:squeezenet1_1",
        "inputs": [{"type": "image", "shape": [3, 64, 64], "steps": [
            "decode", {"resize": {"size": 72}}, {"crop": 64},
            {"normalise": {"divide": 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}, "layout"]}],
        "outputs": [{"steps": ["softmax", {"argsort": {"k": 3}}]}],
    },
    "dataset": {"source": "synthetic:images", "samples": 2, "height": 80, "width": 100},
    "scenario": {"requests": 2, "warmup": 0},
}  # fmt: skip


@pytest.mark.slow
def test_images_go_through_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    found = evaluated(reading.of_plain(IMAGES).manifest, tmp_path)
    assert found.outputs()["output0"].shape == (2, 1, 3)
    assert found.outputs()["output0"].max() < 1000


# --- the commands, and the process of its own -------------------------------------------------------------------------


def test_run_and_list_show_what_was_found(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"name": "sim", "model": {"name": "board", "command": [sys.executable, "board.py"]},
             "scenario": {"requests": 4}}  # fmt: skip
    (board / "m.yaml").write_text(json.dumps(asked), encoding="utf-8")
    where = ["--store", str(board / "store")]
    assert main(["evaluate", "run", str(board / "m.yaml"), *where, "-q"]) == 0
    out = capsys.readouterr().out
    assert "sim" in out
    assert "~ times reported by a simulator" in out
    assert max(map(len, out.splitlines()[:3])) <= 80
    assert main(["evaluate", "list", *where, "--format", "json"]) == 0
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)] == ["online"]
    (board / "m.yaml").write_text(json.dumps({**asked, "hardware": {"cores": 999}}), encoding="utf-8")
    assert main(["evaluate", "run", str(board / "m.yaml"), *where, "-q"]) == 2
    assert "999 cores are required" in capsys.readouterr().err


@pytest.mark.slow
def test_the_next_command_is_one_that_works_where_names_have_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise XspError("not here")

    place = tmp_path / "my models"
    place.mkdir()
    (place / "board.py").write_text(PROGRAM, encoding="utf-8")
    asked = {"model": {"name": "board", "command": [sys.executable, "board.py"]}, "scenario": {"requests": 2}}
    (place / "m.yaml").write_text(json.dumps(asked), encoding="utf-8")
    assert main(["evaluate", "check", str(place / "m.yaml")]) == 0
    assert f"next: xsp evaluate run '{place}/m.yaml'" in capsys.readouterr().out
    words = ["evaluate", "run", str(place / "m.yaml"), "--store", str(place / "r"), "-q", "--trace", "M"]
    assert main(words) == 0
    (found,) = results.read_all(place / "r")[0]
    assert f"next: xsp evaluate list --store '{place}/r', or xsp report '{found.path}/run'" in capsys.readouterr().out
    monkeypatch.setattr(extras, "_trace", fails)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "no trace: not here" in out
    assert "xsp report" not in out


@pytest.mark.parametrize("name", ["local", deep("process")])
def test_requests_are_not_disturbed_by_their_progress(name: str, board: Path) -> None:
    asked: list[tuple[str, int, int]] = []
    (agent,) = transports.local_agents(name)
    options = Options(store=board / "store", trusted=True)
    begin = time.monotonic()
    agent.submit(manifest(scenario={"requests": 400}), board, options, lambda *said: asked.append(said))
    assert len(asked) <= 5 + 2 * (time.monotonic() - begin) / transports.LISTENING_S
    assert ("board-online", 400, 400) in asked


def test_a_manifest_that_fails_does_not_hide_the_results_of_others(
    board: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = running.evaluate

    def evaluate(asked: Manifest, *given: Any) -> Path:
        if asked.name == "bad":
            raise XspError("something else is wrong")
        return inner(asked, *given)

    monkeypatch.setattr(running, "evaluate", evaluate)
    for name in ("good", "bad"):
        asked = {"name": name, "model": {"name": "board", "command": [sys.executable, "board.py"]}}
        (board / f"{name}.yaml").write_text(json.dumps(asked), encoding="utf-8")
    files = [str(board / f"{name}.yaml") for name in ("bad", "good")]
    assert main(["evaluate", "run", *files, "--store", str(board / "store"), "-q"]) == 3
    said = capsys.readouterr()
    assert "bad: something else is wrong" in said.err
    assert "good" in said.out


@pytest.mark.slow
def test_a_process_checks_as_this_one_does(board: Path) -> None:
    for asked, reason in ((manifest(), ""), (manifest(model={"name": "none"}), "no board")):
        agent, options = transports.SubprocessAgent(), Options(board / "store", trusted=True)
        if not reason:
            assert agent.check(asked, board, options, show_nothing) == []
            continue
        with pytest.raises(ManifestError, match=reason):
            agent.check(asked, board, options, show_nothing)
    assert not (board / "store").exists()


def test_a_configuration_in_a_file_is_looked_for_in_the_folder_of_the_manifest(tmp_path: Path) -> None:
    asked = reading.of_plain({"model": {"name": "x", "source": "transformers:./c.json?vocab_size=9"}}).manifest
    assert predictors.source_of(asked, tmp_path, "cpu")[0] == f"transformers:{tmp_path}/c.json?vocab_size=9"
    plain = reading.of_plain({"model": {"name": "x", "source": "transformers:bert"}}).manifest
    assert predictors.source_of(plain, tmp_path, "cpu")[0] == "transformers:bert"


@pytest.mark.slow
def test_this_process_and_one_of_its_own_give_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    asked = reading.of_plain({**IMAGES, "software": {"threads": 1}}).manifest
    options = Options(store=tmp_path, trusted=True)
    kept = []
    for agent in transports.local_agents("all"):
        found = results.read(agent.submit(asked, tmp_path, options, show_nothing))
        kept.append((found.content["outputs"]["digest"], found.content["transport"]))
    assert kept[0][0] == kept[1][0]
    assert [transport for _, transport in kept] == ["in-process", "own process"]


@pytest.mark.slow
def test_a_process_of_its_own_has_the_variables_that_are_asked_for(tmp_path: Path) -> None:
    asked = manifest(model={"command": [sys.executable, "-c", ENVIRONMENT]},
                     software={"environment": {"XSP_OF_A_TEST": "5"}})  # fmt: skip
    (agent,) = transports.local_agents("process")
    found = results.read(agent.submit(asked, tmp_path, Options(tmp_path, trusted=True), show_nothing))
    assert (found.outputs()["output0"] == 5).all()
    assert "XSP_OF_A_TEST" not in os.environ
    with pytest.raises(ManifestError, match="no board"):
        agent.submit(manifest(model={"command": [sys.executable, "-c", "print('{\"error\": \"no board\"}')"]}),
                     tmp_path, Options(tmp_path, trusted=True), show_nothing)  # fmt: skip


ENVIRONMENT = """\
import base64, json, os, struct, sys
value = base64.b64encode(struct.pack("<d", float(os.environ["XSP_OF_A_TEST"]))).decode()
for line in sys.stdin:
    said = {"takes": {"x": {"shape": [1]}}, "outputs": [{"shape": [1, 1], "dtype": "float64", "base64": value}]}
    print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
def test_trace_advice_and_bound_are_kept_with_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    import xsp
    from xsp.bound import sources

    given: list[Any] = []
    bound_of = sources.of
    monkeypatch.setattr(sources, "of", lambda *args, **of: given.append((args, of)) or bound_of(*args, **of))
    asked = reading.of_plain({"model": {"name": "p", "source": "micro:path-3"}, "scenario": {"requests": 2}}).manifest
    found = evaluated(asked, tmp_path, levels="M/L", needs_bound=True)
    kept = json.loads((found.path / "bound.json").read_text(encoding="utf-8"))
    if kept["ratio"] is None:  # of a machine without timings of these calls
        assert "no ratio of best to measured, because best is missing: no call is timed" in found.content["notes"][0]
    assert len(found.content["notes"]) == (kept["ratio"] is None)
    assert xsp.load(found.path / "run").spans.limit(1).fetchall()
    assert json.loads((found.path / "bound.json").read_text(encoding="utf-8"))["name"]
    assert "repeated" in json.loads((found.path / "advice.json").read_text(encoding="utf-8"))["asked"]
    (_, tensor), of = given[0]
    assert tuple(tensor.shape) == (1, *predictors.Torch().open(asked, tmp_path, "").takes["0"].shape)
    assert of["batch"] == 1
    assert of["trace"].name == "run"

    other = evaluated(asked, tmp_path, levels="M/L")
    where = ["--store", str(tmp_path / "store")]
    assert main(["evaluate", "compare", found.name, other.name, *where]) == 0
    out = capsys.readouterr().out
    assert "by layer: " in out
    assert "before ms" in out
    assert "all of it: xsp compare" in out
    assert main(["evaluate", "compare", found.name, other.name, *where, "--format", "json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert {each["section"] for each in said["by_layer"]["rows"]} == {"step", "layer"}


@pytest.mark.slow
def test_the_command_records_a_trace_and_says_why_there_is_no_bound(
    board: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"model": {"name": "board", "command": [sys.executable, "board.py"]}, "scenario": {"requests": 4}}
    (board / "m.yaml").write_text(json.dumps(asked), encoding="utf-8")
    where = ["--store", str(board / "store"), "-q"]
    assert main(["evaluate", "run", str(board / "m.yaml"), *where, "--trace", "M", "--bound"]) == 0
    out = capsys.readouterr().out
    assert "no bound: a command has no graph" in out
    (found,), _ = results.read_all(board / "store")
    assert f"next: xsp evaluate list --store {board / 'store'}, or xsp report {found.path / 'run'}" in out
    assert (found.path / "run").is_dir()
