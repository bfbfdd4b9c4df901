"""FLOPs of the operators of a compiled program, from its HLO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wire import Plane, message, xspace

import xsp
from xsp.importers.hlo import flops_of
from xsp.importers.protobuf import WireError


def instruction(number: int, name: str, opcode: str, dims: list[int], *parts: tuple[int, Any]) -> bytes:
    shape = message((2, 11), (3, b"".join(bytes([dim]) for dim in dims)))  # packed, each less than 128
    return message((1, name), (2, opcode), (3, shape), (35, number), *parts)


def program(*computations: tuple[int, list[bytes]]) -> bytes:
    """Return an `HloProto` of computations: id and instructions."""
    return message(
        (1, message((1, "jit_f"), (3, [message((2, inner), (5, number)) for number, inner in computations])))
    )


def dot(number: int, name: str, operand: int) -> bytes:
    return instruction(number, name, "dot", [4, 5], (36, [operand, operand]), (30, message((1, b"\x01"))))


def flops(data: bytes) -> dict[str, int]:
    return dict(flops_of(data, 0, len(data)))


LEFT = instruction(1, "p", "parameter", [4, 3])


def test_products_count_twice_their_multiplications_also_in_fusions() -> None:
    entry = [instruction(9, "fusion.1", "fusion", [4, 5], (38, b"\x02")), instruction(8, "add", "add", [4, 5])]
    found = flops(program((2, [LEFT, dot(2, "dot.1", 1), dot(3, "dot.2", 1)]), (3, entry)))
    assert found == {"dot.1": 2 * 4 * 5 * 3, "dot.2": 2 * 4 * 5 * 3, "fusion.1": 2 * 2 * 4 * 5 * 3}


def test_convolutions_and_calls_of_libraries_count() -> None:
    kernel = instruction(2, "w", "parameter", [3, 3, 8, 16])
    convolution = instruction(3, "conv", "convolution", [1, 7, 7, 16], (36, [1, 2]), (16, message((3, 2), (4, 3))))
    settings = {"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
    gemm = instruction(4, "gemm", "custom-call", [4, 5], (36, [1, 1]), (28, "__cublas$gemm"),
                       (43, json.dumps(settings)))  # fmt: skip
    other = instruction(5, "rng", "custom-call", [4, 5], (28, "rng"), (43, "{"))
    assert flops(program((1, [LEFT, kernel, convolution, gemm, other]))) == {
        "conv": 2 * 7 * 7 * 16 * 3 * 3 * 8, "gemm": 2 * 4 * 5 * 3,
    }  # fmt: skip


def test_what_runs_an_unknown_number_of_times_has_none() -> None:
    loop = instruction(9, "while.1", "while", [4, 5], (38, b"\x02"))
    around = instruction(9, "call.1", "call", [4, 5], (38, b"\x03"))
    itself = instruction(9, "self", "call", [4, 5], (38, b"\x05"))
    found = flops(program((2, [LEFT, dot(2, "dot.1", 1)]), (3, [loop]), (4, [around]), (5, [itself])))
    assert found == {"dot.1": 120}


def test_shapes_that_do_not_fit_have_none() -> None:
    odd = instruction(3, "dot.9", "dot", [4, 5], (36, [77]), (30, message((1, b"\x05"))))
    assert flops(program((1, [LEFT, odd]))) == {}


def test_damage_is_an_error_with_its_place() -> None:
    whole = program((1, [LEFT, dot(2, "dot.1", 1)]))
    for end in range(1, len(whole)):
        with pytest.raises(WireError, match="byte"):
            flops(whole[:end])


def test_operators_of_the_host_have_the_flops_of_their_program(tmp_path: Path) -> None:
    made = program((1, [LEFT, dot(2, "dot.1", 1)]))
    metadata = Plane("/host:metadata")
    metadata._metadata("jit_f(17)", {"Hlo Proto": made})
    host = Plane("/host:CPU").line(
        1,
        "python",
        [{"name": name, "at": at, "dur": 5, "stats": {"hlo_op": name, "hlo_module": "jit_f"}}
         for at, name in ((10, "dot.1"), (20, "add"))],
    )  # fmt: skip
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(xspace(metadata, host))
    rows = xsp.load(path).sql("SELECT name, flops, flops_source FROM spans WHERE kind = 'op' ORDER BY start_ns")
    assert rows.fetchall() == [("dot.1", 120, "shapes"), ("add", None, None)]
