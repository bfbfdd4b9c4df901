"""Files of weights, strictly validated, and the layout of their tensors in shared memory.

The only format that is read is safetensors: a header in JSON and plain bytes. A pickle runs code when it is read, so it
is refused by its first bytes and never unpickled.

In memory: 8 bytes `xspshare`, 8 bytes with the length of a table in JSON, the table, and the tensors in the order of
the file, each at a multiple of `ALIGNMENT` bytes, which is torch's alignment on devices (on the host 64 are enough), so
that kernels take the same paths and outputs are identical to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xsp.errors import ShareError
from xsp.scrub import plain

ALIGNMENT = 512
PAGE = 4096
CHUNK = 4 << 20
MOST_HEADER = 16 << 20
"""Limit of the header in bytes: some 100,000 tensors. The format's own reader has a limit of 100 MB."""

HEADER_MEMORY = 16
"""Bytes of memory for a byte of a header while it is read."""

LARGE_HEADER = 1 << 20
"""Bytes above which the memory for a header is considered."""

WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
"""File names in a folder, as transformers writes them: one file, or the index of its shards."""

MAGIC = b"xspshare"

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element, by the format's name of the type."""


class StoredTensor(NamedTuple):
    """A tensor of a file, or of an object in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte from the beginning of the file or of the mapping."""

    nbytes: int


def header_memory(file: int) -> int:
    """Return the bytes of memory that reading the header of a file takes; 0 if that is little, or refused anyway."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    return length * HEADER_MEMORY if LARGE_HEADER < length <= MOST_HEADER else 0


def read_header(file: int, label: str) -> list[StoredTensor]:
    """Return the tensors of a safetensors file, in the order of their data.

    Args:
        file: descriptor of a regular file; its position is not used.
        label: name of the file in messages.

    Raises:
        ShareError: it is not a safetensors file, or a damaged one; none of its data was read.
    """
    size = os.fstat(file).st_size
    start = os.pread(file, 16, 0)
    length = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{":
        if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
            raise ShareError(
                f"{label}: is a pickle or an archive of one (torch.save), which can run code when it is read, so it is "
                "refused; write the weights with safetensors.torch.save_file"
            )
        raise ShareError(f"{label}: is not a safetensors file; write one with safetensors.torch.save_file")
    if not 2 <= length <= min(size - 8, MOST_HEADER):
        raise ShareError(
            f"{label}: its header states {length} bytes in a file of {size}: it is truncated or damaged, or "
            f"larger than {MOST_HEADER} bytes"
        )
    try:
        header = json.loads(_read(file, 8, length, label), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise ShareError(f"{label}: its header cannot be read ({plain(str(error))[:200]})") from None
    if not isinstance(header, dict):
        raise ShareError(f"{label}: its header is not a table of tensors")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = sorted(
        (_tensor(name, description, label, data_start) for name, description in header.items()),
        key=lambda tensor: tensor[3:],
    )
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise ShareError(f"{label}: the bytes of {plain(tensor.name)} overlap others or leave a gap")
        end += tensor.nbytes
    if end != size:
        raise ShareError(f"{label}: its tensors end at byte {end}, the file at {size}: it is truncated or damaged")
    return tensors


def shards(source: str) -> list[str]:
    """Return the files of a source, or its keys: a file itself, the files that an index names, or those of a folder.

    Only the file names of an index are used; the names of tensors come from the headers of the files.

    Args:
        source: a safetensors file, an index of several, a folder that contains one of these, or keys of the store,
            separated by commas.

    Raises:
        ShareError: the index is damaged, a file that it names is not in its folder, or the folder contains neither.
    """
    if source.startswith("sha256:"):
        return source.split(",")
    path = Path(source)
    if path.is_dir():
        candidates = [candidate for candidate in (path / WEIGHTS_NAME, path / INDEX_NAME) if candidate.is_file()]
        if not candidates:
            raise ShareError(f"{source}: is a folder without {WEIGHTS_NAME} or {INDEX_NAME}")
        path = candidates[0]
    if not path.name.endswith(".index.json"):
        return [str(path)]
    try:
        if path.stat().st_size > MOST_HEADER:
            raise ValueError("too large")
        weight_map = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_names)["weight_map"]
        names = sorted({_plain_name(name) for name in weight_map.values()})
    except OSError as error:
        raise ShareError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ShareError(f"{path}: is not an index of safetensors files ({error})") from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing or not names:
        raise ShareError(f"{path}: there is no {missing[0]} beside it" if missing else f"{path}: it names no file")
    return [str(path.parent / name) for name in names]


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file beside it")
    return name


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _tensor(name: str, description: Any, label: str, data_start: int) -> StoredTensor:
    """Return a tensor from its description in the header.

    Raises:
        ShareError: the description is invalid or inconsistent.
    """
    prefix = f"{label}: tensor {plain(name)[:100]}"
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        raise ShareError(f"{prefix}: must have dtype, shape and data_offsets")
    dtype, shape, offsets = description["dtype"], description["shape"], description["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ShareError(f"{prefix}: its type {plain(str(dtype))[:40]} is not known; there are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > 64:
        raise ShareError(f"{prefix}: its shape is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ShareError(f"{prefix}: its data_offsets are not two positions")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ShareError(f"{prefix}: its bytes ({nbytes}) do not match its shape and type")
    return StoredTensor(name, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _read(file: int, offset: int, size: int, label: str) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(file, min(size, CHUNK), offset)
        if not part:
            raise ShareError(f"{label}: it became shorter while it was read")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


class WeightsLayout(NamedTuple):
    """The layout of tensors in memory."""

    table: bytes
    """Bytes before the first tensor: magic, length, table and padding."""

    tensors: list[StoredTensor]
    size: int
    """Total bytes."""


def memory_layout(tensors: list[StoredTensor]) -> WeightsLayout:
    """Return the layout in memory of a file's tensors."""
    end, packed_tensors = 0, []
    for tensor in tensors:
        end = -(-end // ALIGNMENT) * ALIGNMENT
        packed_tensors.append(tensor._replace(offset=end))
        end += tensor.nbytes
    encoded = json.dumps(packed_tensors, separators=(",", ":")).encode()
    table_bytes = -(-(16 + len(encoded)) // PAGE) * PAGE
    table = MAGIC + struct.pack("<Q", len(encoded)) + encoded
    shifted_tensors = [tensor._replace(offset=tensor.offset + table_bytes) for tensor in packed_tensors]
    return WeightsLayout(table.ljust(table_bytes, b"\0"), shifted_tensors, max(table_bytes + end, PAGE))


def read_table(memory: Any) -> list[StoredTensor]:
    """Return the tensors of an object in memory, with their offsets there.

    Args:
        memory: bytes, or a view of them.

    Raises:
        ShareError: the object was not made by `copy`.
    """
    if bytes(memory[:8]) != MAGIC:
        raise ShareError("the store provided an object that is not weights")
    (length,) = struct.unpack("<Q", bytes(memory[8:16]))
    table_bytes = -(-(16 + length) // PAGE) * PAGE
    return [
        StoredTensor(name, dtype, tuple(shape), offset + table_bytes, nbytes)
        for name, dtype, shape, offset, nbytes in json.loads(bytes(memory[16 : 16 + length]))
    ]


def copy(
    file: int,
    tensors: list[StoredTensor],
    layout: WeightsLayout,
    memory: int,
    label: str,
    keep_going: Callable[[], bool],
) -> str:
    """Copy tensors from a file into memory, and return the SHA-256 of the memory's content, in hexadecimal digits.

    Args:
        file: descriptor of the file.
        tensors: the tensors of the file.
        layout: their layout in memory.
        memory: descriptor of the memory, which is resized as needed.
        label: name of the file in messages.
        keep_going: polled after each chunk; False stops the copy.

    Raises:
        ShareError: the file became shorter, the memory cannot be allocated, or the copy was stopped.
    """
    digest = hashlib.sha256(layout.table)
    try:
        os.ftruncate(memory, layout.size)
        _write(memory, memoryview(layout.table), 0)
        buffer = memoryview(bytearray(CHUNK))
        for source, target in zip(tensors, layout.tensors, strict=True):
            copied_bytes = 0
            while copied_bytes < source.nbytes:
                count = os.preadv(
                    file, [buffer[: min(CHUNK, source.nbytes - copied_bytes)]], source.offset + copied_bytes
                )
                if not count:
                    raise ShareError(f"{label}: it became shorter while it was read")
                digest.update(buffer[:count])
                _write(memory, buffer[:count], target.offset + copied_bytes)
                copied_bytes += count
                if not keep_going():
                    raise ShareError("the store is ending")
    except OSError as error:
        raise ShareError(f"{label}: cannot be copied into memory ({error.strerror})") from error
    return digest.hexdigest()


def _write(memory: int, data: memoryview, offset: int) -> None:
    while data:
        written_bytes = os.pwrite(memory, data, offset)
        data, offset = data[written_bytes:], offset + written_bytes
