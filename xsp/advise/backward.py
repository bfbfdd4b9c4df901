"""Unnecessary work in a backward pass: gradients that no optimizer applies, recomputed layers, checks for NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, Asked, Interval, Place
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Kind, Level

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The node that accumulates a gradient into a parameter's; the shape of its input is the parameter's."""

LEAST_CHECKS = 4

Shape = tuple[int, ...]


@question("unused-gradients", "Are gradients computed that no optimizer uses?", number="Q4")
def unused_gradients(asked: Asked) -> Iterator[Advice]:
    """Gradients of parameters that the step's optimizer does not update, as of a backbone that was meant to be frozen.

    Parameters are identified by their shapes. The part of the last backward pass after the last gradient that the
    optimizer applies counts; without that part the optimizer still gets all the gradients that it applies.
    """
    whole = calls.step_ms(asked)
    for step in (each for each in calls.every(asked) if each.kind == Kind.STEP):
        inside = list(step.every())
        updated = _updated([each for each in inside if each.kind == Kind.OPTIMIZER])
        passes = [each for each in inside if each.kind == Kind.BACKWARD]
        if not updated or not passes:
            continue
        last = passes[-1]
        inputs = {each.first_shape for each in inside if each.level == Level.LAYER}  # inputs may have gradients, too
        leaves = [each for each in last.every() if each.name == ACCUMULATE and each.first_shape not in (None, *inputs)]
        needed, unused, is_certain = _needed(leaves, updated)
        if not needed or not unused:
            continue
        end = max(each.end_ns for each in needed)
        behind = [each for each in last.inside if each.start_ns >= end]
        ms = sum(each.ns for each in behind) / 1e6
        if ms < calls.LEAST_MS:
            continue
        yield Advice(
            "unused-gradients",
            f"the backward pass computes gradients of {len(leaves)} parameters, the optimizer updates {len(needed)}",
            (Place(None, "backward", tuple(each.span_id for each in unused[:MOST_SPANS]), len(unused)),),
            calls.interval(ms, calls.ends(asked, behind)).within(min(whole, last.ns / 1e6)),
            not is_certain,
            100 * ms / whole,
            (
                f"{ms:.3g} ms of the backward pass come after the last gradient that is used",
                "parameters are identified by their shapes"
                + ("" if is_certain else "; some used and unused ones have the same shape"),
            ),
            "parameter.requires_grad_(False) for what is not trained, before the first step; or give the optimizer all "
            "parameters, if they should be trained",
        )


def _updated(optimizers: Sequence[Call]) -> Counter[Shape]:
    """Return how many parameters of each shape the optimizers update.

    The in-place operator that writes to tensors of the most shapes is counted, and among several such operators the one
    that writes to the fewest tensors: others also write to state, or only to the parameters of one group.
    """
    by_op: dict[str, Counter[Shape]] = {}
    for each in (inner for one in optimizers for inner in one.every() if inner.is_op):
        if not each.name.endswith("_") or not each.shapes:
            continue
        first = each.shapes[0]
        tensors = first if isinstance(first, list) and first and isinstance(first[0], list) else [first]
        for shape in tensors:
            if isinstance(shape, list) and shape and all(type(size) is int for size in shape):
                by_op.setdefault(each.name, Counter())[tuple(shape)] += 1
    return max(by_op.values(), key=lambda counted: (len(counted), -counted.total()), default=Counter())


def _needed(leaves: Sequence[Call], updated: Counter[Shape]) -> tuple[list[Call], list[Call], bool]:
    """Return the gradients that are applied, the gradients that are not, and whether the two have no shape in common.

    Of several gradients of one shape the first ones are taken as applied: where only some layers are trained, they are
    the last ones, whose gradients come first.
    """
    left = Counter(updated)
    needed: list[Call] = []
    unused: list[Call] = []
    for each in leaves:
        assert each.first_shape is not None
        (needed if left[each.first_shape] > 0 else unused).append(each)
        left[each.first_shape] -= 1
    return needed, unused, {each.first_shape for each in needed}.isdisjoint(each.first_shape for each in unused)


@question("recomputation", "Are layers computed again in the backward pass?", number="Q4")
def recomputation(asked: Asked) -> Iterator[Advice]:
    """Activation checkpointing: modules that run a second time in the backward pass to save memory."""
    whole = calls.step_ms(asked)
    again = [each for root in calls.of(asked) for each in _again(root, False)]
    ms = sum(each.ns for each in again) / 1e6
    if ms < calls.LEAST_MS:
        return
    names = list(dict.fromkeys(each.name for each in again))
    said = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    yield Advice(
        "recomputation",
        f"{len(again)} calls of modules run again in the backward pass ({said})",
        calls.places(again),
        calls.interval(ms, calls.ends(asked, again)).within(whole),
        False,
        100 * ms / whole,
        (f"activation checkpointing computes them twice: {ms:.3g} ms of a step",),
        "do not use torch.utils.checkpoint (gradient_checkpointing in libraries) for as many layers as have room for "
        "their activations in memory; results stay the same",
    )


def _again(call: Call, in_backward: bool) -> Iterator[Call]:
    """Yield the outermost modules that an operator of a backward pass calls."""
    if in_backward and call.level == Level.LAYER:
        yield call
        return
    in_backward = in_backward or (call.is_op and "Backward" in call.name)
    for each in call.inside:
        yield from _again(each, in_backward)


STACK_US = (20.0, 60.0, 120.0)
"""Microseconds to record the Python stack of an operator; 20 µs plus 1.6 µs per frame were measured."""


@question("anomaly-detection", "Is each gradient checked for NaN?", number="Q4")
def anomaly_detection(asked: Asked) -> Iterator[Advice]:
    """Checks for NaN within the backward pass: autograd's anomaly detection, which is for debugging.

    The gain is the time of the checks, plus the time that each operator recorded for gradients takes to record the
    Python stack of its call.
    """
    whole = calls.step_ms(asked)
    passes = [each for each in calls.every(asked) if each.kind == Kind.BACKWARD]
    checks = [each for one in passes for each in one.every() if each.name == "aten::isnan"]
    answers = [each for one in passes for each in one.every() if each.name == "aten::_is_any_true"]
    ms = sum(each.ns for each in (*checks, *answers)) / 1e6
    if len(checks) < LEAST_CHECKS or ms < calls.LEAST_MS:
        return
    noted = {each.sequence_nr for each in calls.every(asked) if each.is_op and each.sequence_nr is not None}
    low, value, high = (cost * len(noted) / 1e3 for cost in STACK_US)
    checked = calls.interval(ms, calls.ends(asked, [*checks, *answers]))
    yield Advice(
        "anomaly-detection",
        f"{len(checks)} gradients are checked for NaN in a backward pass: torch.autograd's anomaly detection, or hooks",
        (Place(None, "aten::isnan", tuple(each.span_id for each in checks[:MOST_SPANS]), len(checks)),),
        Interval(checked.low + low, ms + value, checked.high + high).within(whole),
        False,
        100 * min(whole, ms + value) / whole,
        (
            f"the checks take {ms:.3g} ms of a step",
            f"{len(noted)} operators of the forward pass record where they were called: {STACK_US[0]:g} to "
            f"{STACK_US[-1]:g} µs each, depending on the depth of the stack",
        ),
        "torch.autograd.set_detect_anomaly(False), or remove the hooks; switch them on when a loss is NaN",
    )
