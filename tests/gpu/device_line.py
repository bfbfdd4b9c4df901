"""Graph, timings, bound, advice and prediction of models on a device, each saved as soon as it is there.

    python tests/gpu/device_line.py OUT [--device cuda:0] [--seconds 100] [MODEL[,train][,batch=N] …]

OUT gets `MODEL.json` for each model (what each command answers, or why it has no answer; the energy of its steps is in
the settings of `bound`), `timings.parquet` (what `xsp bench --import` reads elsewhere) and the folder `timings`. A
model that fails leaves the others as they are, and an interrupt all that was there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xsp import advise, bound, graph
from xsp.bench.environment import current_environment
from xsp.bench.timings import Timings
from xsp.bound import language, languagetext, text
from xsp.device import devices
from xsp.errors import XspError
from xsp.evidence import advice
from xsp.predict import collectives, scaling, timedstep
from xsp.predict import text as predicted
from xsp.predict.training import Job

MODELS = (
    "torchvision:resnet50,batch=1", "torchvision:resnet50,batch=32", "torchvision:resnet18,batch=64,train",
    "transformers:bert,batch=8", "timm:vit_base_patch16_224,batch=16", "torchvision:mobilenet_v3_large,batch=32",
    "torchvision:convnext_tiny,batch=16", "transformers:gpt2,batch=4,train",
)  # fmt: skip
"""Those of which `../shared/gpu` has timings, so that both can be compared."""

DECODED = "transformers:gpt2,decode"
"""The last: the curve of a step that adds a token, by tokens before it."""

LENGTHS = (64, 512)

LEAST_SECONDS = 4.0
NO_ANSWER = "no answer: "


def answers(name: str, settings: dict[str, Any], device: str, timings: Path, seconds: float) -> dict[str, Any]:
    """Return what each command answers for a model, the dearest first: its timings are those of all others."""
    found: dict[str, Any] = {}

    def ask(what: str, question: Callable[[], Any]) -> None:
        add(found, what, question)

    ask("bound", lambda: text.as_json(bound.of(name, device=device, timings=timings, fill=seconds, **settings)))
    options = {**settings, "device": device, "timings": timings}
    ask("advice", lambda: advice.of_report(advise.of(name, settings=options), {"model": name}))
    kind = device.partition(":")[0]
    ask("operators", lambda: [node.call.op for node in graph.of(name, device=kind, **settings).computing])
    if settings.get("train"):
        ask("prediction", lambda: prediction(name, device, timings, settings["batch"]))
    return found


def add(found: dict[str, Any], what: str, question: Callable[[], Any]) -> None:
    """Add an answer or why there is none, and the seconds that it took."""
    begin = time.monotonic()
    try:
        found[what] = question()
    except XspError as error:
        found[what] = f"{NO_ANSWER}{error}"
    found.setdefault("seconds", {})[what] = round(time.monotonic() - begin, 2)


def decoding(name: str, device: str, timings: Path, seconds: float) -> dict[str, Any]:
    """Return the curves of a language model by tokens, as `xsp bound --decode A:B` prints them."""
    found: dict[str, Any] = {}

    def page() -> str:
        curves = language.of(name, LENGTHS, device=device, timings=timings, fill=seconds, partial=True)
        return languagetext.page(curves, name)

    add(found, "decode", page)
    return found


def prediction(name: str, device: str, timings: Path, batch: int) -> dict[str, Any]:
    """Return the step of a model on 1 and 8 ranks over NVLink."""
    step = timedstep.of(name, device=device, timings=timings, batch=batch)
    return predicted.as_json(scaling.of(step, Job(1, collectives.link("nvlink4")), (1, 8), step, []))


def parsed(model: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings: `torchvision:resnet18,batch=64,train`."""
    name, *words = model.split(",")
    batch = next((int(word.partition("=")[2]) for word in words if word.startswith("batch=")), 1)
    return name, {"batch": batch, **{word: True for word in ("train", "decode") if word in words}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask for each model, and write what comes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", default=(*MODELS, DECODED))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=100.0, help="for all models together")
    options = parser.parse_args(arguments)
    try:
        device = devices.of(options.device)
    except XspError as error:
        print(error)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    timings, failed = options.out / "timings", True
    try:
        failed = ask_each(options, device.id, timings)
    except KeyboardInterrupt:
        print("interrupted: what was answered before is kept")
    Timings.open(timings, current_environment(device)).export(options.out / "timings.parquet")
    return int(failed)


def ask_each(options: argparse.Namespace, device: str, timings: Path) -> bool:
    """Ask for each model, write its answers, and return whether one lacks any."""
    end, failed = time.monotonic() + options.seconds, False
    for place, model in enumerate(options.models):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{model}: not asked, out of time")
            failed = True
            continue
        name, settings = parsed(model)
        share = max(LEAST_SECONDS, 0.6 * left / (len(options.models) - place))
        if settings.pop("decode", False):
            found = decoding(name, device, timings, share)
        else:
            found = answers(name, settings, device, timings, share)
        file = options.out / f"{Path(model.replace(':', '-')).name}.json"
        file.write_text(json.dumps(found, indent=1, default=str))
        holes = [what for what, answer in found.items() if isinstance(answer, str) and answer.startswith(NO_ANSWER)]
        print(f"{model}: {found['seconds']}{'; no ' + ', '.join(holes) if holes else ''}", flush=True)
        failed |= bool(holes)
    return failed


if __name__ == "__main__":
    sys.exit(main())
