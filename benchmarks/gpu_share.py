"""Does a model load faster from a store that holds its weights on the device than from a file, and is there one copy?

Fresh processes take turns, as in `xsp share measure --device`: `safetensors.torch.load_file` and `torch.load` onto the
device, and `xsp.share.attach` to a store that already has the weights there. Each has used the device before, so that
loading and the first call are compared. Then processes load at the same time: their time, and the bytes on the device
of the store and of torch in each process, are compared with the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from parts import gpu_workloads, turns

from xsp.share import measuring, savings
from xsp.share.loadworker import ATTACH, MMAP

LARGE = (
    "transformers:LlamaForCausalLM?num_hidden_layers=24&hidden_size=1024&intermediate_size=2816&num_attention_heads=16"
    "&num_key_value_heads=16&vocab_size=32000"
)
"""370 million parameters in float32: 1.5 GB, as TrIMS's largest image models have."""

MODELS = ("torchvision:resnet50", LARGE, "torchvision:vgg16", "torchvision:vit_b_16", "torchvision:densenet121")
QUICK = MODELS[:1]
NAMES = {LARGE: "decoder-370m"}
PROCESSES = 4
MOST_COPIES = 1.15
COLUMNS = (
    "model", "MB", "turns", "load_file, ms", "attach, ms", "both and a call, times as fast", "at once, ms",
    "copies", "one copy",
)  # fmt: skip


def row(name: str, measured: measuring.Measurement) -> list[str]:
    """Return the row of a model: loads, gain, load and call of processes at once (`load_file → attach`), copies."""
    pair = [measured.times[way, measuring.WARM] for way in (MMAP, ATTACH)]
    gains = [unshared / max(1.0, shared) for unshared, shared in zip(*(times.total_ns for times in pair), strict=True)]
    loads = [turns.middle([ns / 1e6 for ns in times.load_ns]).text(1) for times in pair]
    count = measured.concurrent
    at_once = [turns.median(measured.together[way, count].total_ns) / 1e6 for way in (MMAP, ATTACH)]
    memory = measured.memory.get(ATTACH)
    copies = float("nan") if memory is None else memory.of(count) / measured.nbytes
    verdict = "unknown" if memory is None else "met" if copies <= MOST_COPIES else "missed"
    return [
        name, f"{measured.nbytes / 1e6:.0f}", str(measured.turns), *loads, turns.middle(gains).text(2),
        f"{count}: {at_once[0]:.0f} → {at_once[1]:.0f}", f"{copies:.2f}", verdict,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    argument_parser = turns.parser(__doc__, rounds=7)
    argument_parser.add_argument("--device", default="cuda:0", help="identifier (default: cuda:0)")
    argument_parser.add_argument("--models", nargs="+", metavar="MODEL", help="as `xsp share measure` takes them")
    argument_parser.add_argument(
        "--processes", type=int, default=PROCESSES, help=f"that load at once (default: {PROCESSES})"
    )
    argument_parser.add_argument("--minutes", type=float, help="start no model after so many minutes")
    options = turns.parse(argument_parser, arguments)
    gpu_workloads.require_device(options.device)
    report = turns.Report("gpu_share", "Weights on a device from a file and from a store there [95 %]", COLUMNS)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with report.until_interrupted():
        for model in options.models or (QUICK if options.quick else MODELS):
            if end is not None and time.monotonic() > end:
                report.mark_partial(f"Cut off after {options.minutes:g} minutes.")
                break
            with report.trying(model):
                measured = measuring.measure(
                    model, turns=options.rounds, seed=options.seed, states=(measuring.WARM,),
                    concurrent=options.processes, device=options.device,
                )  # fmt: skip
                name = NAMES.get(model, model.rpartition(":")[2])
                report.add(row(name, measured), **savings.as_json(measured))
    report.notes.append(
        "At once: median of load and first call of so many processes that begin together, load_file → attach. Copies: "
        "bytes of the store on the device and of tensors in these processes, over the file."
    )
    report.notes.append(gpu_workloads.device_line(options.device))
    report.finish(options)


if __name__ == "__main__":
    main()
