"""A training step by phases and layers, as text for 80 columns and as plain values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from xsp.bound.ladder import NAMES, Rung
from xsp.bound.phases import NO_LAYER, PhaseTotal, Training
from xsp.graph.node import Phase
from xsp.scrub import plain
from xsp.texts import amount, milliseconds, ns_text

MOST_LAYERS = 20


def page(training: Training, source: str, step: str = "") -> str:
    """Return a line for each phase, the longest layers, and the share of the backward pass that could overlap."""
    rungs = list(training.by_rung)
    heads = "".join(f"{NAMES[rung]:>11}" for rung in rungs)
    return "\n".join(
        [
            plain(training.name),
            "",
            f"{'phase':12}{'calls':>7}{heads}{'± 95 %':>10}{'off its path':>14}",
            *_phases(training, rungs),
            "",
            f"layers, {NAMES[training.rung]}:",
            f"{'layer':30}{'forward':>10}{'backward':>10}{'update':>10}{'gradients':>11}",
            *_layers(training),
            "",
            *_remarks(training, f"{shlex.quote(source)} {step}".rstrip()),
        ]
    )


def _phases(training: Training, rungs: list[Rung]) -> list[str]:
    lines = []
    for index, phase in enumerate(training.phases):
        cells = "".join(f"{ns_text(training.by_rung[rung][index].ns):>11}" for rung in rungs)
        off_path = ns_text(phase.off_path_ns)
        lines.append(f"{phase.phase.value:12}{phase.calls:7,}{cells}{ns_text(phase.half_ns):>10}{off_path:>14}")
    return lines


def _layers(training: Training) -> list[str]:
    def total_ns(layer: Any) -> float:
        return sum(ns or 0.0 for ns in (layer.forward_ns, layer.backward_ns, layer.update_ns))

    lines = []
    for layer in sorted(training.layers, key=total_ns, reverse=True)[:MOST_LAYERS]:
        name = plain(layer.module)
        name = name if len(name) <= 29 else "…" + name[-28:]
        cells = "".join(f"{ns_text(ns):>10}" for ns in (layer.forward_ns, layer.backward_ns, layer.update_ns))
        lines.append(f"{name:30}{cells}{amount(layer.parameter_bytes, 'B'):>11}")
    remaining = len(training.layers) - MOST_LAYERS
    return [*lines, *([f"{remaining} more in --format json"] if remaining > 0 else [])]


def _remarks(training: Training, source: str) -> list[str]:
    lines = []
    backward = next((phase for phase in training.phases if phase.phase is Phase.BACKWARD), None)
    if backward is not None and backward.off_path_ns is not None and backward.ns:
        share = 100 * backward.off_path_ns / backward.ns
        lines.append(f"{share:.0f} % of the backward pass is off its longest path, mostly weight gradients:")
        lines.append("no later call of the pass needs them, so they could overlap with other work.")
    if training.holes:
        remedy = f": xsp bound {plain(source)} --phases --fill 60s" if training.can_time else ""
        lines += [f"{training.holes} calls have no figure{remedy}"]
    return lines


def as_json(training: Training) -> dict[str, Any]:
    """Return the output of `xsp bound SOURCE --phases --format json`; null is unknown, 0 is none."""
    return {
        "name": training.name,
        "rung": training.rung.value,
        "phases": {phase.phase.value: _phase(phase) for phase in training.phases},
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


def _phase(phase: PhaseTotal) -> Mapping[str, Any]:
    return {
        "calls": phase.calls,
        "known": phase.known_calls,
        "ns": phase.ns,
        "half_ns": phase.half_ns,
        "path_ns": phase.path_ns,
        "off_path_ns": phase.off_path_ns,
    }
