"""Unnecessary work in a backward pass: gradients that no optimizer applies, recomputed layers, checks for NaN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.device import is_training
from xsp.advise.registry import question
from xsp.schema import Kind, Level
from xsp.stats import Interval

ACCUMULATE_NODE = "torch::autograd::AccumulateGrad"
"""The node that accumulates a gradient into a parameter's; the shape of its input is the parameter's."""

LEAST_CHECKS = 4

Shape = tuple[int, ...]


LEAST_NODES = 4
"""Minimum number of operators recorded for gradients for them not to be accidental."""


def unused_recordings(context: AdviceContext) -> list[HostCall]:
    """Return the operators that a step without a backward pass records for gradients; empty if it records none.

    While gradients are recorded, each such operator has a new sequence number.
    """
    trace = context.required_trace
    if is_training(trace) or not trace.has(Level.OP):
        return []
    by_number: dict[int, HostCall] = {}
    for call in calls.walk(context):
        if call.kind in (Kind.BACKWARD, Kind.OPTIMIZER) or call.phase == "backward":
            return []
        if call.is_op and call.sequence_nr is not None:
            by_number.setdefault(call.sequence_nr, call)
    return list(by_number.values()) if len(by_number) >= LEAST_NODES else []


@question("unused-gradients", "Are gradients computed that no optimizer uses?", number="Q4", shapes=True)
def unused_gradients(context: AdviceContext) -> Iterator[Advice]:
    """Gradients of parameters that the step's optimizer does not update, as of a backbone that was meant to be frozen.

    Parameters are identified by their shapes. The part of the last backward pass after the last gradient that the
    optimizer applies counts; without that part the optimizer still gets all the gradients that it applies.
    """
    step_ms = calls.step_ms(context)
    for step in (call for call in calls.walk(context) if call.kind == Kind.STEP):
        step_calls = list(step.walk())
        updated_shapes = _updates_by_shape([call for call in step_calls if call.kind == Kind.OPTIMIZER])
        passes = [call for call in step_calls if call.kind == Kind.BACKWARD]
        if not updated_shapes or not passes:
            continue
        last_pass = passes[-1]
        # inputs may have gradients, too
        inputs = {call.first_shape for call in step_calls if call.level == Level.LAYER}
        leaves = [
            call
            for call in last_pass.walk()
            if call.name == ACCUMULATE_NODE and call.first_shape not in (None, *inputs)
        ]
        applied, unused, is_certain = _split_by_use(leaves, updated_shapes)
        if not applied or not unused:
            continue
        end = max(call.end_ns for call in applied)
        tail = [call for call in last_pass.children if call.start_ns >= end]
        ms = sum(call.ns for call in tail) / 1e6
        if ms < calls.LEAST_MS:
            continue
        yield Advice(
            "unused-gradients",
            f"the backward pass computes gradients of {len(leaves)} parameters, the optimizer updates {len(applied)}",
            (Place(None, "backward", tuple(call.span_id for call in unused[:MOST_SPANS]), len(unused)),),
            calls.interval(ms, calls.interval_factors(context, tail)).limit(min(step_ms, last_pass.ns / 1e6)),
            not is_certain,
            100 * ms / step_ms,
            (
                f"{ms:.3g} ms of the backward pass come after the last gradient that is used",
                "parameters are identified by their shapes"
                + ("" if is_certain else "; some used and unused ones have the same shape"),
            ),
            "parameter.requires_grad_(False) for what is not trained, before the first step; .detach() of what comes "
            "from a model that is not trained in this step, as a generator's samples; or give the optimizer all "
            "parameters, if they should be trained",
        )


def _updates_by_shape(optimizers: Sequence[HostCall]) -> Counter[Shape]:
    """Return how many parameters of each shape the optimizers update.

    The in-place operator that writes to tensors of the most shapes is counted, and among several such operators the one
    that writes to the fewest tensors: others also write to state, or only to the parameters of one group.
    """
    by_op: dict[str, Counter[Shape]] = {}
    for op in (inner for optimizer in optimizers for inner in optimizer.walk() if inner.is_op):
        if not op.name.endswith("_") or not op.shapes:
            continue
        argument = op.shapes[0]
        tensors = argument if isinstance(argument, list) and argument and isinstance(argument[0], list) else [argument]
        for shape in map(calls.tensor_shape, tensors):
            if shape is not None:
                by_op.setdefault(op.name, Counter())[shape] += 1
    return max(by_op.values(), key=lambda counts: (len(counts), -counts.total()), default=Counter())


def _split_by_use(
    leaves: Sequence[HostCall], updated_shapes: Counter[Shape]
) -> tuple[list[HostCall], list[HostCall], bool]:
    """Return the gradients that are applied, the gradients that are not, and whether the two have no shape in common.

    Of several gradients of one shape the first ones are taken as applied: where only some layers are trained, they are
    the last ones, whose gradients come first.
    """
    remaining = Counter(updated_shapes)
    applied: list[HostCall] = []
    unused: list[HostCall] = []
    for leaf in leaves:
        assert leaf.first_shape is not None
        (applied if remaining[leaf.first_shape] > 0 else unused).append(leaf)
        remaining[leaf.first_shape] -= 1
    return applied, unused, {leaf.first_shape for leaf in applied}.isdisjoint(leaf.first_shape for leaf in unused)


@question("recomputation", "Are layers computed again in the backward pass?", number="Q4")
def recomputation(context: AdviceContext) -> Iterator[Advice]:
    """Activation checkpointing: modules that run a second time in the backward pass to save memory."""
    step_ms = calls.step_ms(context)
    modules = [module for root in calls.roots(context) for module in _recomputed_modules(root, False)]
    ms = sum(module.ns for module in modules) / 1e6
    if ms < calls.LEAST_MS:
        return
    names = list(dict.fromkeys(module.name for module in modules))
    listing = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    yield Advice(
        "recomputation",
        f"{len(modules)} calls of modules run again in the backward pass ({listing})",
        calls.places(modules),
        calls.interval(ms, calls.interval_factors(context, modules)).limit(step_ms),
        False,
        100 * ms / step_ms,
        (f"activation checkpointing computes them twice: {ms:.3g} ms of a step",),
        "do not use torch.utils.checkpoint (gradient_checkpointing in libraries) for as many layers as have room for "
        "their activations in memory; results stay the same",
    )


def _recomputed_modules(call: HostCall, in_backward: bool) -> Iterator[HostCall]:
    """Yield the outermost modules that an operator of a backward pass calls."""
    if in_backward and call.level == Level.LAYER:
        yield call
        return
    in_backward = in_backward or (call.is_op and "Backward" in call.name)
    for child in call.children:
        yield from _recomputed_modules(child, in_backward)


STACK_US = (20.0, 60.0, 120.0)
"""Microseconds to record the Python stack of an operator; 20 µs plus 1.6 µs per frame were measured."""


@question("anomaly-detection", "Is each gradient checked for NaN?", number="Q4")
def anomaly_detection(context: AdviceContext) -> Iterator[Advice]:
    """Checks for NaN within the backward pass: autograd's anomaly detection, which is for debugging.

    The gain is the time of the checks, plus the time that each operator recorded for gradients takes to record the
    Python stack of its call.
    """
    step_ms = calls.step_ms(context)
    passes = [call for call in calls.walk(context) if call.kind == Kind.BACKWARD]
    checks = [call for backward in passes for call in backward.walk() if call.name == "aten::isnan"]
    any_true_calls = [call for backward in passes for call in backward.walk() if call.name == "aten::_is_any_true"]
    ms = sum(call.ns for call in (*checks, *any_true_calls)) / 1e6
    if len(checks) < LEAST_CHECKS or ms < calls.LEAST_MS:
        return
    sequence_numbers = {call.sequence_nr for call in calls.walk(context) if call.is_op and call.sequence_nr is not None}
    low, value, high = (cost * len(sequence_numbers) / 1e3 for cost in STACK_US)
    check_time = calls.interval(ms, calls.interval_factors(context, [*checks, *any_true_calls]))
    yield Advice(
        "anomaly-detection",
        f"{len(checks)} gradients are checked for NaN in a backward pass: torch.autograd's anomaly detection, or hooks",
        (Place(None, "aten::isnan", tuple(call.span_id for call in checks[:MOST_SPANS]), len(checks)),),
        Interval(check_time.low + low, ms + value, check_time.high + high).limit(step_ms),
        False,
        100 * min(step_ms, ms + value) / step_ms,
        (
            f"the checks take {ms:.3g} ms of a step",
            f"{len(sequence_numbers)} operators of the forward pass record where they were called: {STACK_US[0]:g} to "
            f"{STACK_US[-1]:g} µs each, depending on the depth of the stack",
        ),
        "torch.autograd.set_detect_anomaly(False), or remove the hooks; switch them on when a loss is NaN",
    )
