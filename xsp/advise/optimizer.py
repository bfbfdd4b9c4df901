"""Advice on optimizers that update parameters one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp import account
from xsp.account.entries import OPTIMIZER
from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind, Level
from xsp.stats import Interval
from xsp.store.selftimes import BOOKKEEPING

LEAST_PARAMETERS = 4

LEAST_PERCENT = 2.0
"""Minimum percentage of the step for an optimizer to be worth a line."""

PASS_SAVING = (0.3, 0.5, 0.65)
"""Share of the time that one pass saves (low, expected, high) if an update takes two or more operators per parameter.
Adam's operators read and write the parameter, its gradient and its state 18 times, one pass 7 times; SGD with momentum
8 and 5 times."""

WITHOUT_FUSED = ("LBFGS", "SparseAdam")
"""`torch.optim` optimizers without an implementation that updates all parameters in one call."""

LAUNCH_SAVING = (0.5, 0.8, 0.97)
"""Share of the host's time that one call for all parameters saves if it launches device work for each of them: a fused
optimizer launches a kernel for some hundred parameters."""

CALL_MS = (0.002, 0.005, 0.01)
"""Overhead of calling an operator from Python, in milliseconds; the gain where an update is one operator."""


@question("optimizer", "Does the optimizer update parameters one by one?", number="Q5")
def optimizer(context: AdviceContext) -> Iterator[Advice]:
    """Updates of parameters by single operators in a Python loop, in an optimizer or written by hand."""
    step_ms, on_device = calls.step_ms(context), context.required_trace.has(Level.KERNEL)
    if not calls.are_worth_a_walk(context, f"kind IN ('{Kind.OPTIMIZER}', '{Kind.BACKWARD}')"):
        return
    updates: list[_Update] = []
    for parent in calls.walk(context, with_device=True):
        if parent.kind == Kind.OPTIMIZER and parent.name not in WITHOUT_FUSED:
            has_closure = any(child.kind == Kind.BACKWARD for child in parent.children)
            own = _after_backward(parent) if has_closure else [op for op in parent.children if op.is_op]
            updates += _updates(parent, own, on_device)
        elif parent.kind == Kind.STEP:
            yield from _advice(context, step_ms, _updates(parent, _after_backward(parent), on_device))
    yield from _advice(context, step_ms, updates)


def _after_backward(step: HostCall) -> list[HostCall]:
    """Return the operators that are called directly after the last backward pass of a step, or of a closure."""
    end_times = [call.end_ns for call in step.children if call.kind == Kind.BACKWARD]
    return [call for call in step.children if call.is_op and end_times and call.start_ns >= max(end_times)]


class _Update(NamedTuple):
    """A call in which parameters are updated one by one."""

    call: HostCall
    computing_ops: list[HostCall]
    """The operators that compute."""

    parameters: int
    ms: float
    saved_ms: tuple[float, ...]
    """Milliseconds that one call for all parameters saves: low, expected, high."""


def _updates(parent: HostCall, ops: Sequence[HostCall], on_device: bool) -> list[_Update]:
    """Return the update of a call if it goes through parameters one by one, else an empty list."""
    all_ops = [inner for op in ops for inner in op.walk()]
    if any("_foreach_" in op.name or "_fused_" in op.name for op in all_ops):
        return []
    computing_ops = [op for op in ops if _computes(op)]
    writes = Counter(op.name for op in computing_ops if op.name.endswith("_"))
    parameters = Counter(writes.values()).most_common(1)[0][0] if writes else 0
    if parameters < LEAST_PARAMETERS:
        return []
    ms = sum(op.ns for op in computing_ops) / 1e6
    if parent.kind == Kind.OPTIMIZER:
        begin_ns = max((call.end_ns for call in parent.children if call.kind == Kind.BACKWARD), default=parent.start_ns)
        ms = max(ms, parent.ns / 1e6 * (parent.end_ns - begin_ns) / max(1, parent.end_ns - parent.start_ns))
    if on_device:
        saved_ms = tuple(share * ms for share in LAUNCH_SAVING)
    elif len(computing_ops) / parameters >= 2:
        saved_ms = tuple(share * ms for share in PASS_SAVING)
    else:
        saved_ms = tuple(min(ms / 2, cost * len(computing_ops)) for cost in CALL_MS)
    return [_Update(parent, computing_ops, parameters, ms, saved_ms)]


def _advice(context: AdviceContext, step_ms: float, updates: Sequence[_Update]) -> Iterator[Advice]:
    """Yield the advice on updates in a step: of the program itself, or of its optimizers, which one change makes one
    call each."""
    computing_ops = [op for update in updates for op in update.computing_ops]
    on_device = context.required_trace.has(Level.KERNEL)
    low, value, high = (sum(update.saved_ms[index] for update in updates) for index in range(3))
    scale = _scale(context, updates)
    low, value, high = low * scale, value * scale, high * scale
    if 100 * value / step_ms < LEAST_PERCENT or value < calls.LEAST_MS:
        return
    ms, parameters = scale * sum(update.ms for update in updates), sum(update.parameters for update in updates)
    low_factor, high_factor = calls.interval_factors(context, computing_ops) or (0.7, 1.3)
    parent = updates[0].call
    is_by_hand = parent.kind != Kind.OPTIMIZER
    has_optimizer = is_by_hand and any(child.kind == Kind.OPTIMIZER for child in parent.children)
    names = dict.fromkeys(update.call.name for update in updates)
    subject = "the program updates" if is_by_hand else f"{' and '.join(names)} update{'s' * (len(names) == 1)}"
    calls_text = f" in {len(updates)} calls of optimizers" if len(updates) > 1 else ""
    # on a processor, foreach still goes through memory once for each operator
    do = f"torch.optim with fused=True{' (or foreach=True)' * on_device} updates all of them in one call"
    if has_optimizer:
        do = (
            "torch._foreach_mul_, _foreach_add_, _foreach_lerp_ and the like take a list in one call; gradients can be "
            "clipped in this way by torch.nn.utils.clip_grad_norm_(parameters, most, foreach=True)"
        )
    elif is_by_hand:
        do += "; by hand: torch._foreach_add_(parameters, gradients, alpha=-lr)"
    yield Advice(
        "optimizer",
        f"{subject} {parameters} parameters{' or gradients, beside the optimizer,' * has_optimizer} one by one"
        f"{calls_text}: {len(computing_ops):,} operators, {ms:.3g} ms of a step",
        _places(parent if len(names) == 1 else None, computing_ops),
        Interval(low * low_factor, value, high * high_factor).limit(ms),
        False,
        100 * value / step_ms,
        (
            f"{len(computing_ops) / parameters:.1f} operators per parameter, each of which "
            + ("launches a kernel" if on_device else "reads and writes memory once more"),
        ),
        do,
        None,
        "fused_optimizer" if parent.kind == Kind.OPTIMIZER else None,
        entry=OPTIMIZER if parent.kind == Kind.OPTIMIZER else None,
    )


def _scale(context: AdviceContext, updates: Sequence[_Update]) -> float:
    """Return the factor from the recorded time of optimizers to their entry in the account, at most 1."""
    main = account.of(context.required_trace).main
    if main is None or any(update.call.kind != Kind.OPTIMIZER for update in updates):
        return 1.0
    ms, entry_ms = sum(update.ms for update in updates), main.host.ms(OPTIMIZER)
    return min(1.0, entry_ms / ms) if entry_ms and ms else 1.0


def _places(parent: HostCall | None, computing_ops: Sequence[HostCall]) -> tuple[Place, ...]:
    names = Counter(op.name for op in computing_ops)
    module = parent.name if parent is not None and parent.kind == Kind.OPTIMIZER else None
    return tuple(
        Place(module, name, tuple(op.span_id for op in computing_ops if op.name == name)[:MOST_SPANS], count)
        for name, count in names.most_common(3)
    )


def _computes(call: HostCall) -> bool:
    stem = call.name.removeprefix("aten::")
    return stem not in BOOKKEEPING and stem not in ("item", "_local_scalar_dense", "_to_copy", "zero_")
