"""Whether two evaluations are the same: by their environment, their outputs and their latencies.

Each subject is judged on its own. The evaluations are different if one subject is; they are the same if all are;
otherwise the verdict is open, and the reasons say what is missing. Latencies are compared like those of runs
(`xsp.comparison.evidence`). A stored evaluation is one start at one time, however many repeats it has. So a difference
counts only if it exceeds those between two starts of one program and other work on the machine does not explain it;
`settle` repeats the evaluation to measure the spread.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp import stats
from xsp.comparison import evidence

Runs = Sequence[NDArray[Any]]
"""Latencies in nanoseconds, in their order: an array for each run."""

ROUNDING, MORE_THAN_ROUNDING = 16, 64
"""Units in the last place, of the norm of all outputs: up to the first, a difference comes from the order of summation;
beyond the second, from another computation."""

UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}

MOST_ROUNDING = 0.2
"""Relative difference above which it is not rounding, whatever the precision."""

PROCESSOR_SHARES = (0.8, 1.1)
"""Range of processor time over latency within which processor time can replace latency: the request neither waits for
anything else nor computes on several cores."""

LEAST_DISTURBED = 1.05
"""Slowdown of a run's requests above which other work disturbed it."""

NEUTRAL_FACTS = frozenset({"host", "kernel", "agent", "xsp", "started", "pid"})
"""Facts that may differ between two evaluations that are the same; differences are only mentioned."""

MOST_TURNS = 5


class Verdict(enum.Enum):
    """The relation of two evaluations."""

    SAME = "same"
    DIFFERENT = "different"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class RunContext:
    """Circumstances of the latencies of a run."""

    slowdown: float = 1.0
    """Upper bound of the slowdown of its requests by other work: see `xsp.evaluate.contention`."""

    processor_ns: float | None = None
    """Median processor time per request, over all threads; None if the model runs in another process."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an evaluation."""

    outputs: Mapping[str, NDArray[Any]] | None
    """By name, before truncation for display; None if they were not stored."""

    latencies_ns: Mapping[str, Runs]
    """By part of the load, such as the batch size."""

    environment: Mapping[str, str]
    """All facts that influence it: versions, threads, processor, precision, batch, and preprocessing."""

    precision: str = ""
    """Precision of the computation, if it differs from the type of its outputs."""

    contexts: Mapping[str, Sequence[RunContext]] = field(default_factory=dict)
    """By the same names as latencies, one for each run; runs without a context have the defaults."""


@dataclass(frozen=True)
class Reason:
    """The verdict on one subject, with an explanation."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Judgement:
    """The verdict on two evaluations, with its reasons."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = field(default_factory=tuple)

    @property
    def decisive_reasons(self) -> tuple[Reason, ...]:
        """The reasons whose verdict is the overall one."""
        return tuple(reason for reason in self.reasons if reason.verdict is self.verdict)

    def by(self, subject: str) -> Verdict:
        """Return the verdict of the reasons on `environment`, `outputs` or `latency`."""
        return _combined_verdict([reason for reason in self.reasons if reason.subject == subject])


def judge(before: Outcome, after: Outcome) -> Judgement:
    """Return whether two evaluations are the same.

    Args:
        before: the stored evaluation.
        after: the repeated evaluation.
    """
    reasons = [*_environment_reasons(before, after), *_output_reasons(before, after), *_latency_reasons(before, after)]
    return Judgement(_combined_verdict(reasons), tuple(reasons))


def settle(before: Outcome, repeat: Callable[[], Outcome], most_repeats: int = MOST_TURNS) -> Judgement:
    """Repeat an evaluation until it is known whether it is the same, at most `most_repeats` times.

    A difference of the environment or of the outputs decides at once. A difference of latencies alone can be a
    disturbance of the machine, so the evaluation is repeated.

    Args:
        before: the stored evaluation.
        repeat: repeats the evaluation.
        most_repeats: maximum number of evaluations.
    """
    after = repeat()
    judgement = judge(before, after)
    for _ in range(most_repeats - 1):
        verdicts = judgement.by("environment"), judgement.by("outputs")
        if Verdict.DIFFERENT in verdicts or judgement.by("latency") is Verdict.SAME:
            break
        if (
            judgement.by("latency") is Verdict.DIFFERENT
            and min((len(runs) for runs in after.latencies_ns.values()), default=0) >= evidence.MIN_TURNS
        ):
            break
        if not (set(before.latencies_ns) & set(after.latencies_ns)):
            break  # without common latencies repeating decides nothing
        repetition = repeat()
        latencies = {
            part: [*runs, *repetition.latencies_ns.get(part, ())] for part, runs in after.latencies_ns.items()
        }  # fmt: skip
        contexts = {part: [*after.contexts.get(part, ()), *repetition.contexts.get(part, ())] for part in latencies}
        after = replace(repetition, latencies_ns=latencies, contexts=contexts)
        judgement = judge(before, after)
    return judgement


def _combined_verdict(reasons: Sequence[Reason]) -> Verdict:
    verdicts = {reason.verdict for reason in reasons}
    if Verdict.DIFFERENT in verdicts:
        return Verdict.DIFFERENT
    return Verdict.SAME if verdicts == {Verdict.SAME} else Verdict.CANNOT_TELL


# --- environment -------------------------------------------------------------------------------------------------


def _environment_reasons(before: Outcome, after: Outcome) -> Iterator[Reason]:
    facts_before, facts_after = before.environment, after.environment
    if not facts_before or not facts_after:
        yield Reason("environment", Verdict.CANNOT_TELL, "the environment of one result is unknown")
        return
    names = sorted({*facts_before, *facts_after})
    ignored = [name for name in names if name in NEUTRAL_FACTS and facts_before.get(name) != facts_after.get(name)]
    for name in names:
        if name in NEUTRAL_FACTS or facts_before.get(name) == facts_after.get(name):
            continue
        in_both = name in facts_before and name in facts_after
        text = f"{name}: {facts_before.get(name, 'not known')}, then {facts_after.get(name, 'not known')}"
        yield Reason("environment", Verdict.DIFFERENT if in_both else Verdict.CANNOT_TELL, text)
    shared = sum(
        name in facts_before and name in facts_after and facts_before[name] == facts_after[name] for name in names
    )
    if shared:
        remark = f"; differences in {', '.join(ignored)} do not count" if ignored else ""
        yield Reason("environment", Verdict.SAME, f"{shared} facts are equal{remark}")


# --- outputs -----------------------------------------------------------------------------------------------------


def _output_reasons(before: Outcome, after: Outcome) -> Iterator[Reason]:
    if not before.outputs or not after.outputs:
        yield Reason("outputs", Verdict.CANNOT_TELL, "the outputs of one result were not kept")
        return
    if set(before.outputs) != set(after.outputs):
        names = f"{', '.join(sorted(before.outputs))}, then {', '.join(sorted(after.outputs))}"
        yield Reason("outputs", Verdict.DIFFERENT, f"the outputs have different names: {names}")
        return
    reasons = [
        _output_reason(name, np.asarray(array), np.asarray(after.outputs[name]), before.precision)
        for name, array in before.outputs.items()
    ]
    explanation = constant(before.outputs) and constant(after.outputs)
    if explanation and all(reason.verdict is Verdict.SAME for reason in reasons):
        yield Reason("outputs", Verdict.CANNOT_TELL, f"equal, and constant: {explanation}, so equality is meaningless")
    else:
        yield from reasons


def constant(outputs: Mapping[str, NDArray[Any]]) -> str:
    """Return why outputs cannot distinguish models or pipelines; empty if they can.

    They cannot if each output is one number throughout, or the same for all samples. A single sample or number cannot
    show that an output is constant.

    Args:
        outputs: arrays by name, samples along the first axis.
    """
    reasons = []
    for name, output in outputs.items():
        value = np.asarray(output)
        if value.size > 1 and _equal(value, value.flat[0]):
            reasons.append(f"{name} is {value.flat[0]} everywhere")
        elif value.ndim > 1 and len(value) > 1 and value.size and _equal(value, value[:1]):
            reasons.append(f"{name} is the same for all {len(value)} samples")
        else:
            return ""
    return "; ".join(reasons)


def _equal(a: NDArray[Any], b: Any) -> bool:
    """Return whether all numbers are equal; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _output_reason(name: str, before: NDArray[Any], after: NDArray[Any], precision: str) -> Reason:
    def reason(verdict: Verdict, text: str) -> Reason:
        return Reason("outputs", verdict, f"{name}: {text}")

    if before.shape != after.shape or before.dtype != after.dtype:
        detail = f"{before.dtype} of {before.shape}, then {after.dtype} of {after.shape}"
        return reason(Verdict.DIFFERENT, detail)
    if not before.size:
        return reason(Verdict.CANNOT_TELL, "it is empty")
    if before.tobytes() == after.tobytes():
        return reason(Verdict.SAME, f"{before.size} values are equal bit for bit")
    if before.dtype.kind not in "fc":
        unequal = int((before != after).sum())
        verdict = Verdict.DIFFERENT if unequal else Verdict.SAME
        return reason(
            verdict, f"{unequal} of {before.size} values differ" if unequal else f"{before.size} values are equal"
        )
    finite = np.isfinite(before) & np.isfinite(after)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return reason(Verdict.DIFFERENT, "different values are infinite or NaN")
    kind = precision if precision in UNIT else str(before.dtype)
    unit = UNIT.get(kind, float(np.finfo(before.dtype).eps))
    distance = _relative_distance(before[finite], after[finite])
    detail = f"{distance:.2g} of their norm apart, {distance / unit:.3g} units in the last place of {kind}"
    if distance <= min(ROUNDING * unit, MOST_ROUNDING):
        spread = math.inf  # for one sample, or a number without samples
        if before.ndim and len(before) > 1:
            spread = _relative_distance(before[finite], np.broadcast_to(before[:1], before.shape)[finite])
        if distance > MOST_ROUNDING * spread:
            detail += f", but samples differ by {spread:.2g}: the outputs hardly depend on the input"
            return reason(Verdict.CANNOT_TELL, f"as little as rounding, {detail}")
        return reason(Verdict.SAME, f"rounding: {detail}")
    if distance > min(MORE_THAN_ROUNDING * unit, MOST_ROUNDING):
        return reason(Verdict.DIFFERENT, detail)
    return reason(Verdict.CANNOT_TELL, f"more than usual rounding, less than a different computation: {detail}")


def _relative_distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the norm of the difference over the larger norm; values are scaled, so nothing overflows."""
    dtype = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(dtype).ravel(), b.astype(dtype).ravel()
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    if scale == 0:
        return 0.0
    a, b = a / scale, b / scale
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b)))


# --- latency -----------------------------------------------------------------------------------------------------


def _latency_reasons(before: Outcome, after: Outcome) -> Iterator[Reason]:
    shared = [part for part in before.latencies_ns if part in after.latencies_ns]
    if not shared:
        yield Reason("latency", Verdict.CANNOT_TELL, "the results have no latencies of the same kind")
    for part in shared:
        verdict, text = _judge_latencies(_runs_of(before, part), _runs_of(after, part))
        yield Reason("latency", verdict, f"{part}: {text}" if part else text)


@dataclass(frozen=True)
class _Run:
    latencies: list[float]
    context: RunContext

    @property
    def trimmed_mean_ns(self) -> float:
        return stats.trimmed_mean(self.latencies)

    @property
    def processor_ns(self) -> float | None:
        return self.context.processor_ns

    def without_other_work(self) -> _Run:
        """Return the run with lower bounds of its latencies, as if its requests had had the machine to themselves."""
        return replace(self, latencies=[latency / self.context.slowdown for latency in self.latencies])


def _runs_of(outcome: Outcome, part: str) -> list[_Run]:
    runs = outcome.latencies_ns[part]
    contexts = list(outcome.contexts.get(part, ()))
    contexts += [RunContext()] * (len(runs) - len(contexts))
    return [
        _Run(np.asarray(run, float).tolist(), context) for run, context in zip(runs, contexts, strict=False) if len(run)
    ]  # fmt: skip


def _undisturbed(runs: list[_Run]) -> list[_Run]:
    """Return the runs that no other work disturbed; all runs if there is none."""
    return [run for run in runs if run.context.slowdown <= LEAST_DISTURBED] or runs


def _judge_latencies(before: list[_Run], after: list[_Run]) -> tuple[Verdict, str]:
    if not before or not after:
        return Verdict.CANNOT_TELL, "there are no latencies"
    before, after = _undisturbed(before), _undisturbed(after)
    estimate = _evidence(before, after)
    change = f"{100 * estimate.change / estimate.a:+.1f} %" if estimate.a else "not known"
    if estimate.low is None or estimate.high is None or not estimate.a:
        return Verdict.CANNOT_TELL, f"{change}, from too few repeats"
    low, high = estimate.low / estimate.a, estimate.high / estimate.a
    is_single_run = len(before) == len(after) == 1
    basis = "requests of one run each" if is_single_run else f"{len(before)} and {len(after)} runs"
    text = f"{change} ({100 * low:+.1f} to {100 * high:+.1f}), from {basis}"
    slowdowns = [max(run.context.slowdown for run in side) for side in (before, after)]
    undisturbed = [[run.without_other_work() for run in side] for side in (before, after)]
    # bounds: other work delayed one side as much as possible, and did not delay the other
    bounds = _evidence(before, undisturbed[1]), _evidence(undisturbed[0], after)
    if _is_within_start_spread(estimate) and all(map(_is_within_start_spread, bounds)):
        return Verdict.SAME, text
    if max(slowdowns) > LEAST_DISTURBED:
        text += (
            f"; with other work on the machine, up to {slowdowns[0]:.2g} and {slowdowns[1]:.2g} times slower than alone"
        )
        processor_change = _processor_change(before, after)
        if processor_change is not None:
            return Verdict.SAME, f"{text}; requests took {processor_change} of processor time"
    if _sign_beyond_start_spread(bounds[0]) > 0 or _sign_beyond_start_spread(bounds[1]) < 0:
        return Verdict.DIFFERENT, text
    return Verdict.CANNOT_TELL, text


def _evidence(before: list[_Run], after: list[_Run]) -> evidence.Evidence:
    if len(before) == len(after) == 1:
        return evidence.STEPS.evidence(before[0].latencies, after[0].latencies)
    return evidence.RUNS.evidence([run.trimmed_mean_ns for run in before], [run.trimmed_mean_ns for run in after])


def _is_within_start_spread(interval: evidence.Evidence) -> bool:
    """Return whether the whole interval is within the spread of two starts."""
    if interval.low is None or interval.high is None or not interval.a:
        return False
    low, high = interval.low / interval.a, interval.high / interval.a
    return math.isfinite(high) and -evidence.START_SPREAD <= low <= high <= evidence.START_SPREAD


def _sign_beyond_start_spread(interval: evidence.Evidence) -> int:
    """Return 1 if the whole interval is above the spread of two starts, -1 if it is below, else 0."""
    if interval.low is None or interval.high is None or not interval.a:
        return 0
    low, high = interval.low / interval.a, interval.high / interval.a
    return int(low >= evidence.START_SPREAD) - int(high <= -evidence.START_SPREAD / (1 + evidence.START_SPREAD))


def _processor_change(before: list[_Run], after: list[_Run]) -> str | None:
    """Return the change of processor times, if they can replace latencies and are within the spread of two starts.

    They can if the requests of the fastest run compute for most of their time.
    """
    times = [[run.processor_ns for run in side if run.processor_ns is not None] for side in (before, after)]
    if len(times[0]) != len(before) or len(times[1]) != len(after):
        return None
    fastest = min([*before, *after], key=lambda run: run.trimmed_mean_ns)
    share = (fastest.processor_ns or 0.0) / fastest.trimmed_mean_ns if fastest.trimmed_mean_ns else 0.0
    if not PROCESSOR_SHARES[0] <= share <= PROCESSOR_SHARES[1]:
        return None
    if len(times[0]) == len(times[1]) == 1:
        change = times[1][0] / times[0][0] - 1 if times[0][0] else math.inf
        is_within = -evidence.START_SPREAD / (1 + evidence.START_SPREAD) <= change <= evidence.START_SPREAD
        return f"{100 * change:+.1f} %" if is_within else None
    estimate = evidence.RUNS.evidence(*times)
    return f"{100 * estimate.change / estimate.a:+.1f} %" if _is_within_start_spread(estimate) else None
