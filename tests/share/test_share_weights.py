"""Files of weights, whole and hostile."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from xsp.errors import ShareError
from xsp.share import weights


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def read(path: Path) -> list[weights.StoredTensor]:
    file = os.open(path, os.O_RDONLY)
    try:
        return weights.read_header(file, path.name)
    finally:
        os.close(file)


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changed}


def test_tensors_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"__metadata__": {"a": "b"}, "z": entry(), "y": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}}
    path = written(tmp_path / "m", header, bytes(32))
    assert [(each.name, each.shape, each.nbytes) for each in read(path)] == [("z", (2, 3), 24), ("y", (), 8)]


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry()}, bytes(23), "truncated"),
        ({"a": entry()}, bytes(25), "truncated or damaged"),
        ({"a": entry(data_offsets=[1, 25])}, bytes(25), "overlap others or leave a gap"),
        ({"a": entry(), "b": entry()}, bytes(24), "overlap"),
        ({"a": entry(data_offsets=[24, 0])}, bytes(24), "bytes"),
        ({"a": entry(data_offsets=[-24, 0])}, bytes(24), "data_offsets"),
        ({"a": entry(data_offsets=[0, 24, 48])}, bytes(24), "data_offsets"),
        ({"a": entry(data_offsets=[0, 24.0])}, bytes(24), "data_offsets"),
        ({"a": entry(data_offsets=[0, 1 << 80])}, bytes(24), "data_offsets"),
        ({"a": entry(shape=[1 << 61, 1 << 61])}, bytes(24), "do not match its shape"),
        ({"a": entry(shape=[-2, -3])}, bytes(24), "shape"),
        ({"a": entry(shape=[True, 6])}, bytes(24), "shape"),
        ({"a": entry(shape="23")}, bytes(24), "shape"),
        ({"a": entry(dtype="F4")}, bytes(24), "type F4 is not known"),
        ({"a": entry(dtype=["F32"])}, bytes(24), "not known"),
        ({"a": entry(more=1)}, bytes(24), "must have"),
        ({"a": 3}, bytes(24), "must have"),
        (b'{"a":{},"a":{}}', b"", "twice"),
        (b'{"a":', b"", "cannot be read"),
        (b'{"a":\xff\xfe}', b"", "cannot be read"),
        (b'{"a":' * 100_000, b"", "cannot be read"),
    ],
)
def test_a_header_that_does_not_hold_together_is_refused(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    with pytest.raises(ShareError, match=says) as caught:
        read(written(tmp_path / "m.safetensors", header, data))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_length_that_the_file_does_not_have_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b'{"a":1}')
    with pytest.raises(ShareError, match="truncated or damaged"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"x", b"GGUF" + bytes(100)])
def test_another_form_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(content)
    with pytest.raises(ShareError, match="not a safetensors file"):
        read(path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "m.pt"
    path.write_bytes(pickle.dumps(Runs(), protocol))
    with pytest.raises(ShareError, match=r"pickle.*save_file"):
        read(path)
    assert not (tmp_path / "ran").exists()


def test_damage_anywhere_is_refused_or_read_as_tensors_inside_the_file(tmp_path: Path) -> None:
    header = {f"t{at}": entry(data_offsets=[24 * at, 24 * at + 24]) for at in range(5)}
    whole = written(tmp_path / "m", header, bytes(120)).read_bytes()
    drawn = random.Random(19)
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(drawn.randint(1, 4)):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        path = tmp_path / "d"
        path.write_bytes(content[: drawn.choice([len(content), drawn.randrange(len(content))])])
        try:
            found = read(path)
        except ShareError:
            continue
        assert all(each.offset + each.nbytes <= path.stat().st_size for each in found)


def test_tensors_lie_in_memory_where_torch_would_have_put_them() -> None:
    tensors = [weights.StoredTensor("a", "U8", (3,), 11, 3), weights.StoredTensor("b", "F64", (1,), 14, 8)]
    layout = weights.memory_layout(tensors)
    assert [each.offset % weights.ALIGNMENT for each in layout.tensors] == [0, 0]
    assert weights.read_table(layout.table) == layout.tensors
    with pytest.raises(ShareError, match="object that is not weights"):
        weights.read_table(bytes(4096))
