"""Step times of models by name, measured once and kept in a folder, so that a run of hours can be resumed.

`steps.jsonl` has a line for each model, batch and number of threads: the nanoseconds of each round, and the number of
rounds that other processes disturbed. A step with a line is not measured again; remove the line to measure it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import turns, workloads
from xsp import models

FILE = "steps.jsonl"

MANY_MODELS = (
    *(
        f"torchvision:{name}"
        for name in (
            "resnet18 resnet34 resnet50 resnet101 wide_resnet50_2 resnext50_32x4d vgg11 vgg13 vgg16 vgg11_bn alexnet "
            "squeezenet1_0 squeezenet1_1 densenet121 densenet169 googlenet inception_v3 mobilenet_v2 "
            "mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 mnasnet0_5 "
            "mnasnet1_0 efficientnet_b0 efficientnet_b1 regnet_x_400mf regnet_x_800mf regnet_y_400mf regnet_y_800mf "
            "convnext_tiny swin_t vit_b_32"
        ).split()
    ),
    *(
        f"timm:{name}"
        for name in "vit_tiny_patch16_224 deit_small_patch16_224 mixer_s32_224 resmlp_12_224 mobilevit_xs "
        "resnetv2_50 convnextv2_atto".split()
    ),
    "transformers:bert",
    "transformers:gpt2,sequence=64",
)
"""Models of several families, small enough that a step takes at most a second on one core."""

HUNDRED_MODELS = (
    *MANY_MODELS,
    *(
        f"torchvision:{name}"
        for name in (
            "mnasnet0_75 mnasnet1_3 shufflenet_v2_x2_0 efficientnet_b2 efficientnet_b3 efficientnet_b4 regnet_x_1_6gf "
            "regnet_y_1_6gf regnet_x_3_2gf regnet_y_3_2gf regnet_x_8gf regnet_y_8gf densenet161 densenet201 maxvit_t "
            "swin_v2_t swin_s swin_v2_s efficientnet_v2_s convnext_small vgg13_bn vgg16_bn resnet152 vit_b_16 vit_l_32 "
            "resnext101_64x4d resnext101_32x8d"
        ).split()
    ),
    *(
        f"timm:{name}"
        for name in "vit_small_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 mixer_b32_224 resmlp_24_224 "
        "mobilevit_xxs mobilevit_s resnetv2_101 convnextv2_femto convnextv2_pico resnet26 resnet50d seresnet50 "
        "efficientnet_lite0 mobilenetv2_100 mobilenetv3_large_100 ghostnet_100 hrnet_w18_small dla34 dpn68 "
        "cspresnet50 rexnet_100 lcnet_100 tinynet_a fbnetc_100 levit_128s poolformer_s12 xcit_nano_12_p16_224 "
        "gmlp_s16_224 visformer_tiny lcnet_075 lcnet_050 mobilenetv3_small_100 mobilenetv3_small_075 mnasnet_100 "
        "tinynet_b tinynet_c tinynet_d spnasnet_100 hardcorenas_a regnetx_002 regnety_002 mobilenetv2_050 resnet10t "
        "resnet14t resnet18d".split()
    ),
)
"""`MANY_MODELS` with further members of these families and with other families; more than 100, because a model counts
only once all of its blocks have timings."""

FEW_MODELS = (
    "torchvision:resnet18", "torchvision:resnet34", "torchvision:mobilenet_v2", "torchvision:squeezenet1_1",
    "torchvision:mnasnet0_5", "timm:vit_tiny_patch16_224",
)  # fmt: skip
QUICK = ("torchvision:squeezenet1_1", "torchvision:squeezenet1_0")


@dataclass(frozen=True)
class Step:
    """The measured step of a model, without xsp."""

    model: str
    """Name in the form of `--models`, without the batch."""

    batch: int
    threads: int
    rounds: tuple[int, ...]
    disturbed: int
    """Number of rounds that other processes disturbed."""

    @property
    def ns(self) -> float:
        """The median of the rounds, in nanoseconds."""
        return turns.median(self.rounds)


class StoredSteps:
    """The measured steps that are stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.steps: dict[tuple[str, int, int], Step] = {}
        if (folder / FILE).is_file():
            for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
                try:
                    step = Step(**{**(row := json.loads(line)), "rounds": tuple(row["rounds"])})
                except (ValueError, LookupError, TypeError):
                    continue  # the line was cut off when a run was interrupted
                self.steps[step.model, step.batch, step.threads] = step

    def add(self, step: Step) -> Step:
        """Store a step, in place of an earlier one of the same model, batch and number of threads."""
        self.steps[step.model, step.batch, step.threads] = step
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(step)) + "\n")
        return step


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--models`, `--all`, `--hundred`, `--out` and `--seconds`."""
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL", help="names as `xsp profile` takes them, with ,sequence=N"
    )
    parser.add_argument("--all", action="store_true", help=f"all {len(MANY_MODELS)} models")
    parser.add_argument(
        "--hundred",
        action="store_true",
        help=f"{len(HUNDRED_MODELS)} models, so that 100 remain without those with blocks that have no timing",
    )
    parser.add_argument("--out", type=Path, help="keep measurements here, and continue from them")
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no further model after this time; the report covers what was measured (default: all)",
    )
    return parser


def deadline(options: argparse.Namespace) -> float:
    """Return the end of the time of `--seconds`, on the clock of `time.monotonic`."""
    return math.inf if options.seconds is None else time.monotonic() + options.seconds


def selected_models(options: argparse.Namespace) -> list[str]:
    """Return the models that the options select."""
    default = (
        HUNDRED_MODELS if options.hundred else MANY_MODELS if options.all else QUICK if options.quick else FEW_MODELS
    )
    return list(options.models or default)


def spec_of(text: str) -> str:
    """Return the name of a model without its settings."""
    return workloads.parse(text, 0)[0]


def settings_of(text: str, batch: int, seed: int) -> tuple[str, models.Settings]:
    """Return a model's name, and its settings with the batch `batch`."""
    spec, settings = workloads.parse(f"{text},batch={batch}", seed)
    return spec, settings


def measure_steps(
    selection: list[str],
    batches: tuple[int, ...],
    threads: tuple[int, ...],
    stored: StoredSteps,
    options: argparse.Namespace,
) -> Iterator[tuple[Step, models.Workload | None]]:
    """Yield the step of each model, batch and number of threads; measure the steps that are not stored yet.

    Yields:
        The step, and the workload that runs it; None instead of the workload for a stored step.
    """
    import torch

    for text in selection:
        for batch in batches:
            missing = [count for count in threads if (text, batch, count) not in stored.steps]
            workload = None
            if missing:
                turns.say(f"  {text}, batch {batch}")
                workload = models.load(*settings_of(text, batch, options.seed))
            for count in threads:
                if count in missing and workload is not None:
                    torch.set_num_threads(count)
                    stored.add(measure_step(text, batch, count, workload, options))
                yield stored.steps[text, batch, count], workload if count in missing else None
            del workload
            gc.collect()


def measure_step(text: str, batch: int, threads: int, workload: models.Workload, options: argparse.Namespace) -> Step:
    """Measure a step in rounds, each after an unmeasured step."""
    rounds = options.rounds or min(max(5, int(1.5 / turns.time_of(workload.step))), 40)
    method = turns.turns_of(options)
    rounds_taken = method.take([turns.Group([turns.Condition("step", workload.step)])], rounds, settle=workload.step)
    return Step(text, batch, threads, tuple(round_times["step"] for round_times in rounds_taken), method.disturbed)


def cells(values: list[Any]) -> list[str]:
    """Return values as cells of a table."""
    return ["–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
