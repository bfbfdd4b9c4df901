"""The workloads that are measured on a GPU: steps of real models by name, each of which waits for the device."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

from parts import turns, workloads
from xsp import models
from xsp.collector import Kernels
from xsp.device import devices
from xsp.errors import DeviceError
from xsp.launch import models as measure

DECODER_1B = (
    "transformers:LlamaForCausalLM?num_hidden_layers=16&hidden_size=2048&intermediate_size=8192"
    "&num_attention_heads=16&num_key_value_heads=16&vocab_size=32000"
)
"""A decoder with 1.2 billion parameters."""

MODELS = (
    "torchvision:resnet50,batch=1",
    "torchvision:resnet50,batch=32",
    "torchvision:resnet50,batch=256",
    "transformers:BertModel,batch=8,sequence=128",
    "transformers:GPT2LMHeadModel,batch=4,sequence=256,train",
    f"{DECODER_1B},batch=1,sequence=128",
)
QUICK = ("torchvision:resnet18,batch=1", "torchvision:resnet18,batch=4,train")


def add_options(parser: argparse.ArgumentParser, seconds: float = 3.0) -> argparse.ArgumentParser:
    """Add `--models`, `--device` and `--seconds`."""
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="names with settings, as in layer_overhead.py")
    parser.add_argument(
        "--device", default=measure.default_device(), help="cuda, cuda:1, cpu (default: cuda if there is one)"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds,
        help=f"without --rounds: seconds of bare steps per model (default: {seconds:g})",
    )  # fmt: skip
    return parser


def build_workloads(options: argparse.Namespace) -> Iterator[models.Workload]:
    """Build the models one after the other, so that only one at a time is in memory.

    Yields:
        Workloads whose step returns when the device has finished it, after three warm-up steps.
    """
    measure.set_library_variables(Kernels.AUTO.value)
    import torch

    for text in options.models or (QUICK if options.quick else MODELS):
        spec, settings = workloads.parse(text, options.seed)
        with torch.device(options.device):  # drawing a billion random numbers on the host takes long
            workload = models.load(spec, replace(settings, device=options.device))
        step = synchronised(workload.step)
        for _ in range(3):
            step()
        turns.say(f"  {text}")
        yield models.Workload(name_of(spec, settings), step, workload.batch_size)
        del workload, step
        gc.collect()
        _empty_cache()


def synchronised(step: Callable[[], object]) -> Callable[[], None]:
    """Return a step that ends when the device has finished its work."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing

    def run() -> None:
        step()
        wait()

    return run


def name_of(spec: str, settings: models.Settings) -> str:
    """Return the name of a workload in the table."""
    name = "decoder-1b" if spec == DECODER_1B else measure.short_name(spec)
    return f"{name} b{settings.batch}" + (" train" if settings.train else "")


def rounds_of(workload: models.Workload, options: argparse.Namespace, conditions: int) -> int:
    """Return the number of rounds for a workload; the conditions share the time of `--seconds`."""
    if options.rounds is not None:
        return int(options.rounds)
    return min(max(6, int(options.seconds / conditions / turns.time_of(workload.step))), workloads.MOST_ROUNDS)


def require_gpu() -> None:
    """End the script with a message if there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        turns.skip("there is no CUDA device here, which this benchmark needs (tests/gpu/run.sh runs all of them)")


def require_device(name: str) -> None:
    """End the script with a message if there is no device with an identifier."""
    try:
        devices.of(name)
    except DeviceError as error:
        turns.skip(f"{error}, which this benchmark needs (tests/gpu/run.sh runs all of them)")


def device_line(name: str = "cuda:0") -> str:
    """Return one line with the device, its memory, and the versions of torch and of its CUDA."""
    import torch

    if not name.startswith("cuda"):
        return f"{devices.of(name).name}, torch {torch.__version__}."
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name}, {memory}, torch {torch.__version__}, CUDA {torch.version.cuda}."


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _nothing() -> None:
    pass
