"""With every collector on, a program computes to the last bit what it computes without.

`benchmarks/same_results.py` does the same over the whole set of models.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import same_results

MISSING = [name for name in ("torchvision", "timm", "transformers") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

FEW = ("torchvision:squeezenet1_1", "transformers:bert?num_hidden_layers=1&hidden_size=64&num_attention_heads=2")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FEW)
def test_results_are_the_same_to_the_last_bit(tmp_path: Path, name: str, train: bool) -> None:
    assert same_results.differences(name, train, tmp_path / "run") == []


def test_a_difference_would_be_found() -> None:
    left = {"a": same_results.digest([1, 2.0]), "b": same_results.digest(None)}
    right = {"a": same_results.digest([1, 2.5]), "b": same_results.digest(None)}
    assert same_results.differing_keys(left, right) == ["a"]


def test_a_script_prints_the_same_under_xsp_run(tmp_path: Path) -> None:
    bare, under = (same_results.script_output(FEW[0], tmp_path, how) for how in ("bare", "run"))
    assert bare == under
    assert "gradients" in bare
