"""Names of models have one reading: what a policy judges is what is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xsp import modelname, models
from xsp.errors import ModelError
from xsp.modelname import ModelName, parse


@pytest.mark.parametrize(
    ("spec", "parts", "file"),
    [
        ("torchvision:resnet18", ModelName("torchvision", "resnet18"), None),
        ("transformers:bert?a=1&b=x=y", ModelName("transformers", "bert", (("a", "1"), ("b", "x=y"))), None),
        ("transformers:bert?a&=1", ModelName("transformers", "bert", (("a", ""), ("", "1"))), None),
        ("transformers:config.json?x=1", ModelName("transformers", "config.json", (("x", "1"),)), "config.json"),
        ("transformers:./CONFIG.JSON", ModelName("transformers", "./CONFIG.JSON"), "./CONFIG.JSON"),
        ("transformers:folder/bert", ModelName("transformers", "folder/bert"), "folder/bert"),
        ("transformers:x.pt2", ModelName("transformers", "x.pt2"), None),
        ("timm:x.json", ModelName("timm", "x.json"), None),
        ("a/b.py:build", ModelName("a/b.py", "build"), "a/b.py"),
        ("a/b.pt2", ModelName("a/b.pt2", ""), "a/b.pt2"),
        ("a:b/c.onnx", ModelName("a:b/c.onnx", ""), "a:b/c.onnx"),
        ("", ModelName("", ""), None),
    ],
)
def test_a_name_has_parts_and_at_most_one_file(spec: str, parts: ModelName, file: str | None) -> None:
    assert parse(spec) == parts
    assert parse(spec).file == file


def test_a_file_that_has_the_name_of_a_model_type_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").write_text('{"model_type": "gpt2"}')
    options = "num_hidden_layers=1&hidden_size=8&num_attention_heads=2&vocab_size=9"
    built = models.build(f"transformers:bert?{options}", models.Settings(), device="meta")
    assert isinstance(built, models.ModelCall)
    assert type(built.model).__name__ == "BertModel"


@pytest.mark.parametrize("spec", ["torchvision:resnet18?x=1", "timm:resnet18?a", "micro:path-3?b=2"])
def test_only_transformers_have_options(spec: str) -> None:
    with pytest.raises(ModelError, match="have no options"):
        models.build(spec, models.Settings())


def test_names_are_parsed_in_one_place() -> None:
    root = Path(modelname.__file__).parent
    parsers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r'(spec|source|name)\.partition\("[:?]"\)', path.read_text(encoding="utf-8"))
    }
    # others parse the source of a dataset, an argument of a command line, and the folder of a corpus
    assert parsers - {"evaluate/datasets.py", "evaluate/agents.py", "graph/corpus.py", "scrub.py"} == {"modelname.py"}
