"""Profile models by name: build them, run the steps that the schedule needs, show progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xsp import modelname, models, plugins, rundir, scrub
from xsp.collector import Kernels
from xsp.counters import secondrun
from xsp.device import devices
from xsp.errors import PluginError, UsageError
from xsp.launch import children
from xsp.record import output
from xsp.record.session import profile
from xsp.record.settings import Settings

Progress = Callable[[str, int, int], None]
"""Called between steps with the name of the profiled model, the steps done, and the total steps."""


@dataclass(frozen=True)
class ModelRecording:
    """How a run is recorded."""

    settings: Settings
    repeats: int = 12
    is_counter_run: bool = False
    """Whether it runs for hardware counters only, see `xsp.counters.secondrun`."""

    def __post_init__(self) -> None:
        """Reject a number of repeats that measures nothing.

        Raises:
            UsageError: fewer than one repeat.
        """
        if self.repeats < 1:
            raise UsageError(f"--repeats {self.repeats}: at least one timed step per level is needed")


def measure(spec: str, settings: models.Settings, recording: ModelRecording, progress: Progress) -> Path:
    """Profile one model at one batch size, and return its run directory.

    Raises:
        ModelError: the model cannot be built.
        UsageError: invalid levels.
        OutputError: the run directory exists, and `next_free` is not set; or it cannot be written.
    """
    session = profile.of(
        replace(
            recording.settings, name=short_name(spec), batch_size=settings.batch, spread=False, needs_run=True,
            collectors=secondrun.collectors() if recording.is_counter_run else None,
            typed=("profile", _without_directory(spec), *_model_options(settings), "--repeats", str(recording.repeats)),
        )
    )  # fmt: skip
    set_library_variables(recording.settings.kernels)
    workload = models.load(spec, settings)
    fewest = 0 if recording.is_counter_run else recording.repeats
    total = session.schedule.steps_for(fewest)
    if recording.is_counter_run:
        session.describe_once()
    steps, repeats = 0, session.schedule.repeats
    label = f"{short_name(spec)} batch {settings.batch}"
    with children.report_run_on_interrupt() as directories, session:
        directories.append(session.out)
        while steps < total or min(repeats.values()) < fewest:  # short steps settle longer
            progress(label, min(steps, total), total)
            with session.step():
                workload.step()
            steps += 1
        progress(label, total, total)
    return session.out


def sweep(
    spec: str, settings: models.Settings, sizes: Sequence[int], recording: ModelRecording, progress: Progress
) -> Path:
    """Profile one model at several batch sizes into a directory of runs, and return that directory.

    Raises:
        As `measure`.
    """
    parts: list[str] = []
    content = {
        "kind": "sweep",
        "name": short_name(spec),
        "levels": recording.settings.levels,
        "parts": parts,
        "finished": False,
    }
    with output.claim_for_runs(recording.settings) as out:
        for size in sizes:
            name = f"batch-{size:04d}"
            parts.append(name)
            rundir.write_run(out, content)
            part = replace(recording.settings, out=out / name, overwrite=False, next_free=False)
            measure(spec, replace(settings, batch=size), replace(recording, settings=part), progress)
        rundir.write_run(out, {**content, "finished": True})
    return out


def count(spec: str, settings: models.Settings, recording: ModelRecording, out: Path) -> dict[str, Any]:
    """Profile again under Nsight Compute, and join the counters of one step to the run.

    Returns:
        The amounts that were joined, see `xsp.counters.storing.attach`.

    Raises:
        CounterError: there are no counters; the run is unchanged except for a note with the reason.
    """
    run_settings = replace(recording.settings, samples=False, kernels=Kernels.KINETO.value)  # ncu occupies CUPTI
    command = ["--counting", *_model_options(settings)]
    prefix = [sys.executable, "-m", "xsp.cli", "profile", spec]
    return secondrun.count(out, lambda run: [*prefix, *replace(run_settings, out=run).options(), *command])


def _without_directory(spec: str) -> str:
    """Return a model's name as typed; for a model in a file, the file name without its directories."""
    return scrub.command(("", spec))[1] if "/" in spec or ".py:" in spec else spec


def _model_options(settings: models.Settings) -> list[str]:
    """Return the command-line options that build a model in the same way."""
    options = ["--batch", str(settings.batch), "--sequence", str(settings.sequence), "--device", settings.device]
    options += ["--train"] if settings.train else []
    for phase in ("prefill", "decode"):
        number = getattr(settings, phase)
        options += [f"--{phase}", str(number)] if number is not None else []
    return options + (["--input", "x".join(map(str, settings.shape))] if settings.shape is not None else [])


def set_library_variables(kernels: str = Kernels.KINETO.value) -> None:
    """Set the variables that libraries read once, at their first use; see `xsp_collectors.onednn` and its `cuda`.

    Args:
        kernels: requested source of device work; CUPTI makes the GPU's libraries name their calls.
    """
    os.environ.setdefault("ONEDNN_VERBOSE_TIMESTAMP", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if Kernels.parse(kernels) is not Kernels.KINETO:
        try:
            os.environ.update(plugins.load("xsp.collectors", Kernels.CUPTI.value)().environment())
        except PluginError:
            return  # reported, with its consequences, when the profile looks for its collectors


def default_device() -> str:
    """Return what torch calls the first kind of accelerator that is here, `cuda`; else `cpu`."""
    device = next(iter(devices.accelerators()), None)
    return "cpu" if device is None else device.torch_type


def show_no_progress(label: str, done: int, total: int) -> None:
    """Do nothing: a silent `Progress`."""


def short_name(spec: str) -> str:
    """Return the name of a model's run: the model's name, or the file's."""
    parsed = modelname.parse(spec)
    return Path(parsed.source).stem if parsed.is_python else parsed.name.replace("/", "-")
