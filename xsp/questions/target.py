"""The device whose timings answer questions: that of --device, that of the trace, or the processor."""

from __future__ import annotations

import shlex

from xsp.advise import AdviceContext, provides
from xsp.bench.environment import current_environment
from xsp.bound import recordedcalls, targets
from xsp.bound.targets import Target
from xsp.device import devices
from xsp.errors import AnalysisError
from xsp.store.trace import Trace

FILL_HINT = "take them first: --fill 60s"


@provides("target")
def target(context: AdviceContext) -> Target:
    """Return the device of the timings.

    Without --device it is that of the trace: a device of this machine of the same name, else a product with timings in
    the folder. A model without a trace is timed on the processor.

    Raises:
        DeviceError: there is no such device here.
        AnalysisError: there is no such product.
        UsageError: the trace ran on another device, or timings of a product are to be taken.
    """
    trace, settings = context.trace, context.settings
    on_device = trace is not None and recordedcalls.has_device_work(trace)
    name = settings.get("device")
    timings, like, fill = settings.get("timings"), settings.get("like"), settings.get("fill")
    if name is None and on_device and trace is not None:
        return _of_trace(trace, context)
    found = targets.of(name, timings, like, is_filled=bool(fill))
    if trace is not None and name is not None and found.is_processor and on_device:
        raise AnalysisError(f"{trace.name} ran on {_product(trace)}: give its --device, or omit it")
    found.check(trace, on_device)
    return found


def _of_trace(trace: Trace, context: AdviceContext) -> Target:
    """Return the device on which a trace ran, with its timings if there are any."""
    product, timings = _product(trace), context.settings.get("timings")
    if product is None:
        return Target()
    here = next((each for each in devices.present() if not each.is_host and each.name == product), None)
    if here is not None:
        return targets.of(here.id, timings, context.settings.get("like"))
    return targets.of_stored(product, timings)


def _product(trace: Trace) -> str | None:
    return next(iter(trace.run.machine.devices), None)


def reason_without_timings(context: AdviceContext) -> str | None:
    """Return why there are no timings for the subject of the questions, and how to take some; None if there may be."""
    found: Target = context.part("target")
    if found.stored is not None or (found.is_processor and not recordedcalls.is_foreign(context.trace)):
        return None
    trace = context.trace
    name = context.settings.get("device") or (_product(trace) if trace is not None else None)
    if name is None:
        return "single calls are timed on this processor, and the step ran on another one"
    return _not_timed(context, name)


def remedy(context: AdviceContext) -> str:
    """Return what to do where timings of the subject are missing, although there are some of its device."""
    found: Target = context.part("target")
    if found.device is None and found.stored is not None:
        return _not_timed(context, found.stored.environment.device_name)
    return FILL_HINT


def _not_timed(context: AdviceContext, product: str) -> str:
    source = "MODEL" if context.source is None else shlex.quote(context.source)
    command = f"xsp bench {'--missing-of ' if context.trace is not None else ''}{source}"
    return f"single calls of {product} are not timed: {devices.timed_elsewhere(command, product)}"


@provides("note")
def processor_note(context: AdviceContext) -> str:
    """Return a sentence that a model is timed on the processor although there are devices; else an empty text."""
    found: Target = context.part("target")
    has_choice = context.trace is None and context.settings.get("device") is None and found.is_processor
    return current_environment().processor_note if has_choice else ""
