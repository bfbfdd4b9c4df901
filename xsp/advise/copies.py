"""Copies that the program requests, into another layout or type, and costly types: double, and half on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.errors import AnalysisError
from xsp.stats import Interval
from xsp.texts import counted

LEAST_PERCENT = 1.0
"""Minimum percentage of the step for copies to be worth a line."""

SINGLE_SAVING = (0.2, 0.5, 0.7)
"""Share of the time of an operator in double precision that single precision saves (low, expected, high): about half
where memory or arithmetic bounds the operator, less where the call overhead does."""

_DOUBLE_TYPES = ("double", "float64")


@question("copies", "Which copies does the program request?", number="Q4")
def copies(context: AdviceContext) -> Iterator[Advice]:
    """Calls of `clone` by the program itself, and of `contiguous` that had to copy; none inside other operators."""
    step_ms = calls.step_ms(context)
    outer_ops = [op for op in calls.outer_ops(context) if op.phase != "backward"]
    clones = [op for op in outer_ops if op.name == "aten::clone"]
    yield from _copies(context, step_ms, clones, "clone", "omit it if nothing writes to the copy in place", False)
    contiguous = [op for op in outer_ops if op.name == "aten::contiguous" and _has_copy(op)]
    hint = "keep one layout: omit it if the readers accept any layout, or create the tensor in that layout"
    yield from _copies(context, step_ms, contiguous, "contiguous", hint, True)


def _copies(
    context: AdviceContext, step_ms: float, ops: Sequence[HostCall], name: str, do: str, at_most: bool
) -> Iterator[Advice]:
    ms = sum(op.ns for op in ops) / 1e6
    if not ops or 100 * ms / step_ms < LEAST_PERCENT or ms < calls.LEAST_MS:
        return
    factors = calls.interval_factors(context, ops)
    modules = {op.module for op in ops}
    yield Advice(
        "copies",
        f"{len(ops)} copies by .{name}() in {counted(len(modules), 'place')} take {ms:.3g} ms",
        calls.places(ops),
        calls.interval(ms, factors),
        at_most or factors is None,
        100 * ms / step_ms,
        (f"{100 * ms / step_ms:.1f} % of a step, in operators that the program calls directly",),
        do,
    )


def _has_copy(call: HostCall) -> bool:
    return any(inner.name in ("aten::copy_", "aten::clone") for inner in call.walk())


@question("casts", "Which operators cast, or work in double precision?", number="Q6")
def casts(context: AdviceContext) -> Iterator[Advice]:
    """Casts to another floating-point type, and operators in double precision beside those in single precision."""
    step_ms = calls.step_ms(context)
    outer_ops = calls.outer_ops(context)
    cast_ops = [op for op in outer_ops if op.name in ("aten::to", "aten::_to_copy") and _types(op)]
    cast_set = set(cast_ops)
    doubles = [op for op in outer_ops if _dtype(op) in _DOUBLE_TYPES and op not in cast_set]
    single_ns = sum(op.ns for op in outer_ops if _dtype(op) not in (None, *_DOUBLE_TYPES))
    to_wide = [op for op in cast_ops if set(_types(op)) & set(_DOUBLE_TYPES)]
    if doubles and ((to_wide and single_ns) or sum(op.ns for op in doubles) >= single_ns):
        yield from _double_precision(context, step_ms, to_wide, doubles)
        cast_ops = [op for op in cast_ops if not set(_types(op)) & set(_DOUBLE_TYPES)]
    round_trips = _round_trips(cast_ops)
    all_ops = calls.with_gradients(context, round_trips)  # the gradient of a cast is a cast back
    ms = sum(op.ns for op in all_ops) / 1e6
    if ms >= calls.LEAST_MS and 100 * ms / step_ms >= LEAST_PERCENT:
        factors = calls.interval_factors(context, all_ops)
        pairs = " and ".join(sorted({f"{source} to {target}" for source, target in map(_types, round_trips)}))
        yield Advice(
            "casts",
            f"{len(round_trips)} casts ({pairs}){calls.gradients_text(round_trips, all_ops)} take {ms:.3g} ms",
            calls.places(round_trips),
            calls.interval(ms, factors),
            True,
            100 * ms / step_ms,
            ("the same module casts to the other type and back",),
            "keep one type through the module, or cast once outside the loop",
            "values in between are rounded to the other type",
        )


def _dtype(op: HostCall) -> str | None:
    """Return the element type of an operator, else of the first one inside it that has one: nodes of the backward pass
    have no inputs of their own. None if it is unknown, which is no other type."""
    return next((inner.dtype for inner in op.walk() if inner.dtype), None)


def _double_precision(
    context: AdviceContext, step_ms: float, cast_ops: Sequence[HostCall], doubles: Sequence[HostCall]
) -> Iterator[Advice]:
    cast_ms, work_ms = sum(op.ns for op in cast_ops) / 1e6, sum(op.ns for op in doubles) / 1e6
    low, value, high = (cast_ms + share * work_ms for share in SINGLE_SAVING)
    if value < calls.LEAST_MS or 100 * value / step_ms < LEAST_PERCENT:
        return
    low_factor, high_factor = calls.interval_factors(context, [*cast_ops, *doubles]) or (0.7, 1.3)
    places = len({op.module for op in cast_ops})
    scope = f" in {places} places: {len(cast_ops)} casts take {cast_ms:.3g} ms, " if cast_ops else " throughout: "
    yield Advice(
        "casts",
        f"double precision{scope}{len(doubles)} operators on doubles {work_ms:.3g} ms",
        calls.places([*cast_ops, *doubles], "float64"),
        Interval(low * low_factor, value, high * high_factor).limit(step_ms),
        False,
        100 * value / step_ms,
        (
            f"single precision {'removes the casts and ' * bool(cast_ops)}about halves the time of doubles: "
            f"{value:.3g} ms",
        ),
        "omit .double() and dtype=torch.float64, or cast only what needs it; NumPy arrays are doubles",
        "24 bits of mantissa instead of 53",
        "float32",
    )


HALF_TYPES = {
    "c10::Half": ("float16", {"avx512_fp16", "amx_fp16", "asimdhp"}),
    "c10::BFloat16": ("bfloat16", {"avx512_bf16", "amx_bf16", "bf16"}),
}
"""16-bit types as the trace names them → their names in PyTorch, and the processor features that compute in them."""

LEAST_HALF_PERCENT = 20.0
"""Minimum percentage of the step for a 16-bit type to be worth a line."""


@question("half-precision", "Which operators use 16 bits, on a processor without such instructions?", number="Q6")
def half_precision(context: AdviceContext) -> Iterator[Advice]:
    """Operators in float16 or bfloat16 on a processor without instructions for these types.

    Such operators convert to float32 and back, and many have slow kernels. float32 gains at most all of their time;
    only a trial shows how much.
    """
    step_ms = calls.step_ms(context)
    outer_ops = calls.outer_ops(context)
    isa = context.required_trace.run.machine.isa
    for dtype, (name, features) in HALF_TYPES.items():
        ops = [op for outer in outer_ops for op in _of_type(outer, dtype)]
        ms = sum(op.ns for op in ops) / 1e6
        if not ops or ms < calls.LEAST_MS or 100 * ms / step_ms < LEAST_HALF_PERCENT:
            continue
        if isa is None:
            raise AnalysisError("the trace does not have the processor's instruction set: a run of xsp on Linux does")
        if features & set(isa):
            continue
        yield Advice(
            "half-precision",
            f"{len(ops):,} operators compute in {name}, and this processor has no instructions for it",
            calls.places(ops),
            calls.interval(ms, calls.interval_factors(context, ops)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"they take {ms:.3g} ms of a step",
                f"it needs one of {', '.join(sorted(features))}; this processor has {', '.join(isa) or 'none of them'}",
            ),
            "omit .half(), .bfloat16() and autocast on this processor: model.float(), and inputs in float32",
            "24 bits of mantissa instead of 11 or 8",
            "float32",
        )


def _of_type(op: HostCall, dtype: str) -> list[HostCall]:
    """Return the outermost operators of a type in an operator, or itself: those under autocast begin in another one,
    and nodes of the backward pass in none."""
    return [op] if op.dtype == dtype else [found for inner in op.children for found in _of_type(inner, dtype)]


def _round_trips(cast_ops: Sequence[HostCall]) -> list[HostCall]:
    """Return the casts in modules that cast from one type to another and back."""
    round_trips = []
    by_module: dict[str | None, list[HostCall]] = {}
    for cast in cast_ops:
        by_module.setdefault(cast.module, []).append(cast)
    for group in by_module.values():
        pairs = {_types(cast) for cast in group}
        round_trips += [cast for cast in group if _types(cast)[::-1] in pairs]
    return round_trips


def _types(call: HostCall) -> tuple[str, ...]:
    """Return the types that a cast reads and writes; empty if they are equal, not floating-point or unknown."""
    copy = next((child for child in call.walk() if child.name == "aten::copy_"), None)
    if copy is None or copy.dtype is None or call.dtype is None or copy.dtype == call.dtype:
        return ()
    return (call.dtype, copy.dtype) if {call.dtype, copy.dtype} <= _FLOATING_TYPES else ()


_FLOATING_TYPES = {"float", "double", "c10::Half", "c10::BFloat16", "float32", "float64", "float16", "bfloat16"}
