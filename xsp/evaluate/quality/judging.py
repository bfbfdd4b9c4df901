"""Whether two evaluations are the same: by their environment, their outputs and their latencies.

Each subject is judged by itself. The evaluations are different if one subject is; they are the same if all are; else
nobody can tell, and the reasons say what is missing. Latencies are compared as runs are (`xsp.comparison.evidence`):
one run a side tells only differences beyond those of two starts of one program; `settle` repeats until more is known.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp import summary
from xsp.comparison import evidence

Runs = Sequence[NDArray[Any]]
"""Latencies in nanoseconds, in their order: an array for each run."""

ROUNDING, MORE_THAN_ROUNDING = 16, 64
"""Units of the last place, of the norm of all outputs: up to the first it is the order of summation, beyond the second
it is another computation."""

UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}

MOST_ROUNDING = 0.2
"""More than this share is no rounding, in whatever precision."""

MARGIN = 0.05
"""The share that latencies must differ by, with their whole interval, before the evaluations are called different."""

BESIDE = frozenset({"host", "kernel", "agent", "xsp", "started", "pid"})
"""What may differ between two evaluations that are the same; it is named all the same."""

MOST_TURNS = 5


class Verdict(enum.Enum):
    """What two evaluations are."""

    SAME = "same"
    DIFFERENT = "different"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Outcome:
    """What an evaluation came to."""

    outputs: Mapping[str, NDArray[Any]] | None
    """By name, before they are shortened to what is shown; None if they were not kept."""

    latencies_ns: Mapping[str, Runs]
    """By what was asked, such as the batch size."""

    environment: Mapping[str, str]
    """Whatever bears upon it: versions, threads, processor, precision, batch, and how inputs are made ready."""

    precision: str = ""
    """In which the model computes, if that is not the type of its outputs."""


@dataclass(frozen=True)
class Reason:
    """What one subject says."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Judgement:
    """What two evaluations are, and why."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = field(default_factory=tuple)

    @property
    def why(self) -> tuple[Reason, ...]:
        """The reasons that made the verdict."""
        return tuple(each for each in self.reasons if each.verdict is self.verdict)

    def by(self, subject: str) -> Verdict:
        """Return what the reasons of `environment`, `outputs` or `latency` come to."""
        return _together([each for each in self.reasons if each.subject == subject])


def judge(before: Outcome, after: Outcome, turns: int = MOST_TURNS) -> Judgement:
    """Return whether two evaluations are the same.

    Args:
        before: the one that is kept.
        after: the one that was made again.
        turns: how often it is looked at in all, where runs are repeated; see `settle`.
    """
    reasons = [*_of_environment(before, after), *_of_outputs(before, after), *_of_latency(before, after, turns)]
    return Judgement(_together(reasons), tuple(reasons))


def settle(before: Outcome, again: Callable[[], Outcome], most: int = MOST_TURNS) -> Judgement:
    """Repeat an evaluation until it is known whether it is the same, at most so often.

    A difference of the environment or of the outputs is known at once. One that only the latencies of one run have may
    be a disturbance of the machine, so it is repeated.

    Args:
        before: the one that is kept.
        again: makes it again.
        most: times.
    """
    after = again()
    found = judge(before, after, most)
    for _ in range(most - 1):
        known = found.by("environment"), found.by("outputs")
        if Verdict.DIFFERENT in known or found.by("latency") is Verdict.SAME:
            break
        if found.by("latency") is Verdict.DIFFERENT and _repeats(after) >= evidence.FIRST:
            break
        if not (set(before.latencies_ns) & set(after.latencies_ns)):
            break  # repeating tells nothing
        more = again()
        latencies = {
            part: [*runs, *more.latencies_ns.get(part, ())] for part, runs in after.latencies_ns.items()
        }  # fmt: skip
        after = replace(more, latencies_ns=latencies)
        found = judge(before, after, most)
    return found


def _repeats(outcome: Outcome) -> int:
    return min((len(runs) for runs in outcome.latencies_ns.values()), default=0)


def _together(reasons: Sequence[Reason]) -> Verdict:
    found = {each.verdict for each in reasons}
    if Verdict.DIFFERENT in found:
        return Verdict.DIFFERENT
    return Verdict.SAME if found == {Verdict.SAME} else Verdict.CANNOT_TELL


# --- environment -------------------------------------------------------------------------------------------------


def _of_environment(before: Outcome, after: Outcome) -> Iterator[Reason]:
    one, other = before.environment, after.environment
    if not one or not other:
        yield Reason("environment", Verdict.CANNOT_TELL, "the environment of one of them is not known")
        return
    names = sorted({*one, *other})
    beside = [name for name in names if name in BESIDE and one.get(name) != other.get(name)]
    for name in names:
        if name in BESIDE or one.get(name) == other.get(name):
            continue
        known = name in one and name in other
        text = f"{name}: {one.get(name, 'not known')}, then {other.get(name, 'not known')}"
        yield Reason("environment", Verdict.DIFFERENT if known else Verdict.CANNOT_TELL, text)
    shared = sum(name in one and name in other and one[name] == other[name] for name in names)
    if shared:
        but = f"; {', '.join(beside)} may differ, and does" if beside else ""
        yield Reason("environment", Verdict.SAME, f"{shared} facts are equal{but}")


# --- outputs -----------------------------------------------------------------------------------------------------


def _of_outputs(before: Outcome, after: Outcome) -> Iterator[Reason]:
    if not before.outputs or not after.outputs:
        yield Reason("outputs", Verdict.CANNOT_TELL, "the outputs of one of them were not kept")
        return
    if set(before.outputs) != set(after.outputs):
        names = f"{', '.join(sorted(before.outputs))}, then {', '.join(sorted(after.outputs))}"
        yield Reason("outputs", Verdict.DIFFERENT, f"the outputs have other names: {names}")
        return
    for name, one in before.outputs.items():
        yield _of_output(name, np.asarray(one), np.asarray(after.outputs[name]), before.precision)


def _of_output(name: str, one: NDArray[Any], other: NDArray[Any], precision: str) -> Reason:
    def reason(verdict: Verdict, text: str) -> Reason:
        return Reason("outputs", verdict, f"{name}: {text}")

    if one.shape != other.shape or one.dtype != other.dtype:
        said = f"{one.dtype} of {one.shape}, then {other.dtype} of {other.shape}"
        return reason(Verdict.DIFFERENT, said)
    if not one.size:
        return reason(Verdict.CANNOT_TELL, "it is empty")
    if one.tobytes() == other.tobytes():
        little = "; all of them are one number, so they tell little" if (one == one.flat[0]).all() else ""
        return reason(Verdict.SAME, f"{one.size} values are equal bit for bit{little}")
    if one.dtype.kind not in "fc":
        unlike = int((one != other).sum())
        verdict = Verdict.DIFFERENT if unlike else Verdict.SAME
        return reason(verdict, f"{unlike} of {one.size} values differ" if unlike else f"{one.size} values are equal")
    finite = np.isfinite(one) & np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return reason(Verdict.DIFFERENT, "other values are infinite or NaN")
    kind = precision if precision in UNIT else str(one.dtype)
    unit = UNIT.get(kind, float(np.finfo(one.dtype).eps))
    apart = _apart(one[finite], other[finite])
    said = f"{apart:.2g} of their norm apart, {apart / unit:.3g} units in the last place of {kind}"
    if apart <= min(ROUNDING * unit, MOST_ROUNDING):
        return reason(Verdict.SAME, f"rounding: {said}")
    if apart > min(MORE_THAN_ROUNDING * unit, MOST_ROUNDING):
        return reason(Verdict.DIFFERENT, said)
    return reason(Verdict.CANNOT_TELL, f"more than usual rounding, and less than another computation: {said}")


def _apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the norm of the difference over that of the larger one; of scaled values, so nothing overflows."""
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(wide).ravel(), other.astype(wide).ravel()
    scale = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
    if scale == 0:
        return 0.0
    one, other = one / scale, other / scale
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(one), np.linalg.norm(other)))


# --- latency -----------------------------------------------------------------------------------------------------


def _of_latency(before: Outcome, after: Outcome, turns: int) -> Iterator[Reason]:
    shared = [part for part in before.latencies_ns if part in after.latencies_ns]
    if not shared:
        yield Reason("latency", Verdict.CANNOT_TELL, "they have no latencies of the same kind")
    for part in shared:
        verdict, text = _of_part(before.latencies_ns[part], after.latencies_ns[part], turns)
        yield Reason("latency", verdict, f"{part}: {text}" if part else text)


def _of_part(before: Runs, after: Runs, turns: int) -> tuple[Verdict, str]:
    one, other = ([np.asarray(run, float) for run in runs if len(run)] for runs in (before, after))
    if not one or not other:
        return Verdict.CANNOT_TELL, "there are no latencies"
    if len(one) == len(other) == 1:
        how, least = evidence.STEPS, evidence.STARTS
        found = how.evidence(one[0].tolist(), other[0].tolist())
    else:
        how, least = evidence.repeats(min(evidence.MOST, max(evidence.FIRST, turns))), MARGIN
        found = how.evidence(*([summary.trimmed_mean(run.tolist()) for run in runs] for runs in (one, other)))
    change = f"{100 * found.change / found.a:+.1f} %" if found.a else "not known"
    if found.low is None or found.high is None or not found.a:
        return Verdict.CANNOT_TELL, f"{change}, of too few repeats"
    low, high = found.low / found.a, found.high / found.a
    what = "requests of one run each" if how is evidence.STEPS else f"{len(one)} and {len(other)} runs"
    said = f"{change} ({100 * low:+.1f} to {100 * high:+.1f}), of {what}"
    if low >= least or high <= -least / (1 + least):
        return Verdict.DIFFERENT, said
    if math.isfinite(high) and -evidence.STARTS <= low <= high <= evidence.STARTS:
        return Verdict.SAME, said
    return Verdict.CANNOT_TELL, said
