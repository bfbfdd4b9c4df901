"""Measurement of steps of a language model at several lengths, in turns, without profiling."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xsp import models, stats
from xsp.errors import UsageError

LEAST_ROUNDS = 5
MOST_ROUNDS = 200

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class MeasuredStep:
    """The measured time of a step."""

    ns: float
    """Trimmed mean of the rounds."""

    low: float | None
    high: float | None
    """Ends of the 95 % interval; None for too few rounds."""

    rounds: tuple[int, ...]


def measure(
    model: Any,
    phases: Sequence[str],
    lengths: Sequence[int],
    batch: int,
    threads: int,
    seconds: float,
    seed: int = 0,
    progress: Progress = lambda name, round_count, total: None,
) -> dict[tuple[str, int], MeasuredStep]:
    """Return the measured steps by phase and length; each round runs each step once, in random order.

    Args:
        model: name of a model; a module raises an error, because it would be moved and changed.
        phases: "prefill", "decode".
        lengths: numbers of tokens.
        batch: sequences in a step.
        threads: threads of torch during the measurement; the previous number is restored afterwards.
        seconds: seconds to spend, without building the model; at least `LEAST_ROUNDS` rounds are measured.
        seed: seed of weights, tokens and order.
        progress: called after each round.

    Raises:
        ModelError: the model cannot be built or run.
    """
    import torch

    if not isinstance(model, str):
        raise UsageError("steps can be measured only of a model by name")
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = build_steps(model, phases, lengths, models.Settings(batch=batch, seed=seed))
        rounds: dict[tuple[str, int], list[int]] = {key: [] for key in steps}
        order = list(steps)
        rng = random.Random(seed)
        for step in steps.values():
            step()
        deadline = time.perf_counter() + seconds
        round_count = 0
        while round_count < LEAST_ROUNDS or (round_count < MOST_ROUNDS and time.perf_counter() < deadline):
            rng.shuffle(order)
            for key in order:
                start = time.perf_counter_ns()
                steps[key]()
                rounds[key].append(time.perf_counter_ns() - start)
            round_count += 1
            progress("steps", round_count, max(round_count, LEAST_ROUNDS))
    finally:
        torch.set_num_threads(previous_threads)
    return {key: _figure(times) for key, times in rounds.items()}


def build_steps(
    spec: str, phases: Sequence[str], lengths: Sequence[int], settings: models.Settings
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return the steps by phase and length; all share one model, because the weights are equal."""
    model = models.build(spec, _settings(settings, phases[0], lengths[0]))
    assert isinstance(model, models.ModelCall)
    steps = {}
    for phase in phases:
        for length in lengths:
            step_settings = _settings(settings, phase, length)
            built = models.on_device(
                spec, models.of_phase(spec, models.ModelCall(model.model, (), {}), step_settings), step_settings
            )
            steps[phase, length] = models.step_of(built, step_settings)
    return steps


def _settings(settings: models.Settings, phase: str, length: int) -> models.Settings:
    return replace(settings, decode=length) if phase == "decode" else replace(settings, prefill=length)


def _figure(times: Sequence[int]) -> MeasuredStep:
    interval = stats.interval(times)
    low, high = (None, None) if interval is None else interval.ends
    return MeasuredStep(stats.trimmed_mean(times), low, high, tuple(times))
