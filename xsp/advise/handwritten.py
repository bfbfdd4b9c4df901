"""Functions that the program writes out in several operators where PyTorch has one: normalisation, GELU, softmax; and
losses of many operators, which could be one pass over the values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xsp import account
from xsp.account import places
from xsp.account.entries import OUTSIDE
from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind

LEAST_PERCENT = 2.0
"""Minimum percentage of the step that writing out a function has to cost to be worth a line."""


@dataclass(frozen=True)
class Function:
    """A function of PyTorch, and the sequences of operators that compute the same."""

    name: str
    remedy: str
    pattern: re.Pattern[str]
    """Pattern for the names of consecutive operators, each followed by a space."""


def _function(name: str, do: str, *sequences: str) -> Function:
    alternatives = "|".join(f"(?:{sequence}) " for sequence in sequences)
    return Function(name, do, re.compile(rf"(?<![^ ])(?:{alternatives})"))


_SQUARE = "(?:pow|square|mul)"
FUNCTIONS: Sequence[Function] = (  # rms_norm and logsumexp are no faster on a CPU than the operators they replace
    _function(
        "normalisation",
        "torch.nn.functional.layer_norm, with the weight and the bias as its arguments",
        f"mean sub (?:sub )?{_SQUARE} mean (?:sub )?add (?:sqrt div|rsqrt mul)(?: mul)?(?: add)?",
        "mean (?:var|std) (?:sub add|add sub|sub)(?: sqrt| rsqrt)? (?:div|mul)(?: mul)?(?: add)?",
        "mean sub (?:var|std) (?:add )?(?:sqrt |rsqrt )?(?:div|mul)(?: mul)?(?: add)?",
    ),
    _function(
        "GELU",
        'torch.nn.functional.gelu(x, approximate="tanh")',
        "(?:mul )?pow mul add mul tanh add mul(?: mul)?",
        "(?:mul )?mul mul mul add mul tanh add mul(?: mul)?",
    ),
    _function("GELU", "torch.nn.functional.gelu(x)", "(?:mul )?(?:div|mul) erf add mul(?: mul)?"),
    _function(
        "softmax", "torch.softmax(x, dim)", "(?:max|amax) sub exp sum div", "exp sum div"
    ),
    _function("the logarithm of softmax", "torch.log_softmax(x, dim), which also rounds less", "softmax log"),
    _function("softplus", "torch.nn.functional.softplus(x)", "exp add log", "exp log1p"),
)  # fmt: skip


@question(
    "written-out",
    "Which functions are composed of operators, where PyTorch has a single one?",
    number="Q5",
    shapes=True,
)
def written_out(context: AdviceContext) -> Iterator[Advice]:
    """Consecutive operators in a module, or in the step, that compute a known function.

    Each of them reads and writes all values, where one operator does it once: the gain is at most the time of all but
    the longest. Order and shapes identify them: the operators are of one tensor, or of a reduction of it.
    """
    step_ms = calls.step_ms(context)
    chains_by_function: dict[Function, list[list[HostCall]]] = {}
    for parent in calls.walk(context):
        if parent.is_op or parent.kind == Kind.BACKWARD or parent.phase in ("backward", "optimizer"):
            continue
        for function, chain in _written_functions(parent):
            chains_by_function.setdefault(function, []).append(chain)
    for function, chains in chains_by_function.items():
        groups = [*chains, *(nodes for chain in chains if (nodes := calls.gradients(context, chain)))]
        all_ops = [op for chain in groups for op in chain]
        longest = [max(chain, key=lambda op: op.ns) for chain in groups]
        ms = sum(op.ns for op in all_ops) / 1e6
        gain = ms - sum(op.ns for op in longest) / 1e6
        if gain < calls.LEAST_MS or 100 * gain / step_ms < LEAST_PERCENT:
            continue
        redundant = set(all_ops) - set(longest)
        parts = [op for op in all_ops if op in redundant]
        names = ", ".join(op.name.removeprefix("aten::") for op in chains[0])
        yield Advice(
            "written-out",
            f"{function.name} is composed of {len(chains[0])} operators"
            + (f", {len(chains)} times in a step" if len(chains) > 1 else ""),
            calls.places([op for chain in chains for op in chain]),
            calls.interval(gain, calls.interval_factors(context, parts)).limit(step_ms),
            True,
            100 * gain / step_ms,
            (
                f"{names}{' and their gradients' * (len(groups) > len(chains))} take {ms:.3g} ms; each but one of them "
                "reads and writes memory that a single operator would not",
                "inferred from the order of calls: valid if each takes the result of those before it",
            ),
            f"{function.remedy}; results differ by rounding",
        )


LEAST_LOSS_PERCENT = 10.0
"""Minimum percentage of the step that a loss of many operators has to cost to be worth a line."""

FEWEST_LOSS_OPS = 5
"""Fewest operators of a loss that each read all of its values."""

LEAST_LOSS_US = 50.0
"""Least mean microseconds of one of them: of shorter ones, most of the time is not that of memory."""


@question("loss", "Is a loss composed of many operators that each read all values?", number="Q5", shapes=True)
def loss(context: AdviceContext) -> Iterator[Advice]:
    """Operators outside modules, or after the last product before a backward pass, on tensors of one size, that have
    gradients: a loss that is written out, wherever the program computes it.

    Each of them, and its gradient, reads and writes all values, where a fused function does so once: the gain is at
    most the time of all but the longest in both directions. Products, convolutions and norms are no part of it.
    """
    step_ms = calls.step_ms(context)
    ops = loss_ops(context)
    nodes = calls.gradients(context, ops)
    all_ops = [*ops, *nodes]
    if len(ops) < FEWEST_LOSS_OPS or sum(op.ns for op in ops) < 1e3 * LEAST_LOSS_US * len(ops):
        return
    longest = [max(group, key=lambda op: op.ns) for group in (ops, nodes)]
    ms = sum(op.ns for op in all_ops) / 1e6
    gain = ms - sum(op.ns for op in longest) / 1e6
    if gain < calls.LEAST_MS or 100 * ms / step_ms < LEAST_LOSS_PERCENT:
        return
    where = _place_of_loss(context, ops)
    parts = [op for op in all_ops if op not in longest]
    sizes = "×".join(map(str, max((op.first_shape or () for op in ops), key=math.prod)))
    yield Advice(
        "loss",
        f"a loss is composed of {len(ops)} operators on tensors of {sizes}{where}: with their gradients "
        f"{ms:.3g} ms of a step",
        calls.places(ops),
        calls.interval(gain, calls.interval_factors(context, parts)).limit(step_ms),
        True,
        100 * gain / step_ms,
        (
            ", ".join(dict.fromkeys(op.stem for op in ops)) + "; each reads and writes all values",
            "inferred from the gradients of operators that no product follows before the backward pass",
        ),
        "a fused function if one computes the same (torch.nn.functional.cross_entropy, also with label_smoothing=…; "
        f"binary_cross_entropy_with_logits), else torch.compile of the function{where}; results differ by rounding",
    )


def _place_of_loss(context: AdviceContext, ops: Sequence[HostCall]) -> str:
    """Return ` in MODULE` or ` at FILE:LINE` for where most of the time of a loss passes; empty if unknown."""
    ns_by_module: dict[str | None, float] = {}
    for op in ops:
        ns_by_module[op.module] = ns_by_module.get(op.module, 0.0) + op.ns
    module = max(ns_by_module, key=lambda name: ns_by_module[name])
    if module is not None:
        return f" in {module}"
    main = account.of(context.required_trace).job
    lines = places.lines_of(context.required_trace, main, OUTSIDE) if main is not None else None
    return f" at {lines.place}" if lines is not None else ""


_PRODUCTS = re.compile(
    r"(\w*mm|\w*matmul|linear|bilinear|einsum|\w*conv\w*|\w*attention\w*|embedding|cdist|svd|linalg_\w+|lstm|gru"
    r"|rnn_\w+|(\w+_)?(batch|layer|group|instance|rms)_norm)"
)


def loss_ops(context: AdviceContext) -> list[HostCall]:
    """Return the operators of losses: those with gradients that read all values of the largest tensor among them.

    What a model computes ends with a product, a convolution or a norm, so operators between the last of these and a
    backward pass are a loss, in whatever module they are. So are all operators outside modules if none of them is a
    product, as of several losses; else they are a model that is written without modules.

    Raises:
        AnalysisError: see `xsp.advise.calls.roots`.
    """
    numbers = {
        node.sequence_nr for call in calls.walk(context) if call.kind == Kind.BACKWARD for node in call.children
    } - {None}
    outside: list[HostCall] = []
    last: list[HostCall] = []
    since_product: list[HostCall] = []
    has_products = False
    for call in calls.walk(context):
        if call.kind == Kind.BACKWARD:
            last += since_product
            since_product = []
        if not call.is_outer_op or not call.computes or call.phase in ("backward", "optimizer"):
            continue
        if not any(inner.sequence_nr in numbers for inner in call.walk()):
            continue
        is_outside = call.module is None and call.phase != "forward"
        if _PRODUCTS.fullmatch(call.stem):
            since_product = []
            has_products |= is_outside
            continue
        since_product.append(call)
        if is_outside:
            outside.append(call)
    ops = [*dict.fromkeys([*last, *(outside if not has_products else ())])]
    most = max((math.prod(op.first_shape or ()) for op in ops), default=0)
    return [op for op in ops if op.first_shape is not None and math.prod(op.first_shape) == most]


def _written_functions(parent: HostCall) -> Iterator[tuple[Function, list[HostCall]]]:
    """Yield the functions that a call writes out, with their operators; no operator is part of two functions."""
    children = [child for child in parent.children if child.computes]
    names = [child.stem if child.is_op else "-" for child in children]
    text = "".join(f"{name} " for name in names)
    used_positions: set[int] = set()
    for function in FUNCTIONS:
        for match in function.pattern.finditer(text):
            start = text.count(" ", 0, match.start())
            positions = range(start, start + match.group().count(" "))
            ops = [children[index] for index in positions]
            if not used_positions & set(positions) and _is_of_one_tensor(ops):
                used_positions |= set(positions)
                yield function, ops


def _is_of_one_tensor(ops: Sequence[HostCall]) -> bool:
    """Return whether each first input has the shape of the largest one, or of a reduction of it."""
    sizes = [op.first_shape for op in ops if op.first_shape is not None]
    if len(sizes) < len(ops) / 2:
        return False
    rank = max(map(len, sizes))
    full = max((size for size in sizes if len(size) == rank), key=lambda size: [*map(int, size)])
    return all(_is_reduced(size, full) for size in sizes)


def _is_reduced(size: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Return whether a shape equals another one, or is that shape with some axes reduced to 1 or removed."""
    if len(size) == len(full):
        return all(axis in (1, full_axis) for axis, full_axis in zip(size, full, strict=True))
    full_axes = iter(full)
    return all(any(axis == full_axis for full_axis in full_axes) for axis in size)
