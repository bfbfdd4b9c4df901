"""Checks of what can be collected on this machine, with the reasons for what cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from xsp import plugins, rundir
from xsp.collector import DeviceCollector
from xsp.counters import ncu
from xsp.device import ceilings, devices
from xsp.device import machine as device
from xsp.device.contract import Device
from xsp.errors import CounterError, PluginError, UsageError
from xsp.importers import contract
from xsp.samples import sampler

_HINTS = {"torch": "pip install 'xsp[torch]'"}


class Recordable(NamedTuple):
    """A collector, a source of samples, or the source of hardware counters."""

    name: str
    levels: str
    reason: str | None
    """Why it cannot work here, and what to do; None if it can."""

    on_request: bool = False
    """Whether it is on only when it is requested by name."""


def machine() -> Iterator[tuple[str, str]]:
    """Yield the properties of this machine as pairs of a name and a value."""
    names = [each.name for each in _initialised()]  # first: what observes devices sees only those
    description = device.describe()
    yield "cpu", f"{description['cpu']}, {description['cores']} cores"
    yield "devices", ", ".join(names) or "no GPU that torch can use"
    yield "python", str(description["python"])
    yield from description["packages"].items()


def collectors() -> Iterator[Recordable]:
    """Yield every installed collector, with the reason if it cannot work here."""
    for name in plugins.names("xsp.collectors"):
        try:
            collector, reason = plugins.collector(name)
            levels = ", ".join(level.name.lower() for level in collector.levels)
            yield Recordable(name, levels, reason, collector.on_request)
        except PluginError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ImportError) else None
            hint = _HINTS.get((missing or "").partition(".")[0])
            yield Recordable(name, "", f"{error.__cause__}; {hint}" if hint else str(error))


def counters() -> Recordable:
    """Return whether Nsight Compute is installed; whether it may read counters shows only when it runs."""
    try:
        ncu.find()
    except CounterError as error:
        return Recordable("counters", "kernel", str(error))
    return Recordable("counters", "kernel", None)


def device_work() -> Iterator[tuple[str, str]]:
    """Yield the details of each source of device work, and the result of its trial with one kernel.

    Nothing if torch has no accelerator. The trial uses a device: call this in a process that does nothing else.
    """
    for name in plugins.names("xsp.collectors"):
        try:
            collector, reason = plugins.collector(name)
        except PluginError:
            continue  # `collectors` reports it
        if not isinstance(collector, DeviceCollector):
            continue
        if not _initialised():
            return
        trial = {} if reason is not None else {"trial": collector.trial() or "passed"}
        # after the trial, which measures the error of the clock
        details = {**{key.replace("_", " "): value for key, value in collector.details().items()}, **trial}
        if details:
            parts = (f"{key}: {value if value is not None else 'unknown'}" for key, value in details.items())
            yield str(collector.device_work), ", ".join(parts)


def _initialised() -> list[Device]:
    """Return the accelerators that torch can use, initialised and in use from then on."""
    found = devices.accelerators()
    for each in found:
        each.initialise()
    return found


def samples() -> Iterator[Recordable]:
    """Yield every source of samples, with the reason if it cannot be read here."""
    for source in sampler.sources_for(os.getpid()):
        yield Recordable(source.name, "samples", source.open())
        source.close()


def broken_plugins() -> Iterator[str]:
    """Yield a sentence for each importer, exporter, analysis, question, command or remark that cannot be used."""
    checks = {contract.GROUP: contract.load_importer, plugins.COMMANDS: plugins.command}
    groups = (contract.GROUP, "xsp.exporters", "xsp.analyses", "xsp.questions", "xsp.graph_questions")
    for group in (*groups, plugins.COMMANDS, plugins.REMARKS):
        for name in plugins.names(group):
            try:
                if group in checks:
                    checks[group](name)
                else:
                    plugins.load(group, name)
            except PluginError as error:
                yield str(error)


def measure(runs: Sequence[str]) -> Iterator[str]:
    """Measure the ceilings of this machine, and store them: for this machine, and in the `run.json` of its runs.

    Args:
        runs: run directories; for a distributed job or a sweep, those of its parts.

    Yields:
        A sentence for each device, and for each run.

    Raises:
        UsageError: torch is not installed, or a run was recorded on another machine.
        TraceError: a directory is not a run.
        OutputError: its `run.json` cannot be written.
    """
    paths = [Path(run) for run in runs]
    contents = {path: rundir.read_run(path) for path in paths}
    processor = device.cpu_model()
    for path, content in contents.items():
        if content.machine.cpu != processor:
            raise UsageError(f"{path}: the run is not of this machine; measure where it was recorded")
    results: dict[str, ceilings.Ceiling] = {}
    for ceiling in ceilings.measure():
        results[ceiling.name] = ceiling
        peaks = ", ".join(f"{kind} {peak / 1e12:.3g}" for kind, peak in ceiling.vector.items())
        sizes = {rate: size for size, rate in ceiling.levels}  # the largest size of each rate
        caches = ", ".join(f"{rate / 1e9:,.0f} GB/s within {size >> 10:,} KiB" for rate, size in sizes.items())
        cache_text = f"; {caches}" if caches else ""
        yield f"{ceiling.name}: {peaks} TFLOP/s, {ceiling.bytes_per_s / 1e9:.4g} GB/s{cache_text}"
    store_path = ceilings.store(results)
    if store_path is not None and not contents:
        yield f"{store_path}: kept, for bounds on this machine"
    ceilings_by_name = {name: ceiling.content() for name, ceiling in results.items()}
    for path, content in contents.items():
        rundir.write_run(path, content | {"machine": content.machine | {"ceilings": ceilings_by_name}})
        yield f"{path}: kept"
