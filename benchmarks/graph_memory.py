"""How well does a graph predict the memory of a training step, by part and against the measured peak?

The prediction runs nothing: the graph is captured on tensors without values. The measurement runs the same step on the
processor, and adds up the allocations and releases that torch.profiler reports to the tensors that exist before it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from parts import turns

from xsp import models
from xsp.cost.held import bytes_of
from xsp.graph import captured, memory
from xsp.models import ModelCall, Settings

MODELS = (
    ("torchvision:resnet18", 8), ("torchvision:resnet50", 4), ("torchvision:mobilenet_v2", 8),
    ("torchvision:densenet121", 4), ("torchvision:vgg11", 4), ("torchvision:efficientnet_b0", 8),
    ("torchvision:vit_b_16", 2), ("torchvision:swin_t", 2), ("timm:convnext_tiny", 4), ("transformers:gpt2", 2),
)  # fmt: skip
QUICK = (("torchvision:resnet18", 2),)
GOAL = 0.10


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__, rounds=3)
    options = turns.parse(parser, arguments)
    report = turns.Report(
        "graph_memory",
        "Memory of a training step at its peak, predicted and measured",
        ("model", "batch", *memory.PARTS, "predicted", "measured", "error", "verdict"),
    )
    for spec, batch in QUICK if options.quick else MODELS:
        settings = Settings(batch=batch, train=True)
        predicted = memory.of(captured.of_name(spec, settings))
        if predicted is None:
            report.notes.append(f"{spec}: the size of a tensor is unknown.")
            continue
        measured = measured_bytes(spec, settings)
        error = predicted.bytes / measured - 1
        report.add(
            [
                spec,
                str(batch),
                *(f"{size / 1e6:.0f} MB" for size in predicted.parts.values()),
                f"{predicted.bytes / 1e6:.0f} MB",
                f"{measured / 1e6:.0f} MB",
                f"{error:+.1%}",
                turns.verdict(turns.Figure(abs(error), abs(error), abs(error)), GOAL),
            ],
            predicted=predicted.as_json(),
            measured=measured,
        )
        turns.say(f"  {spec}: {error:+.1%}")
    report.finish(options)


def measured_bytes(spec: str, settings: Settings) -> int:
    """Return the most bytes of tensors that exist at once in the second step of a model on the processor."""
    import torch

    built = models.build(spec, settings)
    assert isinstance(built, ModelCall)
    built = models.on_device(spec, built, settings)
    step = models.step_of(built, settings)
    step()
    inputs = [one for one in (*built.args, *built.kwargs.values()) if isinstance(one, torch.Tensor)]
    held = sum(map(bytes_of, {id(one): one for one in (*built.model.parameters(), *built.model.buffers())}.values()))
    held += sum(map(bytes_of, inputs))
    held += sum(bytes_of(one.grad) for one in built.model.parameters() if one.grad is not None)  # as many of momentum
    for parameter in built.model.parameters():
        parameter.grad = None
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    current = most = held
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    for event in sorted(events, key=lambda one: one.start_ns()):
        current += event.nbytes()
        most = max(most, current)
    return int(most)


if __name__ == "__main__":
    main()
