"""Manifests: what is read, what is refused with which words, and what makes two of them the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from xsp.cli import main
from xsp.errors import ManifestError
from xsp.evaluate import agents, manifest, pipeline, reading, yamltext

PLAIN = """\
# a comment
name: small
model:
  name: path
  version: 1.10
  source: micro:path-3
scenario: {kind: online, requests: 5}
"""

MLMODELSCOPE = """\
name: Alexnet_of_mine
framework: {name: TensorFlow, version: ^1.12}
version: 1.0
container:
  amd64: {cpu: images/tf:cpu, gpu: images/tf:gpu}
description: >
  five convolutions
license: unrestricted
inputs:
  - type: image
    description: what is looked at
    parameters:
      element_type: float32
      input_layer: data
      layout: CHW
      color_mode: BGR
      dimensions: [3, 227, 224]
      mean: [104, 117, 123]
      scale: 1.0
output:
  type: classification
  parameters:
    element_type: float32
    probabilities_layer: prob
    features_url: http://example.org/synset.txt
    features_checksum: 4d234b5833aca44928065a180db3016a
model:
  base_url: http://example.org/alexnet
  graph_path: alexnet.pb
  graph_checksum: 12345678901234567890123456789012
  is_archive: false
attributes: {kind: CNN, top1: 57.1, training_dataset: ImageNet}
"""

DLSPEC = """\
hardware: {id: p3, cpu: Xeon, gpu: V100, memory: 61 GB, setup: "#!/bin/sh\\necho turbo off"}
software: {id: tf, name: tensorflow, version: 1.12, env: {OMP_NUM_THREADS: 4}}
dataset: {id: imagenet, name: ImageNet, version: 2012, licence: research, sources: http://example.org/imagenet}
model:
  id: inception
  version: 3.0
  task: image-classification
  pre-process: "def fun(ctx, data): return data"
  inputs: [{type: image, layer_name: in}]
  model: {sources: [http://example.org/inception.pb], checksum: 0123456789abcdef0123456789abcdef}
  system-requirements: [cpu]
reference-log: {expected_outputs: [1, 2], hyper-parameters: {lr: 0.1}, remarks: "as published"}
"""


def of(text: str, tmp_path: Path, name: str = "m.yaml") -> reading.LoadedManifest:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return reading.read(path)


def refused(text: str, tmp_path: Path) -> str:
    with pytest.raises(ManifestError) as error:
        of(text, tmp_path)
    return str(error.value).replace(str(tmp_path), "")


# --- identity ---------------------------------------------------------------------------------------------------------


def test_order_comments_and_defaults_that_are_written_out_make_no_difference(tmp_path: Path) -> None:
    other = """\
scenario:
  requests: 5.0
  kind: 'online'
  warmup: 3
model: {source: "micro:path-3", version: "1.10", seed: 0, name: path}
software: {}
name: small
"""
    assert of(PLAIN, tmp_path).manifest.identity == of(other, tmp_path).manifest.identity


STEPS = """
  inputs:
    - type: image
      steps: [decode, {resize: {size: 64}}, {crop: 48}, {normalise: {divide: 255}}]
  outputs: [{type: classification, steps: [{argsort: {k: 3}}]}]
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("decode,", "{decode: {color_mode: RGB}},", True),
        ("{size: 64}", "{method: bilinear, size: 64}", True),
        ("{size: 64}", "{method: nearest, size: 64}", False),
        ("{crop: 48}", "{crop: {size: 48}}", True),
        ("normalise:", "normalize:", True),
        ("argsort: {k: 3}", "top_k: 3", True),
        ("argsort: {k: 3}", "argsort", False),
    ],
)
def test_steps_that_do_the_same_are_the_same(before: str, after: str, same: bool, tmp_path: Path) -> None:
    text = PLAIN.replace("name: path\n", "name: path" + STEPS, 1)
    other = text.replace(before, after, 1)
    assert text != other
    assert (of(text, tmp_path).manifest.identity == of(other, tmp_path).manifest.identity) is same


@pytest.mark.parametrize(
    ("before", "after"),
    [("1.10", "1.1"), ("requests: 5", "requests: 6"), ("path-3", "path-4"), ("name: path\n", "name: path\n  of: me\n")],
)
def test_everything_else_does(before: str, after: str, tmp_path: Path) -> None:
    assert of(PLAIN, tmp_path).manifest.identity != of(PLAIN.replace(before, after, 1), tmp_path).manifest.identity


@pytest.mark.parametrize("text", [PLAIN, MLMODELSCOPE, DLSPEC])
def test_what_is_written_again_keeps_its_identity(text: str, tmp_path: Path) -> None:
    found = of(text, tmp_path).manifest
    again = of(yamltext.write(found.plain()), tmp_path, "again.yaml")
    assert again.dialect == "xsp"
    assert again.manifest.identity == found.identity


def test_fields_that_are_not_known_are_kept_and_named(tmp_path: Path) -> None:
    found = of(PLAIN + "modle: x\nextra: {deep: [1, 2]}\n", tmp_path)
    assert found.manifest.plain()["extra"] == {"deep": [1, 2]}
    assert list(found.notes) == [
        "modle is kept but not used; did you mean model?",
        "extra is kept but not used",
    ]


def test_sections_may_stand_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text("name: path\nversion: 1.10\nsource: micro:path-3\n", encoding="utf-8")
    split = of("name: small\nmodel: net.yaml\nscenario: {requests: 5}\n", tmp_path).manifest
    assert split.identity == of(PLAIN, tmp_path).manifest.identity
    assert "is outside the folder" in refused("model: ../../etc/passwd.yaml\n", tmp_path)


def test_manifests_hold_against_their_own_schema(tmp_path: Path) -> None:
    schema = json.loads(json.dumps(manifest.schema()))
    for text in (PLAIN, MLMODELSCOPE, DLSPEC):
        jsonschema.validate(of(text, tmp_path).manifest.plain(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"name": ""}}, schema)


# --- dialects ---------------------------------------------------------------------------------------------------------


def test_a_model_of_mlmodelscope_has_its_pipeline_in_steps(tmp_path: Path) -> None:
    found = of(MLMODELSCOPE, tmp_path)
    model = found.manifest.model
    assert (found.dialect, found.notes) == ("MLModelScope", ())
    assert model.task == "image-classification"
    assert [step.op for step in model.inputs[0].steps] == ["decode", "resize", "normalise", "layout"]
    assert model.inputs[0].steps[1].options == {"size": [227, 224]}
    assert model.inputs[0].layer == "data"
    assert model.framework is not None
    assert (model.framework.version, model.version) == ("^1.12", "1.0")
    assert model.files[0].checksum == "12345678901234567890123456789012"
    reasons = [*pipeline.problems(found.manifest), *agents.unmet_requirements(found.manifest, FACTS)]
    assert [each.split(" ")[0] for each in reasons] == ["model.source", "the", "a"]  # no predictor, and a container


def test_a_framework_of_mlmodelscope_is_software(tmp_path: Path) -> None:
    found = of("name: PyTorch\nversion: 1.2\ncontainer: {amd64: {cpu: images/torch}}\n", tmp_path)
    assert found.dialect == "MLModelScope"
    assert found.manifest.software.version == "1.2"
    assert found.manifest.software.container == {"amd64": {"cpu": "images/torch"}}


def test_the_five_manifests_of_dlspec_are_one(tmp_path: Path) -> None:
    found = of(DLSPEC, tmp_path)
    plain = found.manifest.plain()
    assert found.dialect == "DLSpec"
    assert plain["hardware"]["setup"].startswith("#!/bin/sh")
    assert plain["software"]["environment"] == {"OMP_NUM_THREADS": "4"}
    assert plain["dataset"]["sources"] == ["http://example.org/imagenet"]
    assert plain["model"]["files"][0]["checksum"] == "0123456789abcdef0123456789abcdef"
    assert plain["reference"] == {"outputs": [1, 2], "hyperparameters": {"lr": 0.1}, "remarks": "as published"}
    assert any("never run" in each for each in pipeline.problems(found.manifest))


def test_a_manifest_of_one_kind_is_that_section_also_with_a_field_of_its_name(tmp_path: Path) -> None:
    text = "id: m\nkind: model\nname: alexnet\npre-process: def f(); pass\nmodel: {graph_path: g.onnx}\n"
    model = of(text, tmp_path).manifest.model
    assert model.name == "alexnet"
    assert model.preprocess


# --- what is wrong is said with its place -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {name: x}\nscenario:\n  kind: poisson\n", "m.yaml:2: scenario: a scenario poisson needs a rate"),
        ("model: {name: x}\nscenario:\n  requests: -5\n", "m.yaml:3: scenario.requests: input should be greater than"),
        ("name: x\nscenario: {}\n", "m.yaml:1: model: field required"),
        ("model: {name: x, source: a, command: [b]}\n", "source and command exclude each other"),
        ("model: {name: x, preprocess: 'code', inputs: [{steps: [decode]}]}\n", "exclude each other"),
        ("- 1\n", "a manifest must be a mapping of fields, this is a list"),
        ("model: {name: x\n", "not YAML"),
        ("model: {name: x}\nmodel: {name: y}\n", "m.yaml:2: 'model' is given twice"),
        ("framework: PyTorch\nname: x\ninputs: 3\n", "model.inputs.0: input should be a valid dictionary"),
        ("framework: PyTorch\nname: x\noutputs: 3\n", "model.outputs.0: input should be a valid dictionary"),
        ("kind: model\nid: a\nname: x\nmodel: {sources: 5}\n", "model.files.0.path: input should be a valid string"),
        ("", "empty"),
        ("model:\n  name: x\n  preprocess: {function: f, seconds: 1 parsec}\n", "m.yaml:3: model.preprocess.seconds: "),
        ("model:\n  name: x\n  preprocess: {functon: f}\n", "m.yaml:3: model.preprocess.function: field required"),
    ],
)
def test_errors_have_file_line_and_field(text: str, said: str, tmp_path: Path) -> None:
    assert said in refused(text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']\n",
        "a: !!python/name:os.system\n",
        "a: !mine 5\n",
        "a: !!binary aGVsbG8=\n",
        "a: !!set {1}\n",
        "a: &x [*x]\n",
        "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [{','.join([f'*a{n}'] * 9)}]\n" for n in range(8)),
        "[" * 100_000,
        "{a: " * 5_000,
        "a: " + "x" * 300_000,
        "a: [" + "1, " * 60_000 + "1]",
        "<<: {a: 1}\n",
        "? [1, 2]\n: 3\n",
        "a: " + "9" * 310 + "\n",
        "\0",
        "--- 1\n--- 2\n",
    ],
)  # fmt: skip
def test_hostile_yaml_is_refused(text: str, tmp_path: Path) -> None:
    assert refused(text, tmp_path)


def test_words_of_old_yaml_stay_words() -> None:
    read = yamltext.read("{a: no, b: on, c: 010x, d: 1:30, e: 2020-01-01, f: true, g: 0x10, h: 1_000, i: .nan}", "t")
    assert read.content == {
        "a": "no", "b": "on", "c": "010x", "d": "1:30", "e": "2020-01-01", "f": True, "g": 16, "h": 1000, "i": ".nan",
    }  # fmt: skip


# --- who can run it ---------------------------------------------------------------------------------------------------

FACTS = agents.Facts(
    "one", "x86_64", "Intel Xeon", 4, 16.0, ("NVIDIA V100",), "here", "3.11.7",
    {"torch": "2.6.1+cpu", "pillow": "11.0"}, {"rack": "7", "interconnect": "nvlink"}, beat_s=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        ({"hardware": {"architecture": "amd64", "gpu": "v100", "cores": 4, "memory": "16 GB"}}, 0),
        ({"hardware": {"architecture": "arm64", "gpu": "A100", "cores": 8, "memory_gib": 32}}, 4),
        ({"hardware": {"host": "there", "cpu": "POWER9", "labels": {"rack": 8}, "interconnect": "pcie"}}, 4),
        ({"hardware": {"memory": "plenty"}}, 1),
        ({"software": {"packages": {"torch": ">=2.4,<3", "Pillow": "^11"}, "python": "3.11"}}, 0),
        ({"software": {"packages": {"torch": "~2.5", "timm": ""}, "python": ">=3.12"}}, 3),
        ({"software": {"packages": {"torch": "newest"}}}, 1),
        ({"software": {"packages": {"torch": "9" * 5000, "pillow": f"^{'9' * 5000}"}}}, 2),
        ({"software": {"container": "image"}}, 1),
        ({"software": {"threads": 5}}, 1),
        ({"model": {"name": "x", "framework": {"name": "PyTorch", "version": "2.6"}}}, 0),
        ({"model": {"name": "x", "framework": {"name": "Caffe"}}}, 1),
    ],
)
def test_each_requirement_that_is_not_met_is_a_reason(asked: dict[str, object], reasons: int) -> None:
    found = reading.of_plain({"model": {"name": "x"}, **asked}).manifest
    assert len(agents.unmet_requirements(found, FACTS)) == reasons, agents.unmet_requirements(found, FACTS)


@pytest.mark.parametrize(
    ("asked", "inside", "outside"),
    [
        ("^1.2", "1.9.5", "2.0"), ("^0.1", "0.1.7", "0.2"), ("^0.0.3", "0.0.3", "0.0.4"), ("~1.2", "1.2.9", "1.3"),
        ("1.12", "1.12.3", "1.13"), (">=1.2, <2", "1.9", "2.0"), (">= 2.4 , != 2.5.0", "2.5.1", "2.5.0"),
    ],
)  # fmt: skip
def test_ranges_of_versions(asked: str, inside: str, outside: str) -> None:
    assert agents.version_range(asked).contains(inside)
    assert not agents.version_range(asked).contains(outside)


# --- the commands -----------------------------------------------------------------------------------------------------


def test_check_says_whether_it_can_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.yaml").write_text(PLAIN, encoding="utf-8")
    assert main(["evaluate", "check", str(tmp_path / "m.yaml")]) == 0
    assert "can run here" in capsys.readouterr().out
    (tmp_path / "m.yaml").write_text(PLAIN + "hardware: {cores: 9999}\nnoets: x\n", encoding="utf-8")
    assert main(["evaluate", "check", str(tmp_path / "m.yaml")]) == 3
    out = capsys.readouterr().out
    assert "cannot run here: 9999 cores are required" in out
    assert "note: noets is kept" in out
    assert main(["evaluate", "check", str(tmp_path / "m.yaml"), "--canonical"]) == 0
    assert yamltext.read(capsys.readouterr().out, "out").content["noets"] == "x"
    assert main(["evaluate", "check", str(tmp_path / "none.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


def test_without_the_extra_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['pydantic'] = None; from xsp.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run([sys.executable, "-c", code, "evaluate", "schema"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert "pip install 'xsp[evaluate]'" in found.stderr
    assert len(found.stderr.splitlines()) == 1
