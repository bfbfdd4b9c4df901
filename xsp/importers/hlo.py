"""FLOPs of the operators of a compiled program, from its HLO, which XLA's profiler puts into the file.

Matrix products and convolutions count, also inside fusions and in calls of libraries; a multiply-add is 2. Loops and
branches have no FLOPs, because how often they run is not in the program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xsp.importers.protobuf import NUMBER, message, numbers, text
from xsp.stats import known_sum

_MAX_DEPTH = 20
_MAX_FLOPS = 1 << 62
_UNKNOWN = frozenset({"while", "conditional"})
_GEMM = ("__cublas$", "__triton_gemm", "__onednn$matmul")
"""Beginnings of the names of library calls that are matrix products."""


@dataclass
class _Instruction:
    name: str = ""
    opcode: str = ""
    target: str = ""
    number: int = 0
    dims: tuple[int, ...] = ()
    contracted: tuple[int, ...] = ()
    """Contracted dimensions of the first operand."""

    output_feature: int | None = None
    """Dimension of a convolution's kernel that is the output's feature."""

    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()


@dataclass
class _Program:
    computations: dict[int, list[_Instruction]] = field(default_factory=dict)
    known: dict[int, int | None] = field(default_factory=dict)


def flops_of(data: bytes, low: int, high: int) -> Iterator[tuple[str, int]]:
    """Yield the operators of a program that multiply, with their FLOPs.

    Args:
        data: a file.
        low: start of the program's `HloProto` in it.
        high: its end.

    Raises:
        WireError: it is damaged.
    """
    program = _Program()
    for number, start, end in message(data, low, high):
        if number != 1:
            continue
        for part, first, last in message(data, start, end):
            if part == 3:
                identity, instructions = _computation(data, first, last)
                program.computations[identity] = instructions
    for instructions in program.computations.values():
        shapes = {each.number: each.dims for each in instructions}
        for each in instructions:
            flops = _flops(program, each, shapes, 0)
            if flops and flops < _MAX_FLOPS:
                yield each.name, flops


def _computation(data: bytes, low: int, high: int) -> tuple[int, list[_Instruction]]:
    identity, instructions = 0, []
    for number, start, end in message(data, low, high):
        if number == 2:
            instructions.append(_instruction(data, start, end))
        elif number == 5:
            identity = start
    return identity, instructions


def _instruction(data: bytes, low: int, high: int) -> _Instruction:
    made = _Instruction()
    settings = b""
    for number, start, end in message(data, low, high):
        if number == 1:
            made.name = text(data, start, end)
        elif number == 2:
            made.opcode = text(data, start, end)
        elif number == 28:
            made.target = text(data, start, end)
        elif number == 3:
            made.dims = _dims(data, start, end)
        elif number == 35:
            made.number = start
        elif number == 36:
            made.operands += tuple(numbers(data, start, end))
        elif number == 38:
            made.called += tuple(numbers(data, start, end))
        elif number == 30:
            made.contracted = tuple(
                each
                for part, first, last in message(data, start, end)
                if part == 1
                for each in numbers(data, first, last)
            )
        elif number == 16:
            features = [first for part, first, last in message(data, start, end) if part == 4 and last == NUMBER]
            made.output_feature = features[0] if features else 0
        elif number == 43 and end != NUMBER:
            settings = data[start:end]
    if made.opcode == "custom-call" and made.target.startswith(_GEMM):
        made.contracted = _contracted(settings)
    return made


def _dims(data: bytes, low: int, high: int) -> tuple[int, ...]:
    """Return the sizes of a shape; of a tuple those of its first element."""
    dims: tuple[int, ...] = ()
    for number, start, end in message(data, low, high):
        if number == 3:
            dims += tuple(numbers(data, start, end))
        elif number == 4 and not dims:
            dims = tuple(
                each
                for part, first, last in message(data, start, end)
                if part == 3
                for each in numbers(data, first, last)
            )
    return dims


def _contracted(settings: bytes) -> tuple[int, ...]:
    """Return the contracted dimensions that a library call of a matrix product states in its configuration."""
    try:
        found: Any = json.loads(settings)
        found = found.get("gemm_backend_config", found)["dot_dimension_numbers"]["lhs_contracting_dimensions"]
        return tuple(int(each) for each in found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _flops(program: _Program, each: _Instruction, shapes: dict[int, tuple[int, ...]], depth: int) -> int | None:
    """Return the FLOPs of an instruction with those that it calls; None if they are not known."""
    if each.opcode in _UNKNOWN or depth > _MAX_DEPTH:
        return None
    if each.contracted and each.operands:
        left = shapes.get(each.operands[0], ())
        if max(each.contracted) >= len(left):
            return None
        return 2 * math.prod(each.dims) * math.prod(left[dim] for dim in each.contracted)
    if each.opcode == "convolution" and each.output_feature is not None and len(each.operands) > 1:
        kernel = shapes.get(each.operands[1], ())
        if each.output_feature >= len(kernel) or not kernel[each.output_feature]:
            return None
        return 2 * math.prod(each.dims) * math.prod(kernel) // kernel[each.output_feature]
    total = 0
    for called in each.called:
        if called not in program.known:
            program.known[called] = None  # until it is known: a program that calls itself has no FLOPs
            inner = program.computations.get(called, [])
            inner_shapes = {other.number: other.dims for other in inner}
            program.known[called] = known_sum(_flops(program, other, inner_shapes, depth + 1) for other in inner)
        flops = program.known[called]
        if flops is None:
            return None
        total += flops
    return total
