"""Selection of values: sorts for a few, probabilities for the largest, copies of masked values."""

from __future__ import annotations

import json

import pytest
from test_host_questions import advice_of, inside

from xsp.advise import Advice


def advice_for_slice(end: int, *more_ops: str, dim: int = 1) -> list[Advice]:
    """Return the advice on a sort of 20,000 values and a slice of the result."""
    attributes = json.dumps({"input_scalars": [None, dim, 0, end, 1]}, separators=(",", ":"))
    return advice_of(
        inside(
            "op aten::sort 1000-3000 dtype=float input_shapes=[[16,20000],[],[]]",
            f"op aten::slice 3000-3010 dtype=float input_shapes=[[16,20000],[],[],[],[]] attributes={attributes}",
            *more_ops,
        ),
        "sort-for-few",
    )


def test_a_sort_for_a_few_values_is_reported_with_all_of_its_time() -> None:
    (piece,) = advice_for_slice(5)
    assert "20,000 values are sorted, and 5" in piece.what
    assert piece.gain.value == pytest.approx(2.0)
    assert "torch.topk" in piece.do
    assert advice_for_slice(-19_995)[0].what == piece.what
    assert len(advice_for_slice(5, dim=-1)) == 1


def test_sorts_that_are_used_otherwise_are_not_reported() -> None:
    assert advice_for_slice(9_000) == []
    assert advice_for_slice(5, dim=0) == []
    assert advice_for_slice(5, "op aten::cumsum 3010-3500 dtype=float input_shapes=[[16,20000],[]]") == []


SCORES = "input_shapes=[[64,30000],[],[]]"


def test_probabilities_of_which_argmax_alone_reads_are_reported() -> None:
    step = inside(f"op aten::softmax 1000-3000 {SCORES}", f"op aten::argmax 3000-3500 {SCORES}")
    (piece,) = advice_of(step, "largest")
    assert "softmax of 64×30000 scores" in piece.what
    assert piece.gain.value == pytest.approx(2.0)
    assert piece.at_most
    assert [place.module for place in piece.where] == ["net.a"]


def test_the_place_of_the_largest_may_be_taken_outside_the_module() -> None:
    step = inside(f"op aten::softmax 1000-3000 {SCORES}") + f"\nop aten::argmax 9900-9990 {SCORES}"
    assert len(advice_of(step, "largest")) == 1


@pytest.mark.parametrize(
    "more_ops",
    [
        ("op aten::max 3500-3600 input_shapes=[[64,30000],[],[]]",),  # the probability itself
        ("op aten::cat 3500-3600 input_shapes=[[[64,30000],[64,1]],[]]",),
        ("op aten::mul 3500-3600 input_shapes=[[64,1],[64,30000]]",),
    ],
)
def test_probabilities_that_something_else_reads_are_not_reported(more_ops: tuple[str, ...]) -> None:
    step = inside(f"op aten::softmax 1000-3000 {SCORES}", f"op aten::argmax 3000-3500 {SCORES}", *more_ops)
    assert advice_of(step, "largest") == []
    assert advice_of(inside(f"op aten::softmax 1000-3000 {SCORES}"), "largest") == [], "no call reads them"


def advice_for_mask(after: str, *inner: str) -> list[Advice]:
    """Return the advice on an indexing and the call after it."""
    index = "op aten::index 1000-3000 input_shapes=[[4096,256],[]]"
    return advice_of(inside(index, *inner, after), "mask-indexing")


NONZERO = "op aten::nonzero 1100-2000 input_shapes=[[4096,256]]"


def test_values_that_a_mask_chooses_for_a_sum_are_reported() -> None:
    (piece,) = advice_for_mask("op aten::sum 3000-3100 input_shapes=[[734003],[]]", NONZERO)
    assert piece.gain.value == pytest.approx(2.0)
    assert "torch.where" in piece.do


def test_other_indexing_is_not_reported() -> None:
    assert advice_for_mask("op aten::sum 3000-3100 input_shapes=[[734003],[]]") == [], "by numbers of rows"
    assert advice_for_mask("op aten::relu 3000-3100 input_shapes=[[734003]]", NONZERO) == []
    assert advice_for_mask("op aten::sum 3000-3100 input_shapes=[[734,3]]", NONZERO) == [], "rows that a mask chooses"


def advice_for_groups(count: int, rows: str = "4096,64") -> list[Advice]:
    """Return the advice on so many passes that select rows of a tensor by a mask, with their gradients."""
    passes = [
        line
        for at in range(1000, 1000 + 200 * count, 200)
        for line in (
            f"op aten::eq {at}-{at + 20} input_shapes=[[4096],[]]",
            f"op aten::index {at + 20}-{at + 80} input_shapes=[[{rows}],[]] sequence_nr={at}",
            f"op aten::nonzero {at + 30}-{at + 50} input_shapes=[[4096]]",
            f"op aten::mean {at + 80}-{at + 100} input_shapes=[[32,64],[],[],[]]",
        )
    ]
    nodes = [
        f"op IndexBackward0 {at + 5000}-{at + 5150} sequence_nr={at}" for at in range(1000, 1000 + 200 * count, 200)
    ]
    step = inside(*passes).replace("net.b 4910-9880", "net.b 4910-5500").replace("4920-9870", "4920-5490")
    return advice_of("\n".join((step, "backward b 5990-9890", *nodes)), "mask-indexing")


def test_rows_selected_group_by_group_are_reported_with_masks_reductions_and_gradients() -> None:
    (piece,) = advice_for_groups(12)
    assert "by 12 masks in turn" in piece.what
    assert "4,096 rows" in piece.what
    assert piece.gain.value == pytest.approx(12 * (0.02 + 0.06 + 0.02 + 0.15) * 11 / 12)
    assert piece.at_most
    assert "index_add" in piece.do
    assert advice_for_groups(6) == []
