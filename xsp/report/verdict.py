"""What a trace of a device says in three words: verdict, why, next.

The verdict names what to change first. It follows from the device's time alone: how much of it is idle and for which
cause, how much is communication that nothing hides, and which class of kernel takes most of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xsp.device.kernelnames import MATRIX
from xsp.report.answers import Answers

BUSY, EXPOSED = 80.0, 20.0
"""Percent of the window: from so much on the device is called busy, communication the thing to change."""

WORTH = 5.0
"""Percent of the window from which on a loss is worth a line."""

COMMUNICATION, COPIES = "exposed communication", "exposed copies"

NEXT = {
    "idle, host-bound": "launch less and earlier: CUDA graphs, torch.compile, fused optimisers, a larger batch; "
    "`launch-bound` names the layers",
    "idle, sync": "find what waits for the device: .item(), .cpu(), prints, boolean masks; `idle-gaps` names them",
    "idle, data loading": "more workers, pinned memory, prefetching; `idle-gaps` shows the steps that wait",
    "idle, kernel wait": "look for streams that wait for each other, and for allocations between kernels: `idle-gaps`",
    COMMUNICATION: "overlap it with computation, or send less: larger buckets, lower precision; see `communication`",
    COPIES: "pinned memory and a stream of their own hide copies; what can stay on the device need not be copied",
}
"""What helps against each loss (see the analyses `idle-causes` and `device-activity`)."""

CLASS_NEXT = {
    "gemm": "lower precision and sizes that are multiples of 8 bring tensor cores in: `tensor-cores`",
    "convolution": "channels-last and lower precision bring tensor cores in: `tensor-cores`",
    "attention": "a fused attention kernel, if it is not one already: A10 names them",
    "elementwise": "fusing them saves memory traffic: torch.compile",
    "normalisation": "fusing them saves memory traffic: torch.compile",
    "reduction": "fusing them saves memory traffic: torch.compile",
}
"""What helps where a class of kernels takes most of the time (see the analysis `kernel-classes`)."""

Row = Mapping[str, Any]


class Loss(NamedTuple):
    """Time of the window that is lost to something."""

    name: str
    percent: float
    ms: float


class Verdict(NamedTuple):
    """A sentence, the reasons, what to do; and the figures that they rest on."""

    verdict: str
    why: list[str]
    next: list[str]
    busy_percent: float
    losses: list[Loss]


def verdict(answers: Answers) -> Verdict | None:
    """Return what a trace of devices says; None where it holds no device work."""
    activity = answers["device-activity"].dicts()
    if not activity or not activity[-1]["window_ms"]:
        return None
    whole = activity[-1]  # of several devices their sum
    causes = _causes(answers, whole["window_ms"])
    exposed = [
        _loss(COMMUNICATION, whole["exposed_communication_ms"], whole),
        _loss(COPIES, whole["exposed_copy_ms"], whole),
    ]
    losses = sorted([*causes, *exposed], key=_worst_first)
    classes = answers["kernel-classes"].dicts()
    return Verdict(
        _sentence(whole, causes, exposed, classes),
        [*_lost(losses), *_classes(classes)],
        _advice(whole, losses, classes),
        whole["busy_percent"],
        losses,
    )


def _loss(name: str, ms: float, whole: Row) -> Loss:
    return Loss(name, 100 * ms / whole["window_ms"], ms)


def _worst_first(loss: Loss) -> float:
    return -loss.ms


def _causes(answers: Answers, window_ms: float) -> list[Loss]:
    """Return idle time by cause over all devices, the most first."""
    sums: dict[str, float] = {}
    for row in answers["idle-causes"].dicts():
        sums[row["cause"]] = sums.get(row["cause"], 0.0) + row["idle_ms"]
    return sorted((Loss(f"idle, {cause}", 100 * ms / window_ms, ms) for cause, ms in sums.items()), key=_worst_first)


def _sentence(whole: Row, causes: Sequence[Loss], exposed: Sequence[Loss], classes: Sequence[Row]) -> str:
    """Say how busy the device is, and what takes most of the rest or most of the work."""
    busy = f"The device is busy {whole['busy_percent']:.0f} % of the time"
    worst, cause = max(exposed, key=lambda loss: loss.ms), next(iter(causes), None)
    if worst.percent >= EXPOSED and (cause is None or worst.ms >= cause.ms):
        return f"{busy}. {worst.name.capitalize()}: {worst.percent:.0f} %."
    if whole["busy_percent"] >= BUSY or cause is None:
        return f"{busy}" + (f"; most of its work is {classes[0]['class']}." if classes else ".")
    name = cause.name.removeprefix("idle, ")
    return f"{busy}. {name.capitalize()}, {cause.percent:.0f} %: {_MEANS.get(name, 'the trace does not tell why')}."


_MEANS = {
    "host-bound": "launches come too late",
    "sync": "the host waits for the device before it launches on",
    "data loading": "the step waits for data",
    "kernel wait": "what was launched waits for other work",
}


def _lost(losses: Sequence[Loss]) -> list[str]:
    worth = [loss for loss in losses if loss.percent >= WORTH]
    return [f"{loss.percent:.0f} % of the time: {loss.name} ({loss.ms:.4g} ms)" for loss in worth]


def _classes(classes: Sequence[Row]) -> list[str]:
    named = [f"{row['class']} {row['percent_of_device_time']:.0f} %" for row in classes[:4]]
    return [f"device work: {', '.join(named)}"] if named else []


def _advice(whole: Row, losses: Sequence[Loss], classes: Sequence[Row]) -> list[str]:
    """Return what helps against the two largest losses, and what helps the class of most of the work."""
    worst = sorted((loss for loss in losses if loss.percent >= WORTH and loss.name in NEXT), key=_worst_first)
    advice = [f"{loss.name}: {NEXT[loss.name]}" for loss in worst[:2]]
    return advice + (_for_class(classes[0]) if classes and whole["busy_percent"] >= BUSY / 2 else [])


def _for_class(row: Row) -> list[str]:
    """Return what helps a class of kernels, if anything general does; tensor cores that are used need no advice."""
    name, used = row["class"], row["with_tensor_cores_ms"] or 0.0
    if name in MATRIX and 2 * used > (row["matrix_ms"] or 0.0):
        return [f"{name}: it uses tensor cores; the rooflines (A9, A14) say how far it is from the peak"]
    return [f"{name}: {CLASS_NEXT[name]}"] if name in CLASS_NEXT else []
