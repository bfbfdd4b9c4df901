"""A training step by phases and layers, as a document and as plain values."""

from __future__ import annotations

import shlex
from typing import Any

from xsp.bound.ladder import NAMES
from xsp.bound.phases import NO_LAYER, Training
from xsp.graph.node import Phase
from xsp.sections import Part, Section, Table, Text
from xsp.texts import milliseconds


def section(training: Training, source: str, step: str = "") -> Section:
    """Return a row for each phase, the layers, and the share of the backward pass that could overlap.

    Args:
        training: the step.
        source: the source as the user named it, for the command that adds what is missing.
        step: options of the step as the user typed them.
    """
    rungs = training.by_rung
    columns = ("phase", "calls", *(f"{NAMES[rung]}_ns" for rung in rungs), "± 95 %_ns", "off its path_ns")
    phases = tuple(
        (phase.phase.value, phase.calls, *(rows[place].ns for rows in rungs.values()), phase.half_ns, phase.off_path_ns)
        for place, phase in enumerate(training.phases)
    )
    layers = sorted(
        ((layer.module, layer.forward_ns, layer.backward_ns, layer.update_ns, layer.parameter_bytes)
         for layer in training.layers), key=lambda row: -sum(ns or 0.0 for ns in row[1:4])
    )  # fmt: skip
    parts: list[Part] = [Table(columns, phases)]
    names = ("layer", "forward_ns", "backward_ns", "update_ns", "gradients_bytes")
    parts.append(Table(names, tuple(layers), f"layers, {NAMES[training.rung]}"))
    backward = next((phase for phase in training.phases if phase.phase is Phase.BACKWARD), None)
    if backward is not None and backward.off_path_ns is not None and backward.ns:
        share = 100 * backward.off_path_ns / backward.ns
        remark = (
            f"{share:.0f} % of the backward pass is off its longest path, mostly weight gradients: no later call of "
        )
        parts.append(Text(f"{remark}the pass needs them, so they could overlap with other work."))
    if training.holes:
        command = f"{shlex.quote(source)} {step}".rstrip()
        remedy = f": xsp bound {command} --phases --fill 60s" if training.can_time else ""
        parts.append(Text(f"{training.holes} calls have no figure{remedy}"))
    return Section(training.name, tuple(parts))


def as_json(training: Training) -> dict[str, Any]:
    """Return the output of `xsp bound SOURCE --phases --format json`; null is unknown, 0 is none."""
    return {
        "name": training.name,
        "rung": training.rung.value,
        "phases": {
            phase.phase.value: {
                "calls": phase.calls,
                "known": phase.known_calls,
                "ns": phase.ns,
                "half_ns": phase.half_ns,
                "path_ns": phase.path_ns,
                "off_path_ns": phase.off_path_ns,
            }
            for phase in training.phases
        },
        "by_rung": {
            rung.value: {phase.phase.value: phase.ns for phase in phases} for rung, phases in training.by_rung.items()
        },
        "layers": [
            {
                "module": layer.module,
                "forward_ms": milliseconds(layer.forward_ns),
                "backward_ms": milliseconds(layer.backward_ns),
                "update_ms": milliseconds(layer.update_ns),
                "gradient_bytes": layer.parameter_bytes,
                "calls": layer.calls,
            }
            for layer in training.layers
            if layer.module != NO_LAYER
        ],
        "of_no_layer_update_ms": next(
            (milliseconds(layer.update_ns) for layer in training.layers if layer.module == NO_LAYER), 0.0
        ),
        "holes": training.holes,
    }
