"""What Kineto tells of a launch becomes attributes; the text is as its CUPTI activities write it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from xsp_collectors.torchops import attributes

KERNEL = """
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": 12,
      "registers per thread": 40,
      "shared memory": 1024,
      "blocks per SM": "inf",
      "warps per SM": 4.5,
      "grid": [8, 2, 1],
      "block": [128, 1, 1],
      "est. achieved occupancy %": 3{}"""
LAUNCH = {"grid": [8, 2, 1], "block": [128, 1, 1], "registers": 40, "shared_bytes": 1024, "context": 1}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (KERNEL.format(""), LAUNCH),
        (KERNEL.format(',\n"graph id": 0, "graph node id": 0'), LAUNCH),
        (KERNEL.format(',\n"graph id": 3, "graph node id": 9'), LAUNCH | {"graph": True, "graph_node": 9}),
        ('"device": 0, "context": 1, "bytes": 64, "memory bandwidth (GB/s)": 1.5', {"context": 1, "bytes": 64}),
    ],
)
def test_what_is_told_becomes_attributes(told: str, expected: dict[str, object]) -> None:
    assert json.loads(attributes(SimpleNamespace(metadata_json=lambda: told)) or "") == expected


@pytest.mark.parametrize("told", ["", '"grid": [8', '"device": 0'])
def test_what_says_nothing_is_left_out(told: str) -> None:
    assert attributes(SimpleNamespace(metadata_json=lambda: told)) is None


def test_an_older_torch_tells_nothing() -> None:
    assert attributes(SimpleNamespace()) is None
