"""The size of a PyTorch tensor: its bytes on this rank and its number of elements, for any layout and class.

PyTorch states the size of a sparse tensor as if it were dense. For a tensor that is divided among ranks, it states the
size of the whole tensor (`DTensor`) or of the shard (the flat parameter of FSDP).
"""

from __future__ import annotations

from math import prod
from typing import Any

_SPARSE_PARTS = {
    "sparse_coo": ("_values", "_indices"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), ("values", "crow_indices", "col_indices")),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), ("values", "ccol_indices", "row_indices")),
}
"""Sparse layouts, with the methods that return the stored elements and their indices."""


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor on this rank; for a sparse one, those of the stored elements and their indices."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    methods = _SPARSE_PARTS.get(str(tensor.layout).removeprefix("torch."))
    return int(tensor.nbytes) if methods is None else sum(int(getattr(tensor, method)().nbytes) for method in methods)


def elements_of(tensor: Any) -> int:
    """Return the number of elements of a tensor on all ranks, if its class states it, else on this rank."""
    shape = getattr(tensor, "_unpadded_unsharded_size", None)  # of a flat parameter of FSDP
    return int(tensor.numel()) if shape is None else prod(map(int, shape))
