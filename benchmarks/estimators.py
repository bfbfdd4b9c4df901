"""What predicts a step best: timed layers, FLOPs and peak, FLOPs and bytes with a roofline, or PyTorch's estimator?

PyTorch's estimator, `torch.distributed._tools.runtime_estimator.RuntimeEstimator`, runs in both of its modes on the
same models; if it refuses the machine, its reason is in the notes. Steps and timings are measured as in
`construction.py`, and kept in the same `--out`. The peak is the highest measured rate of a matrix product here.

With `--train` the steps are training steps, by default of ten models, and PyTorch's estimator is not run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parts import steps, turns

from xsp import bench, graph, models
from xsp.bound import construct
from xsp.graph import work
from xsp.graph.node import Graph

MODES = ("operator-level-cost-model", "operator-level-benchmark")
TRAINED_MODELS = (
    "torchvision:resnet18", "torchvision:resnet34", "torchvision:vgg11", "torchvision:alexnet",
    "torchvision:mobilenet_v2", "torchvision:squeezenet1_1", "torchvision:shufflenet_v2_x1_0",
    "timm:vit_tiny_patch16_224", "transformers:bert", "transformers:gpt2,sequence=64",
)  # fmt: skip
GOAL_TRAINED = 0.8
"""Goal: minimum geometric mean of timed layers over measured training steps."""

SIZES = (256, 512, 1024, 2048)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = steps.add_options(turns.parser(__doc__))
    parser.add_argument("--train", action="store_true", help="training steps, batch 1")
    parser.add_argument("--budget", type=float, help="seconds per model for its layers (default: 60, quick: 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = turns.parse(parser, arguments)
    import torch

    torch.set_num_threads(options.threads)
    peak, bandwidth = _peak(torch), _bandwidth(torch)
    step_kind = "training step" if options.train else "step"
    errors: dict[str, dict[str, float]] = {}
    refusals: dict[str, str] = {}
    report = turns.Report(
        f"estimators{'_training' * options.train}",
        "",
        ("estimator", "models", "geometric mean", "least", "most", "error, mean abs.", "times the error of R2"),
    )
    selection, deadline, covered = _selected_models(options), steps.deadline(options), 0
    with report.until_interrupted(), tempfile.TemporaryDirectory() as folder:
        stored_steps = steps.StoredSteps(options.out or Path(folder))
        timings = bench.Timings.open(stored_steps.folder / "timings")
        for text in selection:
            if time.monotonic() > deadline and (text, 1, options.threads) not in stored_steps.steps:
                continue
            turns.say(f"{covered + 1}/{len(selection)} {text}")
            with report.trying(text):
                ratios = _ratios(text, stored_steps, timings, (peak, bandwidth), deadline, options, refusals)
                covered += 1
                for name, ratio in ratios.items():
                    errors.setdefault(name, {})[text] = ratio
    report.title = (
        f"Predicted over measured {step_kind}, {covered} of {len(selection)} models, {options.threads} threads, batch 1"
    )
    names = ["timed layers (R2)", "FLOPs ÷ peak", "FLOPs ÷ peak, bytes ÷ bandwidth"]
    for name in [*names, *(f"RuntimeEstimator, {mode}" for mode in _modes(options))]:
        _add(report, name, errors.get(name, {}), errors.get(names[0], {}), refusals.get(name, ""))
    report.notes.append(
        f"Peak {peak:.3g} FLOPs per second, {bandwidth:.3g} bytes per second, each the maximum measured here. The "
        "error is |predicted / measured − 1|; the last column compares it over the models that both have. Timed "
        "layers do not include the framework's own time between them."
    )
    if options.train:
        report.notes.append(f"Goal of timed layers: a geometric mean of at least {GOAL_TRAINED}, on ten models.")
    report.notes += [f"{name}: does not support this machine: {reason}" for name, reason in refusals.items()]
    report.finish(options)


def _ratios(
    text: str,
    stored_steps: steps.StoredSteps,
    timings: bench.Timings,
    rates: tuple[float, float],
    deadline: float,
    options: argparse.Namespace,
    refusals: dict[str, str],
) -> dict[str, float]:
    """Return the predicted over the measured step of a model, by estimator; `rates` are FLOPs and bytes per second."""
    peak, bandwidth = rates
    spec, settings = steps.settings_of(text, 1, options.seed)
    captured = replace(graph.of(spec, batch=1, sequence=settings.sequence, train=settings.train), name=text)
    ((step, _),) = steps.measure_steps([text], (1,), (options.threads,), stored_steps, options)
    missing = [pair for pair in bench.specs(captured, threads=options.threads) if timings.get(pair[0].key) is None]
    if missing and time.monotonic() < deadline:
        turns.say(f"  {text}: {len(missing)} layers have no timing")
        bench.fill(missing, timings, options.budget or (20 if options.quick else 60))
    construction = construct.construct(captured, timings, 1, conditions=construct.Conditions(threads=options.threads))
    estimates: dict[str, float | None] = {
        "timed layers (R2)": None if construction.is_lower_limit else construction.ns,
        "FLOPs ÷ peak": _roofline_ns(captured, peak, None),
        "FLOPs ÷ peak, bytes ÷ bandwidth": _roofline_ns(captured, peak, bandwidth),
    }
    for mode in _modes(options):
        estimates[f"RuntimeEstimator, {mode}"] = _torch_estimate_ns(spec, settings, mode, refusals)
    return {name: ns / step.ns for name, ns in estimates.items() if ns}


def _modes(options: argparse.Namespace) -> Sequence[str]:
    """Return the modes of PyTorch's estimator; none for training steps."""
    return () if options.train else MODES


def _selected_models(options: argparse.Namespace) -> list[str]:
    """Return the models, with `,train` added if `--train` is given."""
    if not options.train:
        return steps.selected_models(options)
    plain = (
        list(TRAINED_MODELS) if not (options.models or options.all or options.quick) else steps.selected_models(options)
    )
    return [text if text.endswith(",train") else f"{text},train" for text in plain]


def _add(report: turns.Report, name: str, ratios: dict[str, float], baseline: dict[str, float], refusal: str) -> None:
    if not ratios:
        report.add([name, "0", "–", "–", "–", "–", "refused" if refusal else "–"])
        return
    error = turns.bootstrap([abs(ratio - 1) for ratio in ratios.values()], statistics.fmean)
    common = [text for text in ratios if text in baseline]
    times = (
        turns.bootstrap(
            [(abs(ratios[text] - 1), abs(baseline[text] - 1)) for text in common],
            lambda rows: statistics.fmean(ratio for ratio, _ in rows) / max(statistics.fmean(e for _, e in rows), 1e-9),
        )
        if common and name != "timed layers (R2)"
        else None
    )
    report.add(
        [
            name,
            str(len(ratios)),
            f"{statistics.geometric_mean(ratios.values()):.2f}",
            f"{min(ratios.values()):.2f}",
            f"{max(ratios.values()):.2f}",
            f"{error.text(0, 100)} %",
            "1" if name == "timed layers (R2)" else "–" if times is None else times.text(1),
        ],
        ratios=ratios,
    )


def _roofline_ns(captured: Graph, peak: float, bandwidth: float | None) -> float | None:
    """Return the ns of a step from its FLOPs, and its bytes if a bandwidth is given; None if some are unknown."""
    total = 0.0
    for node in captured.computing:
        flops, moved = work.flops_of(node), work.bytes_of(node)
        if flops is None or (bandwidth is not None and moved is None):
            return None
        total += max(flops / peak, 0.0 if bandwidth is None else (moved or 0) / bandwidth)
    return total * 1e9 or None


def _torch_estimate_ns(spec: str, settings: models.Settings, mode: str, refusals: dict[str, str]) -> float | None:
    """Return the nanoseconds that PyTorch's estimator predicts; None if it refuses, with the reason in `refusals`."""
    import contextlib
    import io

    import torch
    from torch._subclasses import FakeTensorMode

    try:
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator

        with contextlib.redirect_stdout(io.StringIO()), FakeTensorMode():
            built = models.build(spec, settings)
            assert isinstance(built, models.ModelCall)
            estimator = RuntimeEstimator()
            model = built.model.eval()
            with torch.inference_mode(), estimator(mode):
                model(*built.args, **built.kwargs)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        refusals.setdefault(f"RuntimeEstimator, {mode}", f"{type(error).__name__}: {reason[:120]} ({spec})")
        return None
    return float(estimator.total_runtime) * 1e6 or None


def _peak(torch: Any) -> float:
    """Return the highest rate in FLOPs per second that products of square matrices reach."""
    best = 0.0
    for size in SIZES:
        a, b = torch.randn(size, size), torch.randn(size, size)
        best = max(best, 2 * size**3 / _fastest_s(lambda a=a, b=b: a @ b))
    return best


def _bandwidth(torch: Any) -> float:
    """Return the highest rate in bytes per second, read and written, of a copy that is larger than the caches."""
    source = torch.randn(16 << 20)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _fastest_s(lambda: target.copy_(source))


def _fastest_s(step: Callable[[], object], times: int = 7) -> float:
    step()
    return min(turns.Condition("", step).measure()[0] for _ in range(times)) / 1e9


if __name__ == "__main__":
    main()
