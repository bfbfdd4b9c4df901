"""Unnecessary work of a step: unused gradients, recomputed layers, checks for NaN, masks, unread scores."""

from __future__ import annotations

import pytest
from test_host_questions import PLAIN, advice_of


def trained(leaves: list[list[int]], updated: list[list[int]], optimizer: str = "aten::add_") -> str:
    """Return a step with gradients of the shapes `leaves`, 1 ms each, and updates of the shapes `updated`."""
    lines = ["step s 0-10000", "forward Net 10-900", "module net 20-890 type=Net input_shapes=[[8,64]]"]
    lines.append("op aten::linear 30-880 input_shapes=[[8,64],[4,64]]")
    lines.append(f"backward backward 1000-{1000 + 1000 * len(leaves)}")
    for index, shape in enumerate(leaves):
        begin = 1000 + 1000 * index
        lines.append(f"op AddmmBackward0 {begin + 10}-{begin + 900} input_shapes=[[8,4]]")
        shapes = str([shape]).replace(" ", "")
        lines.append(f"op torch::autograd::AccumulateGrad {begin + 910}-{begin + 990} input_shapes={shapes}")
    lines.append("optimizer SGD 9000-9900")
    for index, shape in enumerate(updated):
        shapes = str([shape, shape]).replace(" ", "")
        lines.append(f"op {optimizer} {9010 + 100 * index}-{9090 + 100 * index} input_shapes={shapes}")
    return "\n".join(lines)


def test_unused_gradients_gain_the_time_after_the_last_applied_one() -> None:
    (piece,) = advice_of(trained([[4, 64], [4], [64, 3], [64]], [[4, 64], [4]]), "unused-gradients")
    assert "gradients of 4 parameters, the optimizer updates 2" in piece.what
    assert piece.gain.value == pytest.approx(2 * 0.97, rel=0.01)
    assert not piece.at_most
    assert piece.where[0].calls == 2


def test_shared_shapes_make_the_gain_a_bound() -> None:
    (piece,) = advice_of(trained([[4, 64], [64, 64], [64, 64]], [[4, 64], [64, 64]]), "unused-gradients")
    assert piece.at_most
    assert piece.gain.value == pytest.approx(0.97, rel=0.01)


@pytest.mark.parametrize(
    ("leaves", "updated", "operator"),
    [
        ([[4, 64], [4]], [[4, 64], [4]], "aten::add_"),  # all of them
        ([[4, 64], [8, 64]], [[4, 64]], "aten::add_"),  # the gradient of the input is requested
        ([[4, 64], [4]], [[260]], "aten::add_"),  # an optimizer of one flat vector
        ([[64, 3], [4, 64]], [[4, 64]], "aten::add_"),  # the applied gradient comes last
        ([[4, 64], [4]], [], "aten::add_"),  # no update
        ([[4, 64], [4]], [[4, 64]], "aten::add"),  # nothing in place
    ],
)
def test_other_gradients_are_needed_or_not_known_to_be_unused(
    leaves: list[list[int]], updated: list[list[int]], operator: str
) -> None:
    assert advice_of(trained(leaves, updated, operator), "unused-gradients") == []


def test_state_that_an_optimizer_writes_is_no_parameter() -> None:
    step = trained([[4, 64], [4, 64], [64]], [[4, 64], [4, 64]], "aten::mul_")
    step += "\nop aten::addcdiv_ 9500-9550 input_shapes=[[4,64],[4,64],[4,64]]"
    (piece,) = advice_of(step, "unused-gradients")
    assert "updates 1" in piece.what


def test_layers_recomputed_in_the_backward_pass_are_reported() -> None:
    recomputed = (
        "op AddmmBackward0 5000-9000",
        "module net.a 5010-7010 type=Linear input_shapes=[[64,256]]",
        "op aten::linear 5020-7000",
    )
    head = "step s 0-10000\nforward Net 10-900\nmodule net.a 20-890 type=Linear\nop aten::linear 30-880\n"
    (piece,) = advice_of(head + "backward backward 1000-9900\n" + "\n".join(recomputed), "recomputation")
    assert piece.gain.value == pytest.approx(2.0)
    assert [place.module for place in piece.where] == ["net.a"]
    assert advice_of(PLAIN, "recomputation") == []


@pytest.mark.parametrize(("checks", "expected"), [(8, 1), (3, 0)])
def test_checks_of_each_gradient_are_reported(checks: int, expected: int) -> None:
    lines = ["step s 0-10000", "forward Net 10-900", "op aten::linear 30-880", "backward backward 1000-9900"]
    for index in range(checks):
        begin = 1000 + 1000 * index
        lines.append(f"op aten::isnan {begin + 10}-{begin + 110}")
        lines.append(f"op aten::_is_any_true {begin + 120}-{begin + 170}")
    pieces = advice_of("\n".join(lines), "anomaly-detection")
    assert len(pieces) == expected
    for piece in pieces:
        assert piece.gain.value == pytest.approx(8 * 0.15)
        assert "set_detect_anomaly(False)" in piece.do
    lines[2:3] = [f"op aten::relu {30 + index}-{31 + index} sequence_nr={index}" for index in range(10)]
    for piece in advice_of("\n".join(lines), "anomaly-detection"):
        assert piece.gain.value == pytest.approx(8 * 0.15 + 10 * 0.06), "each operator records where it was called"
        assert piece.gain.low <= 8 * 0.15 + 10 * 0.02
        assert piece.gain.high >= 8 * 0.15 + 10 * 0.12


@pytest.mark.parametrize(("layers", "expected"), [(6, 1), (1, 0)])
def test_a_mask_that_each_layer_makes_is_reported(layers: int, expected: int) -> None:
    lines = ["step s 0-10000", "forward Net 10-9900", "module net 20-9890 type=Net"]
    for index in range(layers):
        begin = 1000 + 1000 * index
        lines.append(f"module net.{index} {begin}-{begin + 900} type=Block")
        lines.append(f"op aten::full {begin + 10}-{begin + 110} input_shapes=[[],[]]")
        lines.append(f"op aten::triu {begin + 120}-{begin + 220} input_shapes=[[256,256],[]]")
    pieces = advice_of("\n".join(lines), "masks")
    assert len(pieces) == expected
    for piece in pieces:
        assert "256 × 256 is made 6 times" in piece.what
        assert piece.gain.value == pytest.approx(6 * 0.2)


def test_columns_that_no_row_uses_bound_what_shorter_batches_gain() -> None:
    step = (
        'step s 0-10000\nforward Net 0-4000 attributes={{"padding":[8,200,{used},300]}}\n'
        "op aten::linear 0-3000 input_shapes=[[8,200,64],[64,64]] sequence_nr=1\n"
        "op aten::softmax 3000-4000 input_shapes=[[8,4,200,200]] sequence_nr=2\n"
        "backward backward 4000-9000\nop SoftmaxBackward0 4000-5000 input_shapes=[[8,4,200,200]] sequence_nr=2\n"
        "op AddmmBackward0 5000-8000 input_shapes=[[8,200,64]] sequence_nr=1"
    )
    (piece,) = advice_of(step.format(used=50), "padding")
    assert piece.gain.value == pytest.approx(8 * 0.75 + 2 * (0.25 - 0.25**2))
    assert piece.at_most
    assert "200 columns of tokens; their longest rows use 50" in piece.what
    assert "450 of 600 columns" in piece.why[0]
    assert "rows have 38 tokens" in piece.why[0]
    assert advice_of(step.format(used=185), "padding") == []


@pytest.mark.parametrize(
    ("reader", "vocabulary", "expected"),
    [("aten::select", 20_000, 1), ("aten::log_softmax", 20_000, 0), ("aten::select", 100, 0), ("", 20_000, 0)],
)
def test_scores_of_tokens_that_are_not_read_are_reported(reader: str, vocabulary: int, expected: int) -> None:
    lines = [
        "step s 0-10000", "forward Net 10-9000", "module net.head 20-8900 type=Linear",
        f"op aten::linear 1000-5000 input_shapes=[[4,64,128],[{vocabulary},128],[{vocabulary}]]",
        f"op aten::slice 9100-9150 input_shapes=[[4,64,{vocabulary}],[]]",
    ]  # fmt: skip
    if reader:
        lines.append(f"op {reader} 9200-9250 input_shapes=[[4,64,{vocabulary}],[]]")
    pieces = advice_of("\n".join(lines), "last-scores")
    assert len(pieces) == expected
    for piece in pieces:
        assert piece.gain.value == pytest.approx(4 * 63 / 64)
