"""Repeated computation: modules given the same tensors twice in a step, masks and tables recomputed for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import MOST_SPANS, Advice, Asked, Place
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Kind, Level

RANDOM = ("bernoulli", "dropout", "rand", "normal_", "multinomial", "uniform_", "exponential_")
"""Parts of the names of operators whose results differ from call to call."""


@question("repeated", "Is the same result computed twice?", number="Q4")
def repeated(asked: Asked) -> Iterator[Advice]:
    """A module that was given the same tensors again in one step, and would return the same result.

    Describing steps record which tensors are the same (`xsp.schema.GIVEN`). Modules that draw random numbers, modules
    whose inputs may have been written to in between, and recomputation in a backward pass do not count.
    """
    whole = calls.step_ms(asked)
    again = list(_again(asked))
    for name in dict.fromkeys(each.name for each in again):
        those = [each for each in again if each.name == name]
        ms = sum(each.ns for each in those) / 1e6
        if ms < calls.LEAST_MS:
            continue
        yield Advice(
            "repeated",
            f"{name} ({those[0].type}) is given the same tensors {len(those) + 1} times in a step",
            (Place(name, None, tuple(each.span_id for each in those[:MOST_SPANS]), len(those)),),
            calls.interval(ms, calls.ends(asked, those)).within(whole),
            False,
            100 * ms / whole,
            (f"all but the first call take {ms:.3g} ms; nothing wrote to the tensors between them",),
            "keep the result of the first call and use it again, if the module keeps no state",
        )


def _again(asked: Asked) -> Iterator[Call]:
    """Yield the calls of modules that repeat an earlier call with the same tensors, none inside another one."""
    order = sorted(calls.every(asked), key=lambda each: each.start_ns)
    first: dict[tuple[object, ...], Call] = {}
    end = 0
    for each in order:
        if each.level != Level.LAYER or not each.given or each.start_ns < end or _is_backward(each):
            continue
        known = first.setdefault((each.name, each.type, each.given, str(each.shapes)), each)
        if known is not each and known.end_ns <= each.start_ns and _is_repeatable(known, each, order):
            end = each.end_ns
            yield each


def _is_repeatable(first: Call, again: Call, order: list[Call]) -> bool:
    """Return whether both calls would return the same result: no random operators, no writes to what they read.

    They read their inputs and their parameters, which the operators inside identify by shape: an optimizer's step
    between the calls, or a perturbation of the weights, changes the result.
    """
    if any(part in one.name for one in again.every() if one.is_op for part in RANDOM):
        return False
    read = {str(shape) for shape in first.shapes}
    read |= {str(shape) for one in first.every() if one.is_op for shape in one.shapes[1:] if shape}
    between = (one for one in order if one.is_outer_op and first.start_ns <= one.start_ns < again.start_ns)
    return not any(one.name.endswith("_") and _written(one) & read for one in between)


def _written(call: Call) -> set[str]:
    """Return the shapes that an in-place operator writes to: those of its first argument, a tensor or a list."""
    first = call.shapes[0] if call.shapes else None
    if not isinstance(first, list) or not first:
        return set()
    return {str(shape) for shape in first} if isinstance(first[0], list) else {str(first)}


def _is_backward(call: Call) -> bool:
    at: Call | None = call
    while at is not None:
        if at.kind == Kind.BACKWARD or at.phase == "backward":
            return True
        at = at.around
    return False


@question("masks", "Is the same mask made for each layer?", number="Q4")
def masks(asked: Asked) -> Iterator[Advice]:
    """Triangular matrices of one size that a step makes several times: causal masks of attention."""
    whole = calls.step_ms(asked)
    found: dict[tuple[str, tuple[int, ...]], list[list[Call]]] = {}
    for around in calls.every(asked):
        if around.is_op or _is_backward(around):
            continue
        for before, each in pairwise([None, *(one for one in around.inside if one.is_op)]):
            if each is None or each.name not in ("aten::triu", "aten::tril") or each.first_shape is None:
                continue
            made = [each]
            if before is not None and before.name in ("aten::full", "aten::ones"):
                made.append(before)  # the operator that filled the matrix
            found.setdefault((each.name, each.first_shape), []).append(made)
    for (name, shape), several in found.items():
        those = [made[0] for made in several]
        every = [one for made in several for one in made]
        ms = sum(each.ns for each in every) / 1e6
        if len(those) < 2 or ms < calls.LEAST_MS:
            continue
        yield Advice(
            "masks",
            f"a triangular matrix of {' × '.join(f'{size:,}' for size in shape)} is made {len(those)} times in a step",
            calls.places(those),
            calls.interval(ms, calls.ends(asked, every)).within(whole),
            True,
            100 * ms / whole,
            (f"making them takes {ms:.3g} ms; inferred from shapes: valid if {name} gets only constants",),
            "make it once (register_buffer) and pass it on; for attention use is_causal=True of "
            "scaled_dot_product_attention, which also skips the masked half",
        )


MADE_OF_NUMBERS = ("aten::arange", "aten::linspace", "aten::logspace")
"""Operators that make a tensor from numbers alone."""

_ON_TABLES = frozenset(
    "add sub rsub mul div pow exp exp2 log sin cos neg reciprocal sqrt rsqrt floor floor_divide remainder cat stack "
    "outer ger meshgrid to _to_copy copy fill zeros ones full repeat expand_as clone arange linspace logspace "
    "repeat_interleave abs round".split()
)
"""Operators that may compute tables from such tensors."""

_COSTLY = frozenset("pow exp exp2 log sin cos sqrt rsqrt".split())

ONCE_PERCENT = 5.0
"""Minimum percentage of the step for a table that is made once per step to be worth a line."""


@question("constants", "Are tables of constants computed again in each step?", number="Q4")
def constants(asked: Asked) -> Iterator[Advice]:
    """Tables of functions of positions, such as sines and cosines, made from `arange` by the operators that follow it.

    A step makes them several times, or spends much of its time on one. Which tensors an operator takes is not known: it
    counts if it follows the others in the same module, and all of its tensors have at most two axes.
    """
    whole = calls.step_ms(asked)
    found: dict[tuple[object, ...], list[list[Call]]] = {}
    for around in calls.every(asked):
        if around.is_op or _is_backward(around) or around.phase == "optimizer":
            continue
        for those in _tables(around):
            found.setdefault(tuple((each.name, str(each.shapes)) for each in those), []).append(those)
    for several in found.values():
        every = [each for those in several for each in those]
        ms = sum(each.ns for each in every) / 1e6
        least = 0.0 if len(several) > 1 else ONCE_PERCENT
        if ms < calls.LEAST_MS or 100 * ms / whole < least:
            continue
        names = ", ".join(dict.fromkeys(each.name.removeprefix("aten::") for each in several[0]))
        often = f"{len(several)} times in a step" if len(several) > 1 else "in each step"
        yield Advice(
            "constants",
            f"a table of constants is computed {often}, by {len(several[0])} operators",
            calls.places(every),
            calls.interval(ms, calls.ends(asked, every)).within(whole),
            True,
            100 * ms / whole,
            (
                f"{names} take {ms:.3g} ms",
                "inferred from shapes and the order of calls: valid if the table depends only on positions",
            ),
            "compute it once for the longest input, keep it (register_buffer, functools.cache), and take a slice of it",
        )


def _tables(around: Call) -> Iterator[list[Call]]:
    """Yield chains of operators that start at a range of numbers and include one more costly than a product."""
    chain: list[Call] = []
    for each in (*(one for one in around.inside if one.computes), None):
        if each is not None and (each.name in MADE_OF_NUMBERS or (chain and _is_of_a_table(each))):
            chain.append(each)
            continue
        if any(_stem(one) in _COSTLY for one in chain):
            yield chain
        chain = []


def _is_of_a_table(call: Call) -> bool:
    """Return whether a call may compute with a table, which has at most two axes: inputs of models have more."""
    tensors = [each for each in call.shapes if isinstance(each, list)]
    flat = [one for each in tensors for one in (each if each and isinstance(each[0], list) else [each])]
    return call.is_op and _stem(call) in _ON_TABLES and all(isinstance(one, list) and len(one) <= 2 for one in flat)


def _stem(call: Call) -> str:
    return call.name.removeprefix("aten::").removesuffix("_")
