"""Advice on how the step is run: training mode, gradients that are not used, more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.advise import calls, faults
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere
from xsp.advise.backward import unused_recordings
from xsp.advise.device import is_training
from xsp.advise.registry import question
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.stats import Interval
from xsp.texts import counted

RECORDING_US = (0.5, 1.5, 5.0)
"""Microseconds to record an operator for gradients (low, expected, high): 0.9 to 1.7 µs were measured on operators of a
few elements in a loop, with and without inference mode; more where caches are cold and where memory is kept."""


@question("gradients", "Are operators recorded for gradients that are not used?", number="Q4")
def gradients(context: AdviceContext) -> Iterator[Advice]:
    """Operators that were recorded for gradients in a step without a backward pass.

    Their results are kept to the end of the step, so that each operator writes to other memory: page faults go along.
    """
    step_ms = calls.step_ms(context)
    recorded_ops = unused_recordings(context)
    if not recorded_ops:
        return
    gain, why = _recording(context, len(recorded_ops))
    yield Advice(
        "gradients",
        f"{len(recorded_ops):,} operators are recorded for gradients, and no backward pass follows",
        calls.places(recorded_ops),
        gain.limit(step_ms),
        False,
        min(100.0, 100 * gain.value / step_ms),
        why,
        "with torch.inference_mode(): around the call",
        None,
        "inference_mode",
    )


def _recording(context: AdviceContext, count: int) -> tuple[Interval, tuple[str, ...]]:
    """Return the milliseconds that recording so many operators takes, with the page faults of what is kept; and why."""
    low, value, high = (cost * count / 1e3 for cost in RECORDING_US)
    why = (
        f"recording takes {RECORDING_US[0]:g} to {RECORDING_US[2]:g} µs per operator, and keeps intermediate results "
        "in memory"
    )
    kept = faults.worth_a_line(context)
    if kept is None:
        return Interval(low, value, high), (why,)
    return Interval(low, value + kept.gain.value, high + kept.gain.high), (
        why,
        f"page faults of such memory: {kept.text}",
    )


TRAINING_ARGUMENTS = {"aten::batch_norm": 5, "aten::dropout": 2}
"""Operators that behave differently in training mode → the position of the argument that sets the mode."""


@question("training-mode", "Is the model in training mode, although nothing trains?", number="Q4")
def training_mode(context: AdviceContext) -> Iterator[Advice]:
    """Dropout and batch norm in training mode in a step without a backward pass; the gain is the time of dropout.

    Batch norm takes about as long in both modes, but in training mode its results depend on the batch, and its
    statistics change.
    """
    step_ms = calls.step_ms(context)
    all_calls = list(calls.walk(context))
    if is_training(context.required_trace) or any(call.kind in (Kind.BACKWARD, Kind.OPTIMIZER) for call in all_calls):
        return
    candidates = ((call, TRAINING_ARGUMENTS.get(call.name)) for call in all_calls)
    training_calls = [
        call
        for call, position in candidates
        if position is not None and call.scalars[position : position + 1] == [True]
    ]
    if not training_calls:
        return
    dropouts = [call for call in training_calls if call.name == "aten::dropout"]
    ms = sum(call.ns for call in dropouts or training_calls) / 1e6
    norms = len(training_calls) - len(dropouts)
    counts = ((len(dropouts), "dropout"), (norms, "batch norm"))
    parts = [f"{counted(count, 'call')} of {noun}" for count, noun in counts if count]
    yield Advice(
        "training-mode",
        f"the model is in training mode, although nothing trains: {' and '.join(parts)}",
        calls.places(training_calls),
        calls.interval(ms, calls.interval_factors(context, dropouts or training_calls)).limit(step_ms),
        not dropouts,
        100 * ms / step_ms,
        ("results are random" if dropouts else "results depend on the other samples of the batch",),
        "model.eval(); and F.dropout(..., training=self.training) where the function is called",
        "results are those of evaluation mode",
        gain_known=bool(dropouts),
    )


@question("oversubscription", "Are there more threads than cores?", number="Q2")
def oversubscription(context: AdviceContext) -> Iterator[Advice]:
    """More PyTorch threads than cores that the program may use: such threads wait for each other."""
    trace = context.required_trace
    if trace.has(Level.KERNEL) or trace.run.imported is not None:
        raise CoveredElsewhere(
            "host threads do not explain the time of devices, and other profilers do not record threads"
        )
    threads, cores = trace.run.machine.get("torch_threads"), trace.run.machine.cores
    if not isinstance(threads, int) or not cores:
        raise AnalysisError("the trace does not have threads and cores: a run of xsp does")
    if threads <= cores:
        return
    step_ms = calls.step_ms(context)
    outer_ops = calls.outer_ops(context)
    ms = min(step_ms, sum(op.ns for op in outer_ops) / 1e6)
    factors = calls.interval_factors(context, outer_ops)
    yield Advice(
        "oversubscription",
        f"{threads} threads share {counted(cores, 'core')}",
        (),
        calls.interval(ms, factors).limit(step_ms),
        True,
        100 * ms / step_ms,
        (
            f"operators take {ms:.3g} ms of a step; threads without a core wait for those that have one",
            "the cost, from nothing to several times the step, depends on how they wait: --try 1 tries it, "
            "--fill 60s times single calls with both numbers",
        ),
        f"OMP_NUM_THREADS={cores}, or torch.set_num_threads({cores})",
        None,
        f"threads={cores}",
        gain_known=False,
    )
