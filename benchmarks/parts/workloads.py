"""The workloads that are measured: steps of real models by name, on the CPU."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence

from parts import turns
from xsp import models
from xsp.errors import ModelError
from xsp.launch import models as measure

TEN_MODELS = (
    "torchvision:mobilenet_v3_large",
    "torchvision:efficientnet_b0",
    "torchvision:resnet50",
    "torchvision:densenet121",
    "torchvision:squeezenet1_1",
    "timm:vit_tiny_patch16_224",
    "transformers:BertModel,sequence=128",
    "transformers:GPT2LMHeadModel,sequence=64",
    "torchvision:resnet18,batch=4,train",
    "timm:vit_tiny_patch16_224,batch=4,train",
)
LEAST_ROUNDS, MOST_ROUNDS = 10, 48
"""Minimum and maximum number of rounds: for the slowest and for the fastest models."""

QUICK = ("torchvision:squeezenet1_1", "torchvision:mobilenet_v3_small,train")


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--models`, `--threads` and `--seconds`."""
    parser.add_argument(
        "--models", nargs="+", metavar="MODEL",
        help="names as `xsp profile` takes them, with settings: torchvision:resnet18,batch=4,train",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1),
        help="threads of torch (default: all cores but one: steps on all cores stall when anything else runs)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=3.0,
        help=f"without --rounds: seconds of bare steps per model, in {LEAST_ROUNDS} to {MOST_ROUNDS} rounds "
        "(default: 3)",
    )  # fmt: skip
    return parser


def build_workloads(options: argparse.Namespace) -> Iterator[models.Workload]:
    """Build the models one after the other, so that only one at a time is in memory.

    Yields:
        Workloads with their name in the table, after two warm-up steps; models that cannot be built are left out.
    """
    measure.set_library_variables()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(options.threads)
    for text in options.models or (QUICK if options.quick else TEN_MODELS):
        spec, settings = parse(text, options.seed)
        try:
            workload = models.load(spec, settings)
        except ModelError as error:
            turns.say(f"  {text}: left out ({error})")
            continue
        for _ in range(2):
            workload.step()
        gc.collect()
        turns.say(f"  {text}")
        yield models.Workload(name_of(spec, settings), workload.step, workload.batch_size)


def parse(text: str, seed: int) -> tuple[str, models.Settings]:
    """Parse a model with its settings: `SPEC[,batch=N][,sequence=N][,train]`."""
    spec, *words = text.split(",")
    numbers = dict(word.split("=", 1) for word in words if word != "train")
    unknown = set(numbers) - {"batch", "sequence"}
    if unknown:
        raise SystemExit(f"{text}: there is no setting {', '.join(sorted(unknown))}; there are batch, sequence, train")
    counts = {name: int(value) for name, value in numbers.items()}
    return spec, models.Settings(train="train" in words, seed=seed, **counts)


def name_of(spec: str, settings: models.Settings) -> str:
    """Return the name of a workload in the table."""
    return measure.short_name(spec) + (f" train b{settings.batch}" if settings.train else "")


def rounds_of(workload: models.Workload, options: argparse.Namespace) -> int:
    """Return the number of rounds for a workload: more for short steps, which vary more and cost less."""
    if options.rounds is not None:
        return int(options.rounds)
    return min(max(LEAST_ROUNDS, int(options.seconds / turns.time_of(workload.step))), MOST_ROUNDS)


def summary_line(verdicts: Sequence[str], goal: str) -> str:
    """Return a sentence on how many models meet a goal."""
    met_count = sum(verdict_text.startswith("met") for verdict_text in verdicts)
    uncertain_count = sum(verdict_text.endswith("?") for verdict_text in verdicts)
    note = (
        f"; {uncertain_count} of the verdicts are uncertain (?: the interval contains the goal)"
        if uncertain_count
        else ""
    )
    return f"Goal, {goal}: met on {met_count} of {len(verdicts)} models{note}."
