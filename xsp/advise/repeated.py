"""Repeated computation: modules given the same tensors twice in a step, masks and tables recomputed for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from xsp import account
from xsp.account import sentences
from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind, Level
from xsp.stats import Interval
from xsp.texts import ms_text

MIN_PASS_SHARE = 0.03
"""Least share of an iteration of a second pass to be worth a line."""

RANDOM_OPS = ("bernoulli", "dropout", "rand", "normal_", "multinomial", "uniform_", "exponential_")
"""Parts of the names of operators whose results differ from call to call."""


@question("repeated", "Is the same result computed twice?", number="Q4", shapes=True)
def repeated(context: AdviceContext) -> Iterator[Advice]:
    """A module that was given the same tensors again in one step, and would return the same result.

    Describing steps record which tensors are the same (`xsp.schema.INPUT_TENSORS`). Modules that draw random numbers,
    modules whose inputs may have been written to in between, recomputation in a backward pass, and a call with
    gradients after or before one without (the question `second-pass`) do not count.
    """
    step_ms = calls.step_ms(context)
    repeats = list(_repeats(context))
    for name in dict.fromkeys(call.name for call in repeats):
        group = [call for call in repeats if call.name == name]
        all_calls = calls.with_gradients(context, group)
        ms = sum(call.ns for call in all_calls) / 1e6
        if ms < calls.LEAST_MS:
            continue
        yield Advice(
            "repeated",
            f"{_label(group[0])} is called {_times(len(group))} in a step with tensors that it was given before",
            (Place(name, None, tuple(call.span_id for call in group[:MOST_SPANS]), len(group)),),
            calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
            False,
            100 * ms / step_ms,
            (
                f"these calls{calls.gradients_text(group, all_calls)} take {ms:.3g} ms; nothing wrote to the tensors "
                "since the first",
            ),
            "keep the result of the first call and use it again, if the module keeps no state",
        )


@question("second-pass", "Does a batch pass the model a second time in training?", number="Q4")
def second_pass(context: AdviceContext) -> Iterator[Advice]:
    """Passes without gradients through a model that the same step also trains, as for a metric on its batch.

    At most their time can be saved: another batch may pass then, or the weights may differ.
    """
    main = account.of(context.required_trace).job
    if main is None or not main.time.ms:
        return
    for part in sentences.second_passes(main):
        ms, name = part.ms or 0.0, sentences.model_of(part)
        if ms < calls.LEAST_MS or ms < MIN_PASS_SHARE * main.time.ms:
            continue
        yield Advice(
            "second-pass",
            f"each training step also calls {name} without gradients: {ms_text(ms)} of an iteration of "
            f"{ms_text(main.time.ms)}",
            (Place(name, None, (), None),),
            Interval(ms / 2, ms, ms),
            True,
            100 * ms / main.time.ms,
            ("an input of the same shape passes the same model twice in a step, with gradients and without",),
            "for a metric or a loss that is shown, use the outputs of the pass with gradients: the batch passes the "
            "model once; if the other pass makes targets, it remains",
            entry=part.name,
        )


def _repeats(context: AdviceContext) -> Iterator[HostCall]:
    """Yield the calls of modules that repeat an earlier call with the same tensors, none inside another one."""
    ordered_calls = sorted(calls.walk(context), key=lambda call: call.start_ns)
    first_calls: dict[tuple[object, ...], HostCall] = {}
    numbers = {node.sequence_nr for each in ordered_calls if each.kind == Kind.BACKWARD for node in each.children}
    end = 0
    for call in ordered_calls:
        if call.level != Level.LAYER or not call.input_ids or call.start_ns < end or _is_backward(call):
            continue
        first_call = first_calls.setdefault((call.name, call.type, call.input_ids, str(call.shapes)), call)
        if (
            first_call is not call
            and first_call.end_ns <= call.start_ns
            and _has_gradients(first_call, numbers) == _has_gradients(call, numbers)
            and _is_repeatable(first_call, call, ordered_calls)
        ):
            end = call.end_ns
            yield call


def _label(call: HostCall) -> str:
    return call.name if call.type in (None, call.name) else f"{call.name} ({call.type})"


def _times(count: int) -> str:
    return f"{count} times" if count > 1 else "once more"


def _has_gradients(call: HostCall, numbers: set[int | None]) -> bool:
    return any(op.sequence_nr is not None and op.sequence_nr in numbers for op in call.walk())


def _is_repeatable(earlier: HostCall, later: HostCall, ordered_calls: list[HostCall]) -> bool:
    """Return whether both calls would return the same result: no random operators, no writes to what they read.

    They read their inputs and their parameters, which the operators inside identify by shape: an optimizer's step
    between the calls, or a perturbation of the weights, changes the result.
    """
    if any(part in op.name for op in later.walk() if op.is_op for part in RANDOM_OPS):
        return False
    read_shapes = {str(shape) for shape in earlier.shapes}
    read_shapes |= {str(shape) for op in earlier.walk() if op.is_op for shape in op.shapes[1:] if shape}
    ops_between = (op for op in ordered_calls if op.is_outer_op and earlier.start_ns <= op.start_ns < later.start_ns)
    return not any(op.name.endswith("_") and _written_shapes(op) & read_shapes for op in ops_between)


def _written_shapes(call: HostCall) -> set[str]:
    """Return the shapes that an in-place operator writes to: those of its first argument, a tensor or a list."""
    argument = call.shapes[0] if call.shapes else None
    if not isinstance(argument, list) or not argument:
        return set()
    return {str(shape) for shape in argument} if isinstance(argument[0], list) else {str(argument)}


def _is_backward(call: HostCall) -> bool:
    ancestor: HostCall | None = call
    while ancestor is not None:
        if ancestor.kind == Kind.BACKWARD or ancestor.phase == "backward":
            return True
        ancestor = ancestor.parent
    return False


@question("masks", "Is the same mask made for each layer?", number="Q4", shapes=True)
def masks(context: AdviceContext) -> Iterator[Advice]:
    """Triangular matrices of one size that a step makes several times: causal masks of attention."""
    step_ms = calls.step_ms(context)
    groups_by_shape: dict[tuple[str, tuple[int, ...]], list[list[HostCall]]] = {}
    for parent in calls.walk(context):
        if parent.is_op or _is_backward(parent):
            continue
        for previous, op in pairwise([None, *(call for call in parent.children if call.is_op)]):
            if op is None or op.name not in ("aten::triu", "aten::tril") or op.first_shape is None:
                continue
            group = [op]
            if previous is not None and previous.name in ("aten::full", "aten::ones"):
                group.append(previous)  # the operator that filled the matrix
            groups_by_shape.setdefault((op.name, op.first_shape), []).append(group)
    for (name, shape), groups in groups_by_shape.items():
        triangles = [group[0] for group in groups]
        all_ops = [call for group in groups for call in group]
        ms = sum(op.ns for op in all_ops) / 1e6
        if len(triangles) < 2 or ms < calls.LEAST_MS:
            continue
        yield Advice(
            "masks",
            f"a triangular matrix of {' × '.join(f'{size:,}' for size in shape)} is made {len(triangles)} times "
            "in a step",
            calls.places(triangles),
            calls.interval(ms, calls.interval_factors(context, all_ops)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (f"making them takes {ms:.3g} ms; inferred from shapes: valid if {name} gets only constants",),
            "make it once (register_buffer) and pass it on; for attention use is_causal=True of "
            "scaled_dot_product_attention, which also skips the masked half",
        )


RANGES = ("aten::arange", "aten::linspace", "aten::logspace")
"""Operators that make a tensor from numbers alone."""

_TABLE_OPS = frozenset(
    "add sub rsub mul div pow exp exp2 log sin cos neg reciprocal sqrt rsqrt floor floor_divide remainder cat stack "
    "outer ger meshgrid to _to_copy copy fill zeros ones full repeat expand_as clone arange linspace logspace "
    "repeat_interleave abs round".split()
)
"""Operators that may compute tables from such tensors."""

_COSTLY_OPS = frozenset("pow exp exp2 log sin cos sqrt rsqrt".split())

ONCE_PERCENT = 5.0
"""Minimum percentage of the step for a table that is made once per step to be worth a line."""


@question("constants", "Are tables of constants computed again in each step?", number="Q4")
def constants(context: AdviceContext) -> Iterator[Advice]:
    """Tables of functions of positions, such as sines and cosines, made from `arange` by the operators that follow it.

    A step makes them several times, or spends much of its time on one. Which tensors an operator takes is not known: it
    counts if it follows the others in the same module, and all of its tensors have at most two axes.
    """
    step_ms = calls.step_ms(context)
    chains_by_ops: dict[tuple[object, ...], list[list[HostCall]]] = {}
    for parent in calls.walk(context):
        if parent.is_op or _is_backward(parent) or parent.phase == "optimizer":
            continue
        for chain in _tables(parent):
            chains_by_ops.setdefault(tuple((op.name, str(op.shapes)) for op in chain), []).append(chain)
    for chains in chains_by_ops.values():
        all_ops = [op for chain in chains for op in chain]
        ms = sum(op.ns for op in all_ops) / 1e6
        least_percent = 0.0 if len(chains) > 1 else ONCE_PERCENT
        if ms < calls.LEAST_MS or 100 * ms / step_ms < least_percent:
            continue
        names = ", ".join(dict.fromkeys(op.name.removeprefix("aten::") for op in chains[0]))
        frequency = f"{len(chains)} times in a step" if len(chains) > 1 else "in each step"
        yield Advice(
            "constants",
            f"a table of constants is computed {frequency}, by {len(chains[0])} operators",
            calls.places(all_ops),
            calls.interval(ms, calls.interval_factors(context, all_ops)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"{names} take {ms:.3g} ms",
                "inferred from shapes and the order of calls: valid if the table depends only on positions",
            ),
            "compute it once for the longest input, keep it (register_buffer, functools.cache), and take a slice of it",
        )


def _tables(parent: HostCall) -> Iterator[list[HostCall]]:
    """Yield chains of operators that start at a range of numbers and include one more costly than a product."""
    chain: list[HostCall] = []
    for call in (*(child for child in parent.children if child.computes), None):
        if call is not None and (call.name in RANGES or (chain and _is_table_op(call))):
            chain.append(call)
            continue
        if any(op.stem in _COSTLY_OPS for op in chain):
            yield chain
        chain = []


def _is_table_op(call: HostCall) -> bool:
    """Return whether a call may compute with a table, which has at most two axes: inputs of models have more."""
    tensors = [argument for argument in call.shapes if isinstance(argument, list)]
    shapes = [
        shape
        for argument in tensors
        for shape in (argument if argument and isinstance(argument[0], list) else [argument])
    ]
    return (
        call.is_op and call.stem in _TABLE_OPS and all(isinstance(shape, list) and len(shape) <= 2 for shape in shapes)
    )
