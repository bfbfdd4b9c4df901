"""Advice in words of the program's framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import tree_of

from xsp import frameworks
from xsp.frameworks import JAX, TENSORFLOW, TORCH_XLA, in_words_of

PACKAGE = Path(frameworks.__file__).parent


def texts(*folders: str) -> list[str]:
    """Return all texts in the source of some packages, those with inserted values with a number in their place."""
    found = []
    for folder in folders:
        for path in sorted((PACKAGE / folder).glob("*.py")):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "8" for part in node.values)
                    found.append("".join(map(str, parts)))
    return found


@pytest.fixture(scope="module")
def every() -> list[str]:
    return texts("advise", "questions", "analyses", "health")


@pytest.mark.parametrize("framework", [JAX, TENSORFLOW])
def test_no_advice_of_pytorch_reaches_users_of_other_frameworks(framework: str, every: list[str]) -> None:
    shown = [text for text in (in_words_of(framework, text) for text in every) if text is not None]
    for word in ("torch", "DataLoader", ".item()", "num_workers", "pin_memory", "channels_last", "foreach="):
        assert not [text for text in shown if word in text]


@pytest.mark.parametrize("framework", [None, TORCH_XLA])
def test_texts_for_users_of_pytorch_stay_as_they_are(framework: str | None, every: list[str]) -> None:
    assert [in_words_of(framework, text) for text in every] == every


def test_each_translation_is_of_words_that_advice_uses(every: list[str]) -> None:
    everything = "\n".join(every)
    unused = [ours for ours, _ in frameworks._IN_JAX if ours not in everything]
    # these are put together of parts when they are used
    assert unused == [
        "(CUDA graphs, ", "torch.compile, ", "fuse them; torch.compile",
        'torch.set_float32_matmul_precision("high") allows TF32; or torch.autocast in bfloat16',
        "torch.backends.cudnn.allow_tf32 = True allows TF32; or torch.autocast in bfloat16",
    ]  # fmt: skip


def test_the_general_remedies_have_words_of_jax() -> None:
    do = "fewer launches (CUDA graphs, torch.compile, a larger batch), or less Python between them"
    assert in_words_of(JAX, do) == (
        "one jax.jit around the whole step, or fewer launches (XLA's command buffers, a larger batch), or less Python "
        "between them"
    )
    assert in_words_of(JAX, "fuse them; torch.compile") == "fuse them: one jax.jit around all of them"
    assert in_words_of(JAX, "model.eval()") is None
