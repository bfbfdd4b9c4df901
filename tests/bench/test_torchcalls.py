"""Blocks as functions of torch: nothing that stands in a file is run as code, and no operator opens a file."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from xsp.bench.inputs import NotTimeable  # noqa: E402
from xsp.bench.spec import Spec  # noqa: E402
from xsp.bench.torchcalls import BlockSource, Torch  # noqa: E402
from xsp.graph.blocks import Block, Wires  # noqa: E402
from xsp.graph.node import Call, Tensor  # noqa: E402

FOUR = Tensor("float32", (4,))


def test_a_text_among_arguments_is_a_constant_and_no_source(tmp_path: Path) -> None:
    text = f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).touch()"
    call = Call("aten::cat", (("tensors", (FOUR, text)), ("dim", 0)), (Tensor("float32", (8,)),))
    function = BlockSource(Block((call,), (Wires((0,), (1,), ()),))).function()
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        function(torch.zeros(4))
    assert list(tmp_path.iterdir()) == []


def test_an_operator_that_opens_files_is_not_called(tmp_path: Path) -> None:
    made = tmp_path / "made"
    call = Call("aten::from_file", (("filename", str(made)), ("shared", True), ("size", 4)), (FOUR,))
    with pytest.raises(NotTimeable, match="opens files"):
        Torch().prepare(Spec(Block((call,), (Wires((), (0,), ()),))), 0, 1 << 30)
    assert not made.exists()


def test_parts_of_one_storage_are_found_by_shape_and_strides() -> None:
    rows, row = Tensor("float32", (2, 4)), Tensor("float32", (4,))
    unbind = Call("aten::unbind", (("self", rows), ("dim", 0)), (row, row), "int")
    less = Call("aten::sub", (("self", row), ("other", row), ("alpha", 1)), (row,), "Tensor")
    block = Block((unbind, less), (Wires((0,), (0, 0), ()), Wires((0, 0), (1,), (1,))))
    given = torch.arange(8.0).reshape(2, 4)
    assert BlockSource(block).function()(given).tolist() == [-4.0] * 4
