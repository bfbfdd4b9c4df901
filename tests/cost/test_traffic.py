"""Bytes from shapes, against sums by hand, and never an error whatever the shapes are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsp.cost import flops as operations
from xsp.cost.traffic import FORMULAS, Traffic, traffic

FLOAT, HALF, LONG, BOOL = "float", "c10::BFloat16", "long int", "bool"


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "scalars", "expected"),
    [
        ("aten::relu", [[2, 3]], [FLOAT], [""], (24, 24)),
        ("aten::add", [[2, 3], [3], []], [FLOAT, FLOAT, "Scalar"], ["", "", "1"], (36, 24)),  # broadcast
        ("aten::add", [[2, 3], [2, 3], [], [2, 3]], [HALF, HALF, "Scalar", HALF], ["", "", "1", ""], (24, 12)),  # out=
        ("aten::mul", [[4], []], [HALF, "double"], ["", ""], (16, 8)),  # a number does not make it wider
        ("aten::add", [[4], [4]], [HALF, FLOAT], ["", ""], (24, 16)),
        ("aten::eq", [[8], []], [LONG, "Scalar"], ["", "0"], (64, 8)),
        ("aten::mul_", [[4], [4]], [FLOAT, FLOAT], ["", ""], (32, 16)),  # in place: read and written
        ("aten::fill_", [[4], []], [FLOAT, "Scalar"], ["", "0"], (0, 16)),
        ("aten::copy_", [[4], [4], []], [HALF, FLOAT, "Scalar"], ["", "", "False"], (16, 8)),  # converts
        ("aten::native_dropout", [[10], [], []], [FLOAT, "Scalar", "Scalar"], ["", "0.5", "True"], (40, 50)),
        ("aten::sum", [[2, 3], [], [], []], [FLOAT, "ScalarList", "Scalar", ""], ["", "[1]", "True", ""], (24, 8)),
        ("aten::sum", [[2, 3], []], [FLOAT, ""], ["", ""], (24, 4)),
        ("aten::max", [[2, 3], [], []], [FLOAT, "Scalar", "Scalar"], ["", "-1", "False"], (24, 24)),  # with places
        ("aten::mean", [[2, 3], [], [], []], [FLOAT, "ScalarList", "Scalar", ""], ["", "", "", ""], None),  # not told
        ("aten::_softmax", [[2, 3], [], []], [HALF, "Scalar", "Scalar"], ["", "-1", "True"], (12, 24)),  # to float
        ("aten::native_layer_norm", [[2, 3], [], [3], [3], []], [HALF, "", HALF, HALF, ""], [""] * 5, (24, 12)),
        ("aten::mm", [[2, 3], [3, 4]], [FLOAT, FLOAT], ["", ""], (72, 32)),
        ("aten::mm", [[2, 3], [4, 4]], [FLOAT, FLOAT], ["", ""], None),
        ("aten::addmm", [[4], [2, 3], [3, 4]], [HALF] * 3, [""] * 3, (44, 16)),
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], [HALF, HALF], ["", ""], (180, 80)),
        ("aten::_scaled_mm", [[2, 3], [3, 4], [], [], [], [], []],
         ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "", "", "", "", "Scalar"], ["", "", "", "", "", "", "15"],
         (18, 16)),
        ("aten::convolution_backward", [[1, 4, 6, 6], [1, 3, 8, 8], [4, 3, 3, 3]], [FLOAT] * 3,
         [*[""] * 10, "[False, True, False]"], (4 * (144 + 192), 4 * 108)),
        ("aten::_flash_attention_forward", [[2, 10, 4, 8]] * 3, [HALF] * 3, [""] * 3, (3 * 1280, 1280)),
        ("aten::_flash_attention_forward", [[20, 4, 8]] * 3, [HALF] * 3, [""] * 3, None),  # lengths differ
        ("aten::index_select", [[100, 8], [], [5]], [FLOAT, "Scalar", LONG], ["", "0", ""], (160 + 40, 160)),
        ("aten::index_put_", [[100, 8], [], [5, 8], []], [FLOAT, "", FLOAT, "Scalar"], ["", "", "", "False"],
         (160, 160)),
        ("aten::index_put_", [[100, 8], [], [5, 8], []], [FLOAT, "", FLOAT, "Scalar"], ["", "", "", "True"],
         (320, 160)),
        ("aten::index_put_", [[100, 8], [], [], []], [FLOAT, "", FLOAT, "Scalar"], ["", "", "", "False"], None),
        ("aten::index_copy_", [[100, 8], [], [5], [5, 8]], [FLOAT, "Scalar", LONG, FLOAT], ["", "0", "", ""],
         (40 + 160, 160)),
        ("aten::index_fill_", [[100, 8], [], [5], []], [FLOAT, "Scalar", LONG, "Scalar"], ["", "0", "", "0"],
         (40, 160)),
        ("aten::index_add_", [[100, 8], [], [5], [5, 8], []], [FLOAT, "Scalar", LONG, FLOAT, "Scalar"],
         ["", "0", "", "", "1"], (40 + 160 + 160, 160)),
        ("aten::scatter_", [[100, 8], [], [5, 8], [9, 8]], [FLOAT, "Scalar", LONG, FLOAT], ["", "0", "", ""],
         (320 + 160, 160)),  # of the values only those that have an index
        ("aten::scatter_", [[100, 8], [], [5, 8], []], [FLOAT, "Scalar", LONG, "Scalar"], ["", "0", "", "1."],
         (320, 160)),
        ("aten::scatter_add_", [[100, 8], [], [5, 8], [9, 8]], [FLOAT, "Scalar", LONG, FLOAT], ["", "0", "", ""],
         (320 + 160 + 160, 160)),
        ("aten::put_", [[100, 8], [5], [5], []], [FLOAT, LONG, FLOAT, "Scalar"], ["", "", "", "False"], (60, 20)),
        ("aten::embedding_dense_backward", [[5, 8], [5], [], [], []], [FLOAT, LONG, "Scalar", "Scalar", "Scalar"],
         ["", "", "100", "-1", "False"], (160 + 40, 3200)),
        ("aten::max_pool2d_with_indices", [[1, 4, 8, 8], [], [], [], [], []], [FLOAT, *["ScalarList"] * 4, "Scalar"],
         ["", "[3, 3]", "[2, 2]", "[1, 1]", "[1, 1]", "False"], (1024, 256)),
        ("aten::max_pool2d_with_indices", [[1, 1, 112, 112], [], [], [], [], []],  # sizes rounded up, as in GoogLeNet
         [FLOAT, *["ScalarList"] * 4, "Scalar"], ["", "[3, 3]", "[2, 2]", "[0, 0]", "[1, 1]", "True"],
         (4 * 112 * 112, 4 * 56 * 56)),
        ("aten::max_pool2d_with_indices", [[1, 4, 8, 8], [], [], [], [], []], [FLOAT, *["ScalarList"] * 4, "Scalar"],
         ["", "[3, 3]", "[1, 1]", "[0, 0]", "[2, 2]", "False"], (1024, 256)),  # 2 apart
        ("aten::max_pool2d_with_indices", [[1, 4, 3, 3], [], [], [], [], []], [FLOAT, *["ScalarList"] * 4, "Scalar"],
         ["", "[2, 2]", "[4, 4]", "[1, 1]", "[1, 1]", "True"], (144, 16)),  # a second window would begin outside
        ("aten::avg_pool2d", [[1, 4, 8, 8], [], [], [], [], [], []],
         [FLOAT, *["ScalarList"] * 3, "Scalar", "Scalar", ""], ["", "[3, 3]", "[2, 2]", "[0, 0]", "True", "True", ""],
         (1024, 256)),
        ("aten::_adaptive_avg_pool2d", [[1, 4, 8, 8], []], [FLOAT, "ScalarList"], ["", "[1, 1]"], (1024, 16)),
        ("aten::linear", [[2, 3], [4, 3]], [FLOAT, FLOAT], ["", ""], None),  # passes the work on
        ("aten::relu", [[2, 3]], ["a type of 2031"], [""], None),
        ("my::relu", [[2, 3]], [FLOAT], [""], None),
    ],
)  # fmt: skip
def test_each_input_is_read_once_and_each_output_written_once(name, shapes, dtypes, scalars, expected):
    assert traffic(name, shapes, dtypes, scalars) == (None if expected is None else Traffic(*expected))


@pytest.mark.parametrize(
    ("name", "scalars"),
    [
        ("aten::cudnn_convolution", ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]),
        ("aten::miopen_convolution", ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False"]),
        ("aten::mkldnn_convolution", ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]),
        ("aten::cudnn_convolution_relu", ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]),
        ("aten::cudnn_convolution_add_relu", ["", "", "", "1.", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]),
    ],
)
def test_a_convolution_by_hand_whichever_library_does_it(name, scalars):
    # 1 image of 3 channels, 8×8; 4 filters of 3×3, stride 2, padding 1: 4 channels of 4×4
    shapes, dtypes = [[1, 3, 8, 8], [4, 3, 3, 3], *[[]] * 7], [HALF, HALF, *[""] * 7]
    assert traffic(name, shapes, dtypes, scalars) == Traffic(2 * (192 + 108), 2 * 64)
    assert operations.flops(name, shapes, scalars) == 2 * 16 * 4 * 27
    assert traffic(name, shapes, dtypes, []) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8
)
operator = st.sampled_from(sorted(FORMULAS | operations.FORMULAS))


def test_an_operator_of_no_tensor_at_all_has_no_traffic() -> None:
    assert traffic("aten::miopen_convolution_backward_input", [], [], ["0"]) is None


@pytest.mark.slow
@given(name=operator, inputs=st.lists(anything, max_size=12))
def test_foreign_shapes_never_raise(name, inputs):
    traffic(name, inputs, [FLOAT] * len(inputs), inputs)
    operations.flops(name, inputs, inputs)


@given(
    name=operator,
    shapes=st.lists(st.lists(st.integers(-4, 1 << 40), max_size=4), max_size=9),
    dtypes=st.lists(st.sampled_from([FLOAT, HALF, "", "Scalar", "?"]), max_size=9),
    scalars=st.lists(st.sampled_from(["", "0", "[1, 1]", "[0]", "[[[", "nan", "{}", "1e999"]), max_size=12),
)
def test_what_is_known_is_a_number_that_the_table_holds(name, shapes, dtypes, scalars):
    moved = traffic(name, shapes, dtypes, scalars)
    counted = operations.flops(name, shapes, scalars)
    assert moved is None or (min(moved) >= 0 and max(moved) < 1 << 63)
    assert counted is None or 0 <= counted < 1 << 63
