"""Advice on algebra: the order of products, one-hot vectors, broadcasting, inverses, dense gradients."""

from __future__ import annotations

import json

import pytest
from test_host_questions import advice_of, inside

from xsp.advise import Advice


def products(first: object, second: object, *more: str, name: str = "aten::matmul") -> list[Advice]:
    """Return the advice on two consecutive products with factors of these sizes."""
    shapes = [json.dumps(sizes, separators=(",", ":")) for sizes in (first, second)]
    lines = (
        f"op {name} 1000-3000 dtype=float input_shapes={shapes[0]}",
        f"op {name} 3000-3900 dtype=float input_shapes={shapes[1]}",
    )
    return advice_of(inside(*lines, *more), "product-order")


def test_products_in_the_costly_order_are_reported_with_both_counts() -> None:
    (piece,) = products([[512, 256], [256, 512]], [[512, 512], [512, 4]])
    left_count, right_count = 512 * 256 * 512 + 512 * 512 * 4, 256 * 512 * 4 + 512 * 256 * 4
    assert piece.gain.value == pytest.approx(2.9 * (1 - right_count / left_count))
    assert piece.at_most
    assert f"{left_count:,} multiplications" in piece.why[0]
    assert [place.module for place in piece.where] == ["net.a"]
    (piece,) = products([[512, 512], [512, 512]], [[512, 512], [512]])  # a vector
    assert "@ 512×1" in piece.what


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([[512, 512], [512, 4]], [[512, 4], [4, 4]]),  # the cheap order
        ([[64, 512], [512, 512]], [[64, 512], [512, 512]]),  # as many either way
        ([[512, 256], [256, 512]], [[256, 512], [512, 4]]),  # of something else
        ([[8, 512, 256], [8, 256, 512]], [[8, 512, 512], [8, 512, 4]]),  # batches
        ([[512, 256], []], [[512, 512], None]),
    ],
)
def test_products_that_gain_nothing_or_are_no_chain_are_not_reported(first: object, second: object) -> None:
    assert products(first, second) == []


def test_products_of_one_left_factor_are_no_chain_where_the_first_is_used_later() -> None:
    sizes = ([[512, 512], [512, 512]], [[512, 512], [512, 4]])
    assert len(products(*sizes, "op aten::relu 3900-3950 input_shapes=[[512,4]]")) == 1
    assert products(*sizes, "op aten::relu 3900-3950 input_shapes=[[512,512]]") == []
    assert products(*sizes, name="aten::linear") == []


def test_products_with_something_between_are_no_chain() -> None:
    lines = (
        "op aten::matmul 1000-2500 input_shapes=[[512,64],[64,512]]",
        "op aten::softmax 2500-2900 input_shapes=[[512,512]]",
        "op aten::matmul 2900-3900 input_shapes=[[512,512],[512,64]]",
    )
    assert advice_of(inside(*lines), "product-order") == []
    assert len(advice_of(inside(lines[0], lines[2]), "product-order")) == 1


UPDATE = "op aten::matmul 1000-2500 dtype=float input_shapes=[[512,8],[8,256]]"
SCALED = "op aten::mul 2500-2600 dtype=float input_shapes=[[512,256],[]]"


@pytest.mark.parametrize(
    "second",
    ["matmul 2600-3900 input_shapes=[[4,16,256],[256,512]]", "linear 2600-3900 input_shapes=[[64,256],[512,256]]"],
)
@pytest.mark.parametrize("between", [(), (SCALED,)])
def test_a_product_of_low_rank_that_is_the_right_factor_is_reported(second: str, between: tuple[str, ...]) -> None:
    (piece,) = advice_of(inside(UPDATE, *between, f"op aten::{second}"), "product-order")
    both, apart = 512 * 8 * 256 + 64 * 256 * 512, 64 * 256 * 8 + 64 * 8 * 512
    assert piece.what.startswith(f"64×256 @ (256×8 @ 8×512) takes {both / apart:.3g} times")
    assert piece.do.startswith("write (x @ A) @ B instead of x @ (A @ B)")


@pytest.mark.parametrize(
    "lines",
    [
        ("op aten::linear 2600-3900 input_shapes=[[512,256],[512,256]]",),  # may be the left factor
        ("op aten::linear 2600-3900 input_shapes=[[64,256],[128,256]]",),  # another weight
        (
            "op aten::softmax 2500-2600 input_shapes=[[512,256]]",
            "op aten::linear 2600-3900 input_shapes=[[64,256],[512,256]]",
        ),
        (
            "op aten::mul 2500-2600 input_shapes=[[512,256],[512,256]]",
            "op aten::mm 2600-3900 input_shapes=[[64,256],[256,512]]",
        ),
    ],
)
def test_a_product_with_another_right_factor_is_no_chain(lines: tuple[str, ...]) -> None:
    assert advice_of(inside(UPDATE, *lines), "product-order") == []


def repeated_rows(lookup: str, product: str, *between: str) -> list[Advice]:
    return advice_of(inside(f"op aten::{lookup}", *between, f"op aten::{product}"), "product-order")


@pytest.mark.parametrize(
    ("lookup", "product"),
    [
        ("index 1000-1400 input_shapes=[[500,64],[[6000]]]", "linear 1400-3900 input_shapes=[[6000,64],[32,64],[32]]"),
        ("index 1000-1400 input_shapes=[[500,64],[]]", "linear 1400-3900 input_shapes=[[6000,64],[32,64],[32]]"),
        ("index_select 1000-1400 input_shapes=[[500,64],[],[6000]]", "mm 1400-3900 input_shapes=[[6000,64],[64,32]]"),
        ("embedding 1000-1400 input_shapes=[[500,64],[8,750]]", "linear 1400-3900 input_shapes=[[8,750,64],[32,64]]"),
    ],
)
def test_rows_that_are_looked_up_many_times_each_are_multiplied_once(lookup: str, product: str) -> None:
    (piece,) = repeated_rows(lookup, product)
    assert piece.what == "a product takes 6,000 rows that are looked up among 500: each is multiplied 12 times"
    assert piece.gain.value == pytest.approx(2.5 * (1 - 500 / 6000))
    assert piece.do.endswith("linear(x)[index] instead of linear(x[index])")
    (wide,) = repeated_rows(lookup, product.replace("[32,64]", "[96,64]").replace("[64,32]", "[64,96]"))
    assert wide.gain.value == pytest.approx(2.5 * (1 - 500 / 6000) - 0.2), "longer rows are looked up"


@pytest.mark.parametrize(
    ("lookup", "product", "between"),
    [
        ("index 1000-1400 input_shapes=[[500,64],[[900]]]", "linear 1400-3900 input_shapes=[[900,64],[32,64]]", ()),
        ("index 1000-1400 input_shapes=[[500,64],[[6000]]]", "linear 1400-3900 input_shapes=[[6000,32],[32,32]]", ()),
        (
            "index 1000-1400 input_shapes=[[500,64],[[6000]]]", "linear 1500-3900 input_shapes=[[6000,64],[32,64]]",
            ("op aten::relu 1400-1500 input_shapes=[[6000,64]]",),
        ),
    ],
)  # fmt: skip
def test_products_of_other_rows_are_no_repetition(lookup: str, product: str, between: tuple[str, ...]) -> None:
    assert repeated_rows(lookup, product, *between) == []


def dense_gradient(
    rows: int, lookup: str = "embedding", inputs: str = "[16,16]", updated: int = 64, gradient: str = ""
) -> list[Advice]:
    """Return the advice on a step that looks 256 rows up in a table, and then updates all rows."""
    return advice_of(
        "step s 0-10000\n"
        "forward Net 10-2000\n"
        "module net.table 20-1900 type=Embedding\n"
        f"op aten::{lookup} 30-1800 input_shapes=[[{rows},64],{inputs}] sequence_nr=7\n"
        "backward backward 2000-9000\n"
        f"op LookupBackward0 3000-8000 sequence_nr=7\n{gradient}"
        "optimizer SGD 9000-9990 phase=optimizer\n"
        f"op aten::add_ 9010-9210 phase=optimizer input_shapes=[[{rows},{updated}],[{rows},{updated}]]\n"
        f"op aten::_foreach_mul_ 9210-9510 phase=optimizer input_shapes=[[[{rows},{updated}],[{rows},32]],[]]\n"
        "op aten::add_ 9510-9900 phase=optimizer input_shapes=[[64,10],[64,10]]",
        "dense-gradient",
    )


@pytest.mark.parametrize(("rows", "expected"), [(60_000, 1), (2_048, 1), (512, 0)])
def test_a_dense_gradient_for_a_few_rows_of_a_table_is_reported(rows: int, expected: int) -> None:
    pieces = dense_gradient(rows)
    assert len(pieces) == expected
    for piece in pieces:
        assert [place.module for place in piece.where] == ["net.table"]
        assert piece.gain.value == pytest.approx((5 + 0.2 + 0.2) * (1 - 2 * 256 / rows))
        assert not piece.at_most, "what rows that are used take is subtracted"
        assert "sparse=True" in piece.do
        assert piece.changes_numbers is not None


def test_rows_of_indices_without_a_shape_are_those_that_their_gradient_adds() -> None:
    put = "op aten::_index_put_impl_ 3100-7900 input_shapes=[[60000,64],[],[16,16,64],[],[]]\n"
    (piece,) = dense_gradient(60_000, "index", "[]", gradient=put)
    assert piece.what == "the gradient of an embedding of 60,000 rows is dense, although at most 256 rows are used"
    assert dense_gradient(60_000, "index", "[]") == [], "nothing tells how many"
    assert dense_gradient(60_000, "index", "[]", gradient=put.replace("[16,16,64]", "[20000,64]")) == []


@pytest.mark.parametrize(
    ("lookup", "inputs", "do"),
    [
        ("embedding_bag", "[256],[16]", "EmbeddingBag(…, sparse=True)"),
        ("index", "[[16,16]]", "functional.embedding("),
        ("index_select", "[],[256]", "functional.embedding("),
    ],
)
def test_a_gradient_is_dense_whatever_looks_rows_up(lookup: str, inputs: str, do: str) -> None:
    (piece,) = dense_gradient(60_000, lookup, inputs)
    assert do in piece.do
    assert piece.gain.value == pytest.approx((5 + 0.2 + 0.2) * (1 - 2 * 256 / 60_000))
    assert dense_gradient(60_000, lookup, inputs, updated=63) == [], "the optimizer does not update it: no table"


def test_single_elements_of_a_matrix_are_no_rows() -> None:
    assert dense_gradient(60_000, "index", "[[256],[256]]") == []


@pytest.mark.parametrize(("product", "expected"), [("[[16,32,8000],[128,8000]]", 1), ("[[16,32,8001],[128,8001]]", 0)])
def test_products_with_one_hot_vectors_are_lookups(product: str, expected: int) -> None:
    step = (
        "step s 0-10000\nforward Net 10-9000\nmodule net 20-8900 type=Net\n"
        "op aten::one_hot 100-1100 input_shapes=[[16,32],[]]\n"
        "op aten::scatter_ 200-1000 input_shapes=[[16,32,8000],[],[16,32,1]]\n"
        "op aten::to 1200-2200 input_shapes=[[16,32,8000],[]]\n"
        f"op aten::linear 3000-8000 input_shapes={product}"
    )
    pieces = advice_of(step, "one-hot")
    assert len(pieces) == expected
    for piece in pieces:
        assert "512 rows of 8,000" in piece.what
        assert piece.gain.value == pytest.approx(1 + 1 + 5)
        assert piece.at_most
    backward = (
        "\nbackward backward 9000-9990\nop aten::mm 9100-9500 input_shapes=[[8000,512],[512,128]]"
        "\nop aten::mm 9500-9900 input_shapes=[[512,64],[64,128]]"
    )
    for piece in advice_of(step + backward, "one-hot"):
        assert piece.gain.value == pytest.approx(1 + 1 + 5 + 0.4), "and the product of their gradient"


def shaped(*lines: tuple[str, object]) -> str:
    """Return a step whose module `net.a` calls these operators in a row, 0.5 ms each."""
    return inside(
        *(
            f"op {name} {1000 + 500 * index}-{1500 + 500 * index} dtype=float input_shapes="
            + json.dumps(shapes, separators=(",", ":"))
            for index, (name, shapes) in enumerate(lines)
        )
    )


WIDE = [48, 256, 256]
"""A tensor made of 48×256×1 and 256×256."""


def test_a_product_by_broadcasting_and_a_sum_is_reported_with_both_calls() -> None:
    step = shaped(("aten::mul", [[48, 256, 1], [256, 256]]), ("aten::sum", [WIDE, [], []]))
    (piece,) = advice_of(step, "broadcast-product")
    assert "48×256×1 and 256×256" in piece.what
    assert f"{48 * 256 * 256:,}" in piece.what
    assert piece.gain.value == pytest.approx(1.0)
    assert piece.at_most
    assert [place.module for place in piece.where] == ["net.a"]


@pytest.mark.parametrize(
    ("op", "do"), [("cosine_similarity", "normalize(a) @ normalize(b).T"), ("pairwise_distance", "torch.cdist")]
)
def test_one_operator_that_compares_all_pairs_by_broadcasting_is_a_chain(op: str, do: str) -> None:
    (piece,) = advice_of(shaped((f"aten::{op}", [[500, 1, 64], [1, 400, 64]])), "broadcast-product")
    assert do in piece.do
    assert f"{500 * 400 * 64:,}" in piece.what
    assert advice_of(shaped((f"aten::{op}", [[500, 64], [500, 64]])), "broadcast-product") == [], "pair by pair"


def test_distances_of_all_pairs_include_the_calls_between_difference_and_sum() -> None:
    step = shaped(
        ("aten::sub", [[500, 1, 64], [1, 400, 64]]), ("aten::pow", [[500, 400, 64], []]),
        ("aten::sum", [[500, 400, 64], [], []]), ("aten::sqrt", [[500, 400]]),
    )  # fmt: skip
    (piece,) = advice_of(step, "broadcast-product")
    assert "torch.cdist" in piece.do
    assert piece.gain.value == pytest.approx(1.5)


@pytest.mark.parametrize(
    "lines",
    [
        (("aten::mul", [[8, 64, 56, 56], [8, 64, 1, 1]]), ("aten::sum", [[8, 64, 56, 56], [], []])),  # a gate
        (("aten::mul", [[48, 256, 1], [256, 256]]), ("aten::relu", [WIDE])),  # used as it is
        (("aten::mul", [[48, 256, 1], [256, 256]]), ("aten::add", [WIDE, WIDE]), ("aten::sum", [WIDE, [], []])),
        (("aten::add", [[48, 256, 1], [256, 256]]), ("aten::sum", [WIDE, [], []])),
        (("aten::mul", [[48, 256, 3], [256, 256]]), ("aten::sum", [WIDE, [], []])),  # shapes that cannot be
        (("aten::mul", [None, [256, 256]]), ("aten::sum", [WIDE, [], []])),
    ],
)
def test_other_products_and_sums_are_not_reported(lines: tuple[tuple[str, object], ...]) -> None:
    assert advice_of(shaped(*lines), "broadcast-product") == []


def test_a_matrix_that_is_inverted_to_multiply_is_reported_with_two_thirds_of_its_time() -> None:
    (piece,) = advice_of(
        shaped(("aten::linalg_inv", [[384, 384]]), ("aten::matmul", [[384, 384], [384, 4]])), "inverse"
    )
    assert piece.gain.value == pytest.approx(0.5 * 2 / 3)
    assert "torch.linalg.solve" in piece.do


@pytest.mark.parametrize(
    "lines",
    [
        (("aten::linalg_inv", [[384, 384]]), ("aten::trace", [[384, 384]])),
        (("aten::linalg_inv", [[384, 384]]), ("aten::matmul", [[64, 64], [64, 4]])),
        (("aten::matmul", [[384, 384], [384, 4]]), ("aten::linalg_inv", [[384, 384]])),
    ],
)
def test_inverses_that_no_product_takes_are_not_reported(lines: tuple[tuple[str, object], ...]) -> None:
    assert advice_of(shaped(*lines), "inverse") == []


@pytest.mark.parametrize(
    ("outer", "inner", "what"),
    [
        ("aten::linalg_matrix_norm", "aten::_linalg_svd", "singular values"),
        ("aten::linalg_eigh", "aten::_linalg_eigh", "eigenvalues"),
        ("aten::linalg_qr", "aten::empty", "an orthogonal basis"),
        ("aten::linalg_matrix_norm", "aten::linalg_vector_norm", None),
    ],
)
def test_decompositions_in_each_step_are_reported_with_their_gradients(
    outer: str, inner: str, what: str | None
) -> None:
    step = inside(f"op {outer} 1000-3000 sequence_nr=4", f"op {inner} 1010-2990", "op aten::div 3000-3200")
    step = step.replace("net.b 4910-9880", "net.b 4910-5500").replace("4920-9870", "4920-5490")
    step += "\nbackward b 5990-9890\nop LinalgSvdBackward0 6000-6500 sequence_nr=4"
    pieces = advice_of(step, "decompositions")
    assert [piece.what for piece in pieces] == ([f"each step computes {what} of a matrix"] if what else [])
    for piece in pieces:
        assert piece.gain.value == pytest.approx(2.7)
        assert piece.at_most
        assert piece.changes_numbers is not None
