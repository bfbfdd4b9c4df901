"""Functions of the user's before and after the model: in a process of their own, held to their time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("torch")

from depth import deep
from evaluations import show_nothing

from xsp.cli import main
from xsp.errors import ManifestError
from xsp.evaluate import agents, reading, results, transports, userfunctions
from xsp.evaluate.agents import Options

STEPS = [
    "decode", {"resize": {"size": [32, 32]}}, {"normalise": {"divide": 255, "mean": [0.5], "std": [0.5]}}, "layout",
]  # fmt: skip

CODE = """
import io, os, sys, time
import numpy as np
from PIL import Image
import beside

def image(context, data):
    context["calls"] = context.get("calls", 0) + 1
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((32, 32), Image.BILINEAR))
    print("this goes nowhere")
    assert context["manifest"]["model"]["name"] == "m" and os.path.exists("steps.py")
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32).transpose(2, 0, 1)

def softmax(context, data):
    made = np.exp(data.astype(np.float64) - data.max(axis=-1, keepdims=True))
    return made / made.sum(axis=-1, keepdims=True)

def counted(context, data):
    context["calls"] = context.get("calls", 0) + 1
    return np.array([context["calls"], beside.PID != int(os.environ["XSP_TEST_PID"])])

def doubled(context, data):
    return {name: 2 * each for name, each in data.items()}

def broken(context, data):
    raise KeyError("no such thing")

def slow(context, data):
    time.sleep(60)

def gone(context, data):
    os._exit(3)

def text(context, data):
    return "a word"

def unsigned(context, data):
    return np.zeros(3, np.uint16)

def flat(context, data):
    return np.zeros(3)

def other(context, data):
    return {"other": np.zeros((3, 32, 32))}
"""

LINE = 1 + CODE.splitlines().index('    raise KeyError("no such thing")')

MODEL = """
import torch

def build(batch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5)).eval(), torch.randn(batch, 3, 32, 32)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "steps.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "beside.py").write_text("import os\nPID = os.getpid()\n", encoding="utf-8")
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.setenv("XSP_TEST_PID", str(os.getpid()))
    return tmp_path


def asked(data: str = "synthetic:images", **model: Any) -> Any:
    return reading.of_plain({
        "model": {"name": "m", "source": "model.py:build", **model}, "dataset": {"source": data, "samples": 3},
        "scenario": {"requests": 3, "warmup": 0}, "software": {"threads": 1},
    }).manifest  # fmt: skip


def carried_out(manifest: Any, folder: Path, agent: str = "local") -> results.Result:
    (there,) = transports.local_agents(agent)
    return results.read(there.submit(manifest, folder, Options(folder / "store", trusted=True), show_nothing))


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"function": f"steps.py:{name}", **more}


@pytest.mark.slow
def test_a_function_does_what_built_in_steps_do(folder: Path) -> None:
    steps = asked(inputs=[{"steps": STEPS}], outputs=[{"steps": ["softmax"]}])
    built_in = carried_out(steps, folder)
    manifest = asked(preprocess=named("image"), postprocess=named("softmax"))
    own = [carried_out(manifest, folder, agent) for agent in ("local", "process")]
    assert {each.content["outputs"]["digest"] for each in own} == {built_in.content["outputs"]["digest"]}
    assert [note.partition(" runs in ")[0] for note in own[0].content["notes"]] == [
        "model.preprocess: steps.py:image", "model.postprocess: steps.py:softmax",
    ]  # fmt: skip
    assert own[0].content["parts"][0]["processor_ms"] is None  # the process's own time is not counted


def test_the_context_lasts_and_the_process_is_another(folder: Path) -> None:
    (made,) = carried_out(asked("synthetic", postprocess=named("counted")), folder).outputs().values()
    assert made[:, 0].tolist() == [[1, 1], [2, 1], [3, 1]]


def test_arrays_by_the_name_of_an_input(folder: Path) -> None:
    before = carried_out(asked("synthetic"), folder).outputs()["output0"]
    after = carried_out(asked("synthetic", preprocess=named("doubled")), folder).outputs()["output0"]
    assert not (before == after).all()


def test_a_file_that_reads_its_input_finds_none_and_takes_no_question(folder: Path) -> None:
    code = (folder / "steps.py").read_text(encoding="utf-8")
    (folder / "steps.py").write_text(f"import sys\nassert sys.stdin.read() == ''\n{code}", encoding="utf-8")
    before = carried_out(asked("synthetic"), folder).outputs()["output0"]
    after = carried_out(asked("synthetic", preprocess=named("doubled")), folder).outputs()["output0"]
    assert not (before == after).all()


@pytest.mark.parametrize(
    ("side", "given", "says"),
    [
        ("preprocess", named("broken"), rf"steps.py:broken: line {LINE}: KeyError: 'no such thing'"),
        ("preprocess", named("slow", seconds=0.2), r"did not answer within 0.2 s \(the limit is `seconds` beside"),
        ("postprocess", named("gone"), r"its process ended \(exit code 3\)"),
        deep("preprocess", named("text"), "it returns str, not an array"),
        deep("preprocess", named("unsigned"), "TypeError: an array of uint16 cannot be passed"),
        ("preprocess", named("flat"), r"a sample is \(3,\), the model takes \(3, 32, 32\)"),
        deep("preprocess", named("other"), "the model takes '0', but it returns other"),
        ("preprocess", named("imgae"), "has no function 'imgae'.*image"),
        ("postprocess", {"function": "nosuch.py:f"}, "there is no such file"),
        ("postprocess", {"function": "steps.py"}, "is not a function; write file.py:name"),
        ("preprocess", "def f(context, data): ...", "never run; write it as steps, or in a file"),
    ],
)
def test_what_goes_wrong_is_one_error_and_nothing_is_kept(folder: Path, side: str, given: Any, says: str) -> None:
    manifest = asked(**{side: given})
    if side == "postprocess":
        manifest = asked("synthetic", **{side: given})
    with pytest.raises(ManifestError, match=says):
        carried_out(manifest, folder)
    assert not [each for each in (folder / "store").glob("*") if each.is_dir()]


def test_what_no_line_of_json_holds_is_one_error_too(folder: Path) -> None:
    manifest = asked("synthetic", postprocess=named("softmax"))
    with (
        userfunctions.of(manifest, folder) as found,
        pytest.raises(ManifestError, match=r"softmax: .*uint16 cannot be"),
    ):
        found["postprocess"](np.zeros(3, np.uint16))


def test_functions_do_not_run_for_manifests_of_others(folder: Path) -> None:
    manifest = asked(preprocess=named("image"))
    assert any("names code" in each for each in agents.trust_objections(manifest))
    for agent in transports.local_agents("all"):
        with pytest.raises(ManifestError, match="names code"):
            agent.submit(manifest, folder, Options(folder / "store"), show_nothing)


def test_by_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = asked(preprocess=named("image")).plain()
    (folder / "m.yaml").write_text(json.dumps(plain), encoding="utf-8")
    assert main(["evaluate", "run", str(folder / "m.yaml"), "--store", str(folder / "s"), "-q"]) == 0
    said = capsys.readouterr()
    assert "transfer to it and back" in said.out
    assert "this goes nowhere" not in said.out + said.err
