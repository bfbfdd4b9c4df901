"""Copies that the program requests, into another layout or type, and costly types: double, and half on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xsp.advise import calls
from xsp.advise.advice import Advice, Asked, Interval
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.errors import AnalysisError

LEAST_PERCENT = 1.0
"""Minimum percentage of the step for copies to be worth a line."""

HALF = (0.2, 0.5, 0.7)
"""Share of the time of an operator in double precision that single precision saves (low, expected, high): about half
where memory or arithmetic bounds the operator, less where the call overhead does."""

_WIDE = ("double", "float64")


@question("copies", "Which copies does the program request?", number="Q4")
def copies(asked: Asked) -> Iterator[Advice]:
    """Calls of `clone` by the program itself, and of `contiguous` that had to copy; none inside other operators."""
    whole = calls.step_ms(asked)
    outer = [each for each in calls.every(asked) if each.is_outer_op and each.phase != "backward"]
    clones = [each for each in outer if each.name == "aten::clone"]
    yield from _copies(asked, whole, clones, "clone", "omit it if nothing writes to the copy in place", False)
    moved = [each for each in outer if each.name == "aten::contiguous" and _copies_inside(each)]
    way = "keep one layout: omit it if the readers accept any layout, or create the tensor in that layout"
    yield from _copies(asked, whole, moved, "contiguous", way, True)


def _copies(asked: Asked, whole: float, those: Sequence[Call], name: str, do: str, at_most: bool) -> Iterator[Advice]:
    ms = sum(each.ns for each in those) / 1e6
    if not those or 100 * ms / whole < LEAST_PERCENT or ms < calls.LEAST_MS:
        return
    ends = calls.ends(asked, those)
    modules = {each.module for each in those}
    yield Advice(
        "copies",
        f"{len(those)} copies by .{name}() in {len(modules)} place{'s' * (len(modules) > 1)} take {ms:.3g} ms",
        calls.places(those),
        calls.interval(ms, ends),
        at_most or ends is None,
        100 * ms / whole,
        (f"{100 * ms / whole:.1f} % of a step, in operators that the program calls directly",),
        do,
    )


def _copies_inside(call: Call) -> bool:
    return any(each.name in ("aten::copy_", "aten::clone") for each in call.every())


@question("casts", "Which operators cast, or work in double precision?", number="Q6")
def casts(asked: Asked) -> Iterator[Advice]:
    """Casts to another floating-point type, and operators in double precision beside those in single precision."""
    whole = calls.step_ms(asked)
    outer = [each for each in calls.every(asked) if each.is_outer_op]
    found = [each for each in outer if each.name in ("aten::to", "aten::_to_copy") and _types(each)]
    known = set(found)
    wide = [each for each in outer if each.dtype in _WIDE and each not in known]
    single = sum(each.ns for each in outer if each.dtype not in _WIDE)
    to_wide = [each for each in found if set(_types(each)) & set(_WIDE)]
    if wide and ((to_wide and single) or sum(each.ns for each in wide) >= single):
        yield from _double(asked, whole, to_wide, wide)
        found = [each for each in found if not set(_types(each)) & set(_WIDE)]
    there_and_back = _there_and_back(found)
    ms = sum(each.ns for each in there_and_back) / 1e6
    if ms >= calls.LEAST_MS and 100 * ms / whole >= LEAST_PERCENT:
        ends = calls.ends(asked, there_and_back)
        named = " and ".join(sorted({f"{one} to {other}" for one, other in map(_types, there_and_back)}))
        yield Advice(
            "casts",
            f"{len(there_and_back)} casts ({named}) take {ms:.3g} ms",
            calls.places(there_and_back),
            calls.interval(ms, ends),
            True,
            100 * ms / whole,
            ("the same module casts to the other type and back",),
            "keep one type through the module, or cast once outside the loop",
            "values in between are rounded to the other type",
        )


def _double(asked: Asked, whole: float, found: Sequence[Call], wide: Sequence[Call]) -> Iterator[Advice]:
    cast, work = sum(each.ns for each in found) / 1e6, sum(each.ns for each in wide) / 1e6
    low, value, high = (cast + share * work for share in HALF)
    if value < calls.LEAST_MS or 100 * value / whole < LEAST_PERCENT:
        return
    down, up = calls.ends(asked, [*found, *wide]) or (0.7, 1.3)
    places = len({each.module for each in found})
    where = f" in {places} places: {len(found)} casts take {cast:.3g} ms, " if found else " throughout: "
    yield Advice(
        "casts",
        f"double precision{where}{len(wide)} operators on doubles {work:.3g} ms",
        calls.places([*found, *wide], "float64"),
        Interval(low * down, value, high * up).within(whole),
        False,
        100 * value / whole,
        (f"single precision {'removes the casts and ' * bool(found)}about halves the time of doubles: {value:.3g} ms",),
        "omit .double() and dtype=torch.float64, or cast only what needs it; NumPy arrays are doubles",
        "24 bits of mantissa instead of 53",
        "float32",
    )


NARROW = {
    "c10::Half": ("float16", {"avx512_fp16", "amx_fp16", "asimdhp"}),
    "c10::BFloat16": ("bfloat16", {"avx512_bf16", "amx_bf16", "bf16"}),
}
"""16-bit types as the trace names them → their names in PyTorch, and the processor features that compute in them."""

NARROW_PERCENT = 20.0
"""Minimum percentage of the step for a 16-bit type to be worth a line."""


@question("half-precision", "Which operators use 16 bits, on a processor without such instructions?", number="Q6")
def half_precision(asked: Asked) -> Iterator[Advice]:
    """Operators in float16 or bfloat16 on a processor without instructions for these types.

    Such operators convert to float32 and back, and many have slow kernels. float32 gains at most all of their time;
    only a trial shows how much.
    """
    whole = calls.step_ms(asked)
    outer = [each for each in calls.every(asked) if each.is_outer_op]
    has = asked.traced.run.machine.isa
    for told, (name, needed) in NARROW.items():
        those = [each for each in outer if each.dtype == told]
        ms = sum(each.ns for each in those) / 1e6
        if not those or ms < calls.LEAST_MS or 100 * ms / whole < NARROW_PERCENT:
            continue
        if has is None:
            raise AnalysisError("the trace does not have the processor's instruction set: a run of xsp on Linux does")
        if needed & set(has):
            continue
        yield Advice(
            "half-precision",
            f"{len(those):,} operators compute in {name}, and this processor has no instructions for it",
            calls.places(those),
            calls.interval(ms, calls.ends(asked, those)).within(whole),
            True,
            100 * ms / whole,
            (
                f"they take {ms:.3g} ms of a step",
                f"it needs one of {', '.join(sorted(needed))}; this processor has {', '.join(has) or 'none of them'}",
            ),
            "omit .half(), .bfloat16() and autocast on this processor: model.float(), and inputs in float32",
            "24 bits of mantissa instead of 11 or 8",
            "float32",
        )


def _there_and_back(found: Sequence[Call]) -> list[Call]:
    """Return the casts in modules that cast from one type to another and back."""
    kept = []
    by_module: dict[str | None, list[Call]] = {}
    for each in found:
        by_module.setdefault(each.module, []).append(each)
    for those in by_module.values():
        pairs = {_types(each) for each in those}
        kept += [each for each in those if _types(each)[::-1] in pairs]
    return kept


def _types(call: Call) -> tuple[str, ...]:
    """Return the types that a cast reads and writes; empty if they are equal, not floating-point or unknown."""
    inner = next((each for each in call.every() if each.name == "aten::copy_"), None)
    if inner is None or inner.dtype is None or call.dtype is None or inner.dtype == call.dtype:
        return ()
    return (call.dtype, inner.dtype) if {call.dtype, inner.dtype} <= _FLOATING else ()


_FLOATING = {"float", "double", "c10::Half", "c10::BFloat16", "float32", "float64", "float16", "bfloat16"}
