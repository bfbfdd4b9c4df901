"""Named models: each source builds, runs and refuses as its users would expect."""

from __future__ import annotations

import pytest
from depth import deep

torch = pytest.importorskip("torch")

from xsp import models  # noqa: E402
from xsp.errors import ModelError  # noqa: E402

SMALL_GPT2 = "transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=100"

FILE = """
import torch
def pair(batch):
    return torch.nn.Linear(4, 2), torch.zeros(batch, 4)
def named(batch):
    return torch.nn.Bilinear(4, 4, 2), {"input1": torch.zeros(batch, 4), "input2": torch.zeros(batch, 4)}
def step(batch):
    return lambda: batch
def wrong(batch):
    return 7
def broken(batch):
    raise RuntimeError("mine")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mymodels.py"
    path.write_text(FILE)
    return path


def run(spec: str, **settings):
    return models.load(spec, models.Settings(**settings)).step()


@pytest.mark.parametrize(
    ("spec", "settings", "shape"),
    [
        ("torchvision:squeezenet1_1", {"batch": 2, "shape": (3, 64, 64)}, (2, 1000)),
        deep("timm:test_vit", {"batch": 2}, (2, 1000)),
        deep(SMALL_GPT2, {"batch": 2, "sequence": 5}, (2, 5, 32)),
        deep(
            "transformers:vit?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&image_size=32",
            {},
            (1, 5, 32),
        ),
    ],
)
def test_models_run_on_inputs_that_fit_them(spec, settings, shape):
    for library in ("torchvision", "timm", "transformers"):
        if spec.startswith(library):
            pytest.importorskip(library)
    output = run(spec, **settings)
    assert tuple((output if isinstance(output, torch.Tensor) else output[0]).shape) == shape


def test_weights_come_from_the_seed():
    pytest.importorskip("torchvision")
    spec = "torchvision:squeezenet1_1"
    first, again, other = (run(spec, shape=(3, 64, 64), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_changes_the_weights(file):
    workload = models.load(f"{file}:pair", models.Settings(batch=3, train=True))
    torch.manual_seed(0)
    first, second = float(workload.step()), float(workload.step())
    assert second < first


def test_a_users_file_gives_a_model_with_its_input_or_a_step(file):
    assert tuple(run(f"{file}:pair", batch=3).shape) == (3, 2)
    assert tuple(run(f"{file}:named", batch=3).shape) == (3, 2)
    assert run(f"{file}:step", batch=3) == 3


@pytest.mark.parametrize("given", ["x, y", "(x, y)", "(x,), {'y': y}", "x, {'y': y}", "{'x': x, 'y': y}"])
def test_a_users_file_gives_several_inputs_in_any_of_these_forms(tmp_path, given):
    path = tmp_path / "two.py"
    path.write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def forward(self, x, y):\n"
        "        return x + 2 * y\n"
        "def build(batch_size):\n"
        "    x, y = torch.ones(batch_size), torch.ones(batch_size)\n"
        f"    return Two(), {given}\n"
    )
    assert run(f"{path}:build", batch=3).tolist() == [3.0, 3.0, 3.0]


def test_a_users_file_gives_a_dictionary_among_several_inputs(tmp_path):
    path = tmp_path / "three.py"
    path.write_text(
        "import torch\n"
        "class Three(torch.nn.Module):\n"
        "    def forward(self, x, y, found):\n"
        "        return x + y + found['z']\n"
        "def build(batch_size):\n"
        "    return Three(), torch.ones(1), torch.ones(1), {'z': 1.0}\n"
    )
    assert run(f"{path}:build").tolist() == [3.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet50", "is not the name of a model; write torchvision:NAME"),
        ("keras:resnet50", "there is no source 'keras'"),
        ("transformers:x.pt2", "a program in a file is no model of transformers; write x.pt2"),
        ("torchvision:resnet5", "did you mean resnet50"),
        ("timm:vit_tiny", "did you mean"),
        ("transformers:brt", "did you mean"),
        ("transformers:gpt2?layers=1", "has no value 'layers'"),
        ("transformers:gpt2?n_head=5", "cannot be built"),
        ("nowhere.py:build", "there is no such file"),
        ("{file}:pear", "did you mean pair"),
        ("{file}:wrong", "returned int"),
        ("{file}:broken", "raised RuntimeError: mine"),
        deep("timm:resnet18.nowhere", r"cannot be built \(RuntimeError: Invalid pretrained tag"),
        ("transformers:bert?num_attention_heads=0", r"cannot be built \(ZeroDivisionError"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(file, spec, says):
    for library in ("torchvision", "timm", "transformers"):
        if spec.startswith(library):
            pytest.importorskip(library)
    with pytest.raises(ModelError, match=says):
        models.load(spec.format(file=file), models.Settings())


def test_a_seed_that_torch_does_not_take_is_one_clear_error(file):
    with pytest.raises(ModelError, match=r"mymodels\.py:pair cannot be built \("):
        models.load(f"{file}:pair", models.Settings(seed=1 << 70))


def test_what_cannot_be_trained_is_one_clear_error(tmp_path):
    path = tmp_path / "untrained.py"
    path.write_text(
        "import torch\n"
        "class Silent(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return 7\n"
        "def plain(batch_size):\n"
        "    return torch.nn.ReLU(), torch.ones(batch_size, 2)\n"
        "def silent(batch_size):\n"
        "    return Silent(2, 2), torch.ones(batch_size, 2)\n"
    )
    with pytest.raises(ModelError, match="ReLU has no trainable parameter; omit --train"):
        run(f"{path}:plain", train=True)
    with pytest.raises(ModelError, match="returned int without a floating-point tensor"):
        run(f"{path}:silent", train=True)


def test_a_packed_sequence_or_another_named_tuple_is_one_input(tmp_path):
    path = tmp_path / "packed.py"
    path.write_text(
        "import collections, torch\n"
        "Pair = collections.namedtuple('Pair', 'x y')\n"
        "class Sum(torch.nn.Module):\n"
        "    def forward(self, pair):\n"
        "        return pair.x + pair.y\n"
        "def packed(batch_size):\n"
        "    rows = [torch.ones(length, 3) for length in (4, 2)]\n"
        "    return torch.nn.LSTM(3, 5), torch.nn.utils.rnn.pack_sequence(rows)\n"
        "def pair(batch_size):\n"
        "    return Sum(), Pair(torch.ones(2), torch.ones(2))\n"
    )
    output, _ = run(f"{path}:packed")
    assert tuple(output.data.shape) == (6, 5)
    assert run(f"{path}:pair").tolist() == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "settings", "says"),
    [
        (
            "torchvision:squeezenet1_1",
            {"device": "tpu9"},
            r"--device tpu9: cannot be used here \(.*; type --device cpu",
        ),
        deep("torchvision:squeezenet1_1", {"device": "cuda:99"}, "--device cuda:99: cannot be used here"),
        ("torchvision:squeezenet1_1", {"shape": (4, 64, 64)}, r"of 1x4x64x64 \(.*it is designed for --input 3x224x224"),
        deep("torchvision:squeezenet1_1", {"shape": (64,), "train": True}, "it is designed for --input 3x224x224"),
        deep("timm:vit_tiny_patch16_224", {"shape": (3, 100, 100)}, "it is designed for --input 3x224x224"),
        deep("transformers:vit?num_hidden_layers=1", {"shape": (1, 224, 224)}, "it is designed for --input 3x224x224"),
        deep("transformers:bert?num_hidden_layers=1", {"shape": (3, 8, 8)}, "takes tokens: omit --input.*--sequence"),
        ("transformers:bert?num_hidden_layers=1", {"sequence": 600}, "it takes up to --sequence 512"),
    ],
)
def test_a_device_that_is_not_there_and_an_input_that_does_not_fit_are_one_clear_error(spec, settings, says):
    with pytest.raises(ModelError, match=says) as caught:
        models.load(spec, models.Settings(**settings))
    assert "\n" not in str(caught.value)
