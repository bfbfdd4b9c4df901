"""Steps of a language model at several lengths, measured in turns, without xsp in them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xsp import models, summary
from xsp.errors import UsageError

LEAST_ROUNDS = 5
MOST_ROUNDS = 200

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """A step as it was measured."""

    ns: float
    """The trimmed mean of the rounds."""

    low: float | None
    high: float | None
    """Ends of the 95 % interval; None of too few rounds."""

    rounds: tuple[int, ...]


def measure(
    what: Any,
    phases: Sequence[str],
    lengths: Sequence[int],
    batch: int,
    threads: int,
    seconds: float,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> dict[tuple[str, int], Measured]:
    """Return what steps of each phase at each length take; in each round each has one turn, in an order drawn anew.

    Args:
        what: the name of a model; a module is refused, since it would be moved and changed.
        phases: "prefill", "decode".
        lengths: numbers of tokens.
        batch: sequences.
        threads: of torch while it is measured; afterwards they are as before.
        seconds: to spend, building not included; at least `LEAST_ROUNDS` rounds are measured.
        seed: of weights, tokens and order.
        progress: called for each round.

    Raises:
        ModelError: the model cannot be built or run.
    """
    import torch

    if not isinstance(what, str):
        raise UsageError("steps are measured of a model by name")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = ready(what, phases, lengths, models.Settings(batch=batch, seed=seed))
        rounds: dict[tuple[str, int], list[int]] = {key: [] for key in steps}
        order = list(steps)
        drawn = random.Random(seed)
        for step in steps.values():
            step()
        until = time.perf_counter() + seconds
        done = 0
        while done < LEAST_ROUNDS or (done < MOST_ROUNDS and time.perf_counter() < until):
            drawn.shuffle(order)
            for key in order:
                began = time.perf_counter_ns()
                steps[key]()
                rounds[key].append(time.perf_counter_ns() - began)
            done += 1
            progress("steps", done, max(done, LEAST_ROUNDS))
    finally:
        torch.set_num_threads(before)
    return {key: _figure(taken) for key, taken in rounds.items()}


def ready(
    spec: str, phases: Sequence[str], lengths: Sequence[int], settings: models.Settings
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return the steps by phase and length; all have one model, since its weights are the same."""
    first = models.build(spec, _settings(settings, phases[0], lengths[0]))
    assert isinstance(first, models.Built)
    found = {}
    for phase in phases:
        for length in lengths:
            each = _settings(settings, phase, length)
            built = models.placed(spec, models.of_phase(spec, models.Built(first.model, (), {}), each), each)
            found[phase, length] = models.step_of(built, each)
    return found


def _settings(settings: models.Settings, phase: str, length: int) -> models.Settings:
    return replace(settings, decode=length) if phase == "decode" else replace(settings, prefill=length)


def _figure(taken: Sequence[int]) -> Measured:
    ends = summary.interval(taken)
    low, high = (None, None) if ends is None else ends
    return Measured(summary.trimmed_mean(taken), low, high, tuple(taken))
