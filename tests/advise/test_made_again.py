"""Recomputed tables of constants, and linear layers with the same input."""

from __future__ import annotations

import json

import pytest
from test_host_questions import advice_of, inside

from xsp.advise import Advice

POSITIONS = (
    ("arange", [[], []]), ("arange", [[], []]), ("mul", [[128], []]), ("exp", [[128]]), ("mul", [[512, 1], [128]]),
    ("sin", [[512, 128]]), ("mul", [[512, 1], [128]]), ("cos", [[512, 128]]), ("cat", [[[512, 128], [512, 128]], []]),
)  # fmt: skip


def layers(count: int, *more_ops: tuple[str, object]) -> str:
    """Return a step of `count` layers, each of which computes the positions in 0.9 ms and calls `more_ops`."""
    lines = ["step s 0-20000", "forward Net 10-19900", "module net 20-19890 type=Net input_shapes=[[8,512,256]]"]
    for layer in range(count):
        begin = 1000 + 3000 * layer
        lines.append(f"module net.{layer} {begin}-{begin + 2500} type=Layer input_shapes=[[8,512,256]]")
        for index, (name, shapes) in enumerate((*POSITIONS, *more_ops)):
            text = json.dumps(shapes, separators=(",", ":"))
            lines.append(f"op aten::{name} {begin + 100 * index}-{begin + 100 * index + 100} input_shapes={text}")
    return "\n".join(lines)


def test_a_table_that_each_layer_computes_is_reported_with_all_of_its_operators() -> None:
    (piece,) = advice_of(layers(4, ("add", [[8, 512, 256], [512, 256]]), ("linear", [[8, 512, 256]])), "constants")
    assert piece.what == "a table of constants is computed 4 times in a step, by 9 operators"
    assert piece.gain.value == pytest.approx(4 * 0.9), "without the addition to the model's own tensor"
    assert [place.module for place in piece.where] == [f"net.{layer}" for layer in range(4)]
    assert piece.at_most
    assert "register_buffer" in piece.do


def test_a_table_that_is_made_once_is_reported_if_it_takes_much_of_the_step() -> None:
    short = layers(1).replace("step s 0-20000", "step s 0-9000").replace("-19900", "-8900").replace("-19890", "-8890")
    (piece,) = advice_of(short, "constants")
    assert "in each step, by 9 operators" in piece.what
    assert advice_of(layers(1), "constants") == [], "4.5 % of a step of 20 ms"


@pytest.mark.parametrize(
    "lines",
    [
        ("op aten::arange 1000-1100 input_shapes=[[],[]]", "op aten::mul 1100-3000 input_shapes=[[512],[]]"),
        ("op aten::sin 1000-3000 input_shapes=[[512,128]]",),
        ("op aten::arange 1000-1010 input_shapes=[[],[]]", "op aten::exp 1100-3000 input_shapes=[[8,512,128]]"),
        (
            "op aten::arange 1000-1010 input_shapes=[[],[]]", "op aten::linear 1010-1100 input_shapes=[[64,256]]",
            "op aten::exp 1100-3000 input_shapes=[[64,256]]",
        ),
    ],
    ids=["products alone", "no range", "input of the model", "something between"],
)  # fmt: skip
def test_other_computing_is_no_table_of_numbers(lines: tuple[str, ...]) -> None:
    assert advice_of(inside(*lines), "constants") == []


def heads(count: int, tensors: tuple[int, ...] = (0,), width: int = 16) -> list[Advice]:
    """Return the advice on `count` layers of 0.1 ms, beside one of 256×256 in 0.2 ms."""
    lines = [
        "step s 0-10000", "forward Net 10-9900", "module net 20-9890 type=Attention input_shapes=[[64,256]]",
        "module net.out 9000-9200 type=Linear input_shapes=[[64,256]]",
        "op aten::linear 9001-9199 input_shapes=[[64,256],[256,256],[256]]",
    ]  # fmt: skip
    for index in range(count):
        begin = 1000 + 200 * index
        attributes = json.dumps({"input_tensors": [tensors[index % len(tensors)]]}, separators=(",", ":"))
        lines += [
            f"module net.q.{index} {begin}-{begin + 100} type=Linear input_shapes=[[64,256]] attributes={attributes}",
            f"op aten::linear {begin + 1}-{begin + 99} input_shapes=[[64,256],[{width},256],[{width}]]",
        ]
    return advice_of("\n".join(lines), "narrow-layers")


def test_narrow_layers_with_the_same_input_are_reported_with_their_loss() -> None:
    (piece,) = heads(12)
    assert "12 linear layers take the same tensor in Attention" in piece.what
    joined, out = 64 * 256 + 12 * (16 * 256 + 64 * 16), 2 * 64 * 256 + 256 * 256
    assert piece.gain.value == pytest.approx(1.2 - 0.2 * joined / out), "memory traffic at the rate of `out`"
    assert piece.at_most
    assert len(piece.where) == 12


def test_layers_that_are_few_or_wide_or_of_other_tensors_are_not_reported() -> None:
    assert heads(2) == []
    assert heads(12, width=128) == [], "as fast as the best one"
    assert heads(12, tensors=tuple(range(12))) == []
