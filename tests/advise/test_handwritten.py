"""Handwritten functions, recognised by the order and the shapes of their operators."""

from __future__ import annotations

import json

import pytest
from test_host_questions import advice_of, inside

FULL, REDUCED = [16, 256, 192], [16, 256, 1]


def chain(text: str, shapes: dict[int, list[int]] | None = None) -> str:
    """Return a step whose module `net.a` calls these operators in a row, 0.2 ms each."""
    return inside(
        *(
            f"op aten::{name} {1000 + 200 * index}-{1200 + 200 * index} input_shapes="
            + json.dumps([(shapes or {}).get(index, FULL), []], separators=(",", ":"))
            for index, name in enumerate(text.split())
        )
    )


@pytest.mark.parametrize(
    ("text", "name", "do"),
    [
        ("mean sub pow mean sub add sqrt div mul add", "normalisation", "layer_norm"),
        ("mean sub pow mean add rsqrt mul mul add", "normalisation", "layer_norm"),
        ("mean var sub add sqrt div mul add", "normalisation", "layer_norm"),
        ("mean std sub add div", "normalisation", "layer_norm"),
        ("mean sub std add div mul", "normalisation", "layer_norm"),
        ("mul pow mul add mul tanh add mul", "GELU", "tanh"),
        ("pow mul add mul tanh add mul mul", "GELU", "tanh"),
        ("mul div erf add mul", "GELU", "gelu(x)"),
        ("amax sub exp sum div", "softmax", "torch.softmax"),
        ("max sub exp_ sum div_", "softmax", "torch.softmax"),
        ("softmax log", "the logarithm of softmax", "log_softmax"),
        ("exp add log", "softplus", "softplus"),
    ],
)
def test_a_function_that_is_written_out_is_reported_with_the_operator_that_does_it(
    text: str, name: str, do: str
) -> None:
    (piece,) = advice_of(chain(text), "written-out")
    count = len(text.split())
    assert piece.what == f"{name} is composed of {count} operators"
    assert piece.gain.value == pytest.approx(0.2 * (count - 1))
    assert do in piece.do
    assert piece.at_most


def test_a_reduction_of_a_tensor_belongs_to_the_function() -> None:
    text = "mean sub pow mean sub add sqrt div mul add"
    assert len(advice_of(chain(text, {5: REDUCED, 6: REDUCED, 8: [192]}), "written-out")) == 1
    assert advice_of(chain(text, {5: [8, 8]}), "written-out") == []


@pytest.mark.parametrize(
    "text",
    [
        "mean sub relu pow mean",
        "pow mean add rsqrt mul mul",
        "exp add mul log",
        "sum div",
        "cumexp sum div",
        "mul add tanh mul",
        "sigmoid mul",
    ],
)
def test_other_orders_are_not_reported(text: str) -> None:
    assert advice_of(chain(text), "written-out") == []


def test_a_module_between_the_operators_ends_a_function() -> None:
    step = chain("exp add log").replace("op aten::add 1200-1400", "module net.a.b 1200-1400 type=Linear")
    assert advice_of(step, "written-out") == []


def test_the_gradients_of_what_is_written_out_count_too() -> None:
    step = (
        "step s 0-10000\nforward Net 10-5000\nmodule net 20-4900 type=Net\n"
        "op aten::softmax 100-1100 sequence_nr=1 input_shapes=[[64,1000],[],[]]\n"
        "op aten::log 1100-1600 sequence_nr=2 input_shapes=[[64,1000]]\n"
        "backward backward 5000-9000\n"
        "op autograd::engine::evaluate_function:LogBackward0 5100-5500 sequence_nr=2 phase=backward\n"
        "op autograd::engine::evaluate_function:SoftmaxBackward0 5500-6800 sequence_nr=1 phase=backward\n"
        "op autograd::engine::evaluate_function:MulBackward0 6800-7800 sequence_nr=0 phase=backward"
    )
    (piece,) = advice_of(step, "written-out")
    assert piece.gain.value == pytest.approx(0.5 + 0.4)
    assert "and their gradients" in piece.why[0]
    assert [place.calls for place in piece.where] == [2]
