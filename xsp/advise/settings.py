"""Advice on how the step is run: training mode, gradients that are not used, more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.advise import calls
from xsp.advise.advice import Advice, Asked, Interval, OfOthers
from xsp.advise.registry import question
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level

RECORDING_US = (0.5, 1.5, 5.0)
"""Microseconds to record an operator for gradients (low, expected, high): 0.9 to 1.7 µs were measured on operators of a
few elements in a loop, with and without inference mode; more where caches are cold and where memory is kept."""

LEAST_NODES = 4
"""Minimum number of operators recorded for gradients for them not to be accidental."""


@question("gradients", "Are operators recorded for gradients that are not used?", number="Q4")
def gradients(asked: Asked) -> Iterator[Advice]:
    """Operators that were recorded for gradients in a step without a backward pass.

    While gradients are recorded, each such operator has a new sequence number.
    """
    whole = calls.step_ms(asked)
    every = list(calls.every(asked))
    if any(each.kind in (Kind.BACKWARD, Kind.OPTIMIZER) or each.phase == "backward" for each in every):
        return
    if _is_training(asked):
        return
    recorded, numbers = [], set()
    for each in every:
        if each.is_op and each.sequence_nr is not None and each.sequence_nr not in numbers:
            numbers.add(each.sequence_nr)
            recorded.append(each)
    if len(recorded) < LEAST_NODES:
        return
    low, value, high = (cost * len(recorded) / 1e3 for cost in RECORDING_US)
    yield Advice(
        "gradients",
        f"{len(recorded):,} operators are recorded for gradients, and no backward pass follows",
        calls.places(recorded),
        Interval(low, value, high).within(whole),
        False,
        100 * value / whole,
        (
            f"recording takes {RECORDING_US[0]:g} to {RECORDING_US[2]:g} µs per operator, and keeps intermediate "
            "results in memory",
        ),
        "with torch.inference_mode(): around the call",
        None,
        "inference_mode",
    )


TRAINING = {"aten::batch_norm": 5, "aten::dropout": 2}
"""Operators that behave differently in training mode → the position of the argument that sets the mode."""


@question("training-mode", "Is the model in training mode, although nothing trains?", number="Q4")
def training_mode(asked: Asked) -> Iterator[Advice]:
    """Dropout and batch norm in training mode in a step without a backward pass; the gain is the time of dropout.

    Batch norm takes about as long in both modes, but in training mode its results depend on the batch, and its
    statistics change.
    """
    whole = calls.step_ms(asked)
    every = list(calls.every(asked))
    if _is_training(asked) or any(each.kind in (Kind.BACKWARD, Kind.OPTIMIZER) for each in every):
        return
    places = ((each, TRAINING.get(each.name)) for each in every)
    found = [each for each, at in places if at is not None and each.scalars[at : at + 1] == [True]]
    if not found:
        return
    dropouts = [each for each in found if each.name == "aten::dropout"]
    ms = sum(each.ns for each in dropouts or found) / 1e6
    norms = len(found) - len(dropouts)
    counts = ((len(dropouts), "dropout"), (norms, "batch norm"))
    named = [f"{count} call{'s' * (count > 1)} of {what}" for count, what in counts if count]
    yield Advice(
        "training-mode",
        f"the model is in training mode, although nothing trains: {' and '.join(named)}",
        calls.places(found),
        calls.interval(ms, calls.ends(asked, dropouts or found)).within(whole),
        not dropouts,
        100 * ms / whole,
        ("results are random" if dropouts else "results depend on the other samples of the batch",),
        "model.eval(); and F.dropout(..., training=self.training) where the function is called",
        "results are those of evaluation mode",
        gain_known=bool(dropouts),
    )


def _is_training(asked: Asked) -> bool:
    """Return whether steps of this kind train, according to the run."""
    trace = asked.traced
    kind = next((each for each in trace.run.kinds if each.kind == trace.kind), None)
    return kind is not None and bool(kind.get("training"))


@question("oversubscription", "Are there more threads than cores?", number="Q2")
def oversubscription(asked: Asked) -> Iterator[Advice]:
    """More PyTorch threads than cores that the program may use: such threads wait for each other."""
    trace = asked.traced
    if trace.has(Level.KERNEL) or trace.run.imported is not None:
        raise OfOthers("host threads do not explain the time of devices, and other profilers do not record threads")
    count, cores = trace.run.machine.get("torch_threads"), trace.run.machine.cores
    if not isinstance(count, int) or not cores:
        raise AnalysisError("the trace does not have threads and cores: a run of xsp does")
    if count <= cores:
        return
    whole = calls.step_ms(asked)
    outer = [each for each in calls.every(asked) if each.is_outer_op]
    ms = min(whole, sum(each.ns for each in outer) / 1e6)
    ends = calls.ends(asked, outer)
    yield Advice(
        "oversubscription",
        f"{count} threads share {cores} core{'s' * (cores > 1)}",
        (),
        calls.interval(ms, ends).within(whole),
        True,
        100 * ms / whole,
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
