"""Bytes and elements of parameters whose size is not what torch says at first: sparse ones, and shards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from xsp.cost.held import bytes_of, elements_of  # noqa: E402
from xsp.graph.captured import check_memory  # noqa: E402
from xsp.graph.recorder import Recorder  # noqa: E402


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("sparse_coo", 4 * 4 + 2 * 4 * 8),  # a value and two places for each of four elements
        ("sparse_csr", 4 * 4 + 5 * 8 + 4 * 8),  # values, where each of four rows begins, columns
        ("sparse_csc", 4 * 4 + 5 * 8 + 4 * 8),
        ("sparse_bsr", 2 * 4 * 4 + 3 * 8 + 2 * 8),  # two blocks of four values
        ("sparse_bsc", 2 * 4 * 4 + 3 * 8 + 2 * 8),
        ("strided", 16 * 4),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_parameter_has_the_bytes_of_what_it_stores(layout: str, expected: int) -> None:
    blocks = {"blocksize": (2, 2)} if layout in ("sparse_bsr", "sparse_bsc") else {}
    dense = torch.eye(4)
    stored = dense if layout == "strided" else dense.to_sparse(layout=getattr(torch, layout), **blocks)
    assert bytes_of(torch.nn.Parameter(stored)) == expected


def test_a_model_with_a_large_sparse_table_is_not_refused_for_what_a_dense_one_would_take() -> None:
    places = torch.zeros(2, 3, dtype=torch.int64)
    model = torch.nn.Module()
    model.register_buffer("table", torch.sparse_coo_tensor(places, torch.ones(3), (1 << 24, 1 << 24)))
    check_memory(model)


def test_of_a_tensor_that_is_divided_among_ranks_the_bytes_are_of_the_shard_and_the_elements_of_the_whole() -> None:
    whole = SimpleNamespace(_local_tensor=torch.zeros(3, 8), numel=lambda: 48)  # as a DTensor
    assert (bytes_of(whole), elements_of(whole)) == (3 * 8 * 4, 48)
    flat = torch.nn.Parameter(torch.zeros(24))  # as the flat parameter of FSDP
    flat._unpadded_unsharded_size = torch.Size([47])
    assert (bytes_of(flat), elements_of(flat)) == (24 * 4, 47)


def test_the_parameters_of_a_graph_are_those_of_all_ranks() -> None:
    class Sharded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.nn.Parameter(torch.zeros(24))
            self.flat._unpadded_unsharded_size = torch.Size([47])

        def forward(self, x):
            return x + self.flat

    recorder, model = Recorder(), Sharded()
    with recorder.recording():
        model(torch.ones(24))
    assert recorder.parameters == 47
