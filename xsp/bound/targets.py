"""The device that a bound is of: the processor, an accelerator of this machine, or a product by name.

`--device` has one meaning. A device of this machine (`cuda:0`) has its timings and its measured or quoted peak rates; a
product (`H200`) has quoted peak rates and, if the folder holds timings of it, taken elsewhere and imported, those.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.bench.environment import current_environment
from xsp.bench.timings import Timings
from xsp.bound import timed
from xsp.device import ceilings, devices
from xsp.device.ceilings import Ceiling
from xsp.device.contract import Device
from xsp.errors import AnalysisError, UsageError
from xsp.graph.node import Graph

if TYPE_CHECKING:
    from xsp.store.trace import Trace


MOST_REMARKS = 3
"""Most files of timings that could not be read and are named."""


@dataclass(frozen=True)
class Target:
    """What a bound is of."""

    device: Device | None = None
    """The accelerator of this machine; None for the processor and for a product."""

    quoted: Ceiling | None = None
    """The peak rates of a product by name; None for a device of this machine."""

    stored: Timings | None = None
    """Timings of the accelerator or of the product; None if there are none, or for the processor."""

    notes: tuple[str, ...] = ()

    @property
    def is_processor(self) -> bool:
        """Whether the bound is of this processor, or of what a trace ran on."""
        return self.device is None and self.quoted is None and self.stored is None

    @property
    def kind(self) -> str:
        """Kind of the accelerator or product, whose operators a step has there; empty for the processor, or unknown."""
        if self.stored is not None:
            return str((self.stored.environment.device or {}).get("kind"))
        return "" if self.quoted is None else self.quoted.kind

    @property
    def unquoted(self) -> str:
        """Why a product that has timings has no peak rates; empty for all others."""
        if self.device is not None or self.quoted is not None or self.stored is None:
            return ""
        name = self.stored.environment.device_name
        return f"no peak rates of {name} are known: quote them in a file that {ceilings.VARIABLE} names"

    def check(self, trace: Trace | None, on_device: bool) -> None:
        """Refuse a trace of another device than that of the timings.

        Raises:
            UsageError: it is of another one.
        """
        if trace is None or self.stored is None:
            return
        name = self.stored.environment.device_name
        ran_on = next(iter(trace.run.machine.devices), None) if on_device else (trace.run.machine.cpu or "a processor")
        if ran_on is not None and ran_on != name:
            raise UsageError(
                f"{trace.name} ran on {ran_on}, and the timings are of {name}: give the --device of the run"
            )


def foreign_notes(name: str | None, target: Target, trace: Trace | None) -> list[str]:
    """Return a note if a trace ran on another product than the one by whose peak rates it is judged.

    Args:
        name: what `--device` names.
        target: what a bound is of.
        trace: the trace of the bound.
    """
    ran_on = None if trace is None else next(iter(trace.run.machine.devices), None)
    if trace is None or name is None or target.quoted is None or ran_on is None or ceilings.is_named(name, ran_on):
        return []
    return [f"ceiling: of {target.quoted.name}, and {trace.name} ran on {ran_on}: omit --device, or name that"]


def of(
    name: str | None,
    timings: Timings | Path | str | None,
    like: str | None,
    *,
    is_filled: bool = False,
    has_blocks: bool = False,
) -> Target:
    """Return what a bound is of, before anything takes time.

    Args:
        name: `cuda:0`, `cpu`, or the name of a product; None for the processor.
        timings: open timings, or their folder.
        like: hash of an environment whose timings replace missing ones.
        is_filled: whether timings are to be taken.
        has_blocks: whether blocks of several calls are asked for.

    Raises:
        DeviceError: there is no such device here.
        AnalysisError: there is no such product.
        BenchError: timings cannot be read.
        UsageError: timings of a product are to be taken.
    """
    if name is None:
        return Target()
    if devices.is_id(name):
        device = devices.of(name)
        if device.is_host:
            return Target()
        if isinstance(timings, Timings) and timings.environment.device is not None:
            return Target(device, None, timings)
        folder = timings.folder if isinstance(timings, Timings) else timings
        return Target(device, None, Timings.open(folder, current_environment(device), like))
    if is_filled or has_blocks:
        raise UsageError(
            f"--device {name} is the name of a product, whose calls cannot be timed here: omit --fill and --construct, "
            f"or give a device of this machine, {devices.example()}"
        )
    if like is not None:
        raise UsageError(f"--device {name} selects the timings of that product: omit --like")
    stored, notes = _of_product(name, timed.open_timings(timings, None))
    return Target(None, _quoted(name, is_timed=stored is not None), stored, notes)


def bench_command(graph: Graph, device: str | None) -> str:
    """Return the command that times the calls and the step of a graph."""
    settings, words = graph.settings, []
    words += [f"--device {device}"] if device else []
    words += [f"--batch {settings['batch']}"] if settings.get("batch") not in (None, 1) else []
    words += ["--train"] if settings.get("train") else []
    return " ".join(["xsp bench", graph.name, *words])


def filled(command: str, budget: str) -> str:
    """Return a command that takes missing timings: here, or of a product where it is.

    Args:
        command: the command without `--fill`, as a user types it.
        budget: the value of `--fill`.
    """
    words = shlex.split(command)
    product = product_of(words)
    if product is None:
        return f"{command} --fill {budget}"
    place = words.index("--device")
    elsewhere = shlex.join([*words[:place], *words[place + 2 :], "--fill", budget])
    return devices.timed_elsewhere(elsewhere, product)


def product_of(words: Sequence[str]) -> str | None:
    """Return the product that a command names by `--device`; None for a device of a machine, and without the option."""
    name = words[words.index("--device") + 1] if "--device" in words[:-1] else None
    return None if name is None or devices.is_id(name) else name


def how_to_time(graph: Graph, device: str | None) -> str:
    """Return what to type so that the calls of a graph are timed: here, or of a product on a machine that has it.

    Args:
        graph: the graph of a step.
        device: `--device` of the command that needs the timings.
    """
    if device is None or devices.is_id(device):
        return f"{bench_command(graph, device)}, or --fill 60s"
    return devices.timed_elsewhere(bench_command(graph, None), device)


def of_stored(name: str, timings: Timings | Path | str | None) -> Target:
    """Return a product with the timings of it that a folder holds; the processor's target if it holds none.

    Args:
        name: name of a product, as a run has it.
        timings: open timings, or their folder.
    """
    stored, notes = _of_product(name, timed.open_timings(timings, None))
    if stored is None:
        return Target()
    return Target(None, _quoted(name, is_timed=True), stored, notes)


def _quoted(name: str, is_timed: bool) -> Ceiling | None:
    """Return the published peak rates of a product; None if there are none, and it has timings.

    Raises:
        AnalysisError: there are neither.
    """
    try:
        return ceilings.ceiling_by_user_name(name)
    except AnalysisError:
        if not is_timed:
            raise
        return None


def _of_product(name: str, opened: Timings) -> tuple[Timings | None, tuple[str, ...]]:
    """Return the timings of a product: of the environment that has most, and a note if there are others."""
    if opened.environment.device is not None:
        return (opened if ceilings.is_named(name, opened.environment.device_name) else None), ()
    fitting = {
        hash_: environment
        for hash_, environment in opened.environments().items()
        if environment.device is not None and ceilings.is_named(name, environment.device_name)
    }
    if not fitting:
        return None, tuple(f"timings: {remark}" for remark in opened.remarks[:MOST_REMARKS])
    counts = {hash_: len(opened.all_of(hash_)) for hash_ in fitting}
    chosen = max(counts, key=lambda hash_: counts[hash_])
    others = len(fitting) - 1
    note = f"timings: of environment {chosen}, which has most of {others + 1} of {name}: xsp bench --list"
    return Timings.open(opened.folder, fitting[chosen]), (note,) if others else ()
