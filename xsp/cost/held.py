"""What a tensor of torch holds: its bytes on this rank and its elements, whatever its layout and class.

Torch states the size of a sparse tensor as if it were dense. For a tensor that is divided among ranks it states that of
the whole (`DTensor`) or that of the shard (the flat parameter of FSDP).
"""

from __future__ import annotations

from math import prod
from typing import Any

_STORED = {
    "sparse_coo": ("_values", "_indices"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), ("values", "crow_indices", "col_indices")),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), ("values", "ccol_indices", "row_indices")),
}
"""Sparse layouts, with the methods that return the stored elements and their places."""


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor's elements on this rank; of a sparse one, of those it stores and of their places."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    stored = _STORED.get(str(tensor.layout).removeprefix("torch."))
    return int(tensor.nbytes) if stored is None else sum(int(getattr(tensor, each)().nbytes) for each in stored)


def elements_of(tensor: Any) -> int:
    """Return the elements of a tensor on all ranks together, where its class tells them; nothing is computed."""
    whole = getattr(tensor, "_unpadded_unsharded_size", None)  # of a flat parameter of FSDP
    return int(tensor.numel()) if whole is None else prod(map(int, whole))
