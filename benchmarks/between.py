"""What of xsp stays on between recordings, and what does each part cost an iteration that is not recorded?

Each part is switched on in a process of its own, in the middle of a loop that times itself, with the device waited for
at both ends: a block of iterations without it, then one with it. The control switches nothing on: it shows the drift.
What can only be set before libraries are used (the ranges of NVTX) is compared with the first block of the control. The
parts take turns in a random order.

    hooks       the hooks of the loop, of calls and of training, as at the levels M and L
    sampler     the second process, which samples power, memory and utilisation
    operators   torch.profiler was on for one iteration, and is off
    cupti       CUPTI is subscribed to, and nothing was recorded yet
    recorded    CUPTI recorded one iteration, and is off
    nvtx        the libraries mark their calls, and libcupti listens
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parts import turns

from xsp.collector import Kernels
from xsp.errors import XspError
from xsp.launch import models as measure
from xsp.record.collecting import Collecting
from xsp.record.writer import Writer
from xsp.schema import Level

CONTROL, NVTX = "nothing", "nvtx"
ON_ANY_DEVICE = (CONTROL, "hooks", "sampler", "operators")
ON_CUDA = (*ON_ANY_DEVICE, "cupti", "recorded", NVTX)
GOAL = 0.02
WARM_UP_S = 1.0
LIMIT_S = 120


def compiled(device: str) -> Callable[[], object]:
    """Return a training step of a compiled model of many small layers."""
    import torch
    from torch import nn

    blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*blocks).to(device)
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(64, 256, device=device)
    fast = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        optimizer.step()

    return step


def hooked(device: str) -> Callable[[], object]:
    """Return an inference step of a model whose 160 modules each have a hook that waits for a value."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(160))).to(device).eval()
    x = torch.randn(32, 128, device=device)
    for module in model:
        module.register_forward_hook(lambda module, inputs, output: output.amax().item() and None)

    def step() -> None:
        with torch.inference_mode():
            model(x)

    return step


def convolutions(device: str) -> Callable[[], object]:
    """Return an inference step of many convolutions, in half precision on a GPU."""
    import torch
    from torch import nn

    dtype = torch.float32 if device == "cpu" else torch.float16
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(24)]
    model = nn.Sequential(*layers).to(device, dtype).eval()
    x = torch.randn(1 if device == "cpu" else 16, 64, 28, 28, device=device, dtype=dtype)

    def step() -> None:
        with torch.inference_mode():
            model(x)

    return step


PROGRAMS: dict[str, Callable[[str], Callable[[], object]]] = {
    "compiled": compiled, "hooked": hooked, "convolutions": convolutions,
}  # fmt: skip


# --- the process of one part ------------------------------------------------------------------------------


def measure_part(options: argparse.Namespace) -> None:
    """Time a program before and after a part is switched on, and print both as JSON."""
    import torch

    if options.part == NVTX:
        measure.set_library_variables(Kernels.CUPTI.value)
    torch.manual_seed(0)
    step = PROGRAMS[options.programs[0]](options.device)
    wait = torch.cuda.synchronize if options.device != "cpu" else turns._nothing
    block(step, wait, WARM_UP_S)
    before = [block(step, wait, options.seconds / 3) for _ in range(3)]
    switch_off = switch_on(options.part, step, wait)
    block(step, wait, options.seconds / 6)
    after = [block(step, wait, options.seconds / 3) for _ in range(3)]
    switch_off()
    print(json.dumps({"before_ms": statistics.median(before), "after_ms": statistics.median(after)}))


def block(step: Callable[[], object], wait: Callable[[], object], seconds: float) -> float:
    """Return the mean milliseconds of as many iterations as fit into a time."""
    wait()
    begin = now = time.perf_counter()
    count = 0
    while now - begin < seconds:
        step()
        count += 1
        now = time.perf_counter()
    wait()
    return (time.perf_counter() - begin) / count * 1e3


def switch_on(part: str, step: Callable[[], object], wait: Callable[[], object]) -> Callable[[], object]:
    """Switch a part on, and return the function that ends it."""
    if part in (CONTROL, NVTX):
        return turns._nothing
    if part == "sampler":
        folder = tempfile.TemporaryDirectory()
        writer = Writer(Path(folder.name))
        writer.sample(0, [])
        return writer.close
    collecting = Collecting()
    names, rung = {
        "hooks": (["modules", "training", "dataloading"], Level.LAYER),
        "operators": (["torchops"], Level.OP),
        "cupti": (["cupti"], Level.KERNEL),
        "recorded": (["cupti"], Level.KERNEL),
    }[part]
    collecting.find(names, rung, Kernels.CUPTI if names == ["cupti"] else Kernels.KINETO)
    collecting.open(None)
    if part in ("operators", "recorded"):
        active = collecting.start(rung, describe=False)
        step()
        wait()
        collecting.stop(active)
        for collector in collecting.collectors:
            list(collector.spans())
    return lambda: collecting.close(calibrate=False)


# --- all of them ------------------------------------------------------------------------------------------


def start(part: str, program: str, options: argparse.Namespace) -> dict[str, float]:
    """Run the process of one part, and return what it printed.

    Raises:
        XspError: it failed, or took too long.
    """
    command = [sys.executable, __file__, "--part", part, "--programs", program, "--device", options.device]
    command += ["--seconds", str(options.seconds)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))
    except subprocess.TimeoutExpired as error:
        raise XspError(f"{program}, {part}: more than {LIMIT_S} s") from error
    if ended.returncode:
        raise XspError(f"{program}, {part}: {(ended.stderr.strip().splitlines() or ['nothing was printed'])[-1]}")
    result: dict[str, float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return result


def add(report: turns.Report, program: str, parts: Sequence[str], rounds: Sequence[dict[str, Any]]) -> None:
    """Add a row for each part of one program."""
    for part in parts:
        both = [turn for turn in rounds if part in turn and CONTROL in turn]
        if not both:
            continue
        base = "before_ms" if part != NVTX else None

        def ratio(turn: dict[str, Any], part: str = part, base: str | None = base) -> float:
            reference = turn[part][base] if base else turn[CONTROL]["before_ms"]
            drift = turn[CONTROL]["after_ms"] / turn[CONTROL]["before_ms"] if part != CONTROL else 1.0
            return float(turn[part]["after_ms"] / reference / drift)

        figure = turns.middle([ratio(turn) for turn in both])
        own_ms = statistics.median(turn[part]["before_ms"] for turn in both)
        verdict = "" if part == CONTROL else turns.verdict(figure, 1 + GOAL)
        report.add((f"{program}: {part}", f"{len(both)}", f"{own_ms:.4g}", figure.text(3), verdict), ratio=figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--device", default=measure.default_device(), help="cuda, cpu (default: cuda if there is one)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each of the two times of a process")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=4.0, help="for all; what has no turn by then is left out")
    parser.add_argument("--part", choices=ON_CUDA, help=argparse.SUPPRESS)
    options = turns.parse(parser, arguments)
    if options.part:
        measure_part(options)
        return
    if options.quick:
        options.seconds, options.programs, options.minutes = 0.3, ["hooked"], 1.0
    ends = time.monotonic() + 60 * options.minutes
    parts = ON_ANY_DEVICE if options.device == "cpu" else ON_CUDA
    columns = ("program and part", "pairs", "without it ms", "with / without", f"≤ {100 * GOAL:g} %")
    report = turns.Report("between", "What stays on between recordings costs an unrecorded iteration [95 %]", columns)
    draw = random.Random(options.seed)
    rounds: dict[str, list[dict[str, Any]]] = {program: [] for program in options.programs}
    with report.until_interrupted():
        for _ in range(options.rounds):
            for program in options.programs:
                turn: dict[str, Any] = {}
                rounds[program].append(turn)
                for part in draw.sample(parts, k=len(parts)):
                    if time.monotonic() > ends:
                        continue
                    with report.trying(f"{program}, {part}"):
                        turn[part] = start(part, program, options)
                        turns.say(f"  {program}, {part}: {turn[part]}")
    for program in options.programs:
        add(report, program, parts, rounds[program])
    if time.monotonic() > ends:
        report.mark_partial(f"Cut off after {options.minutes:g} minutes.")
    report.finish(options)


if __name__ == "__main__":
    main()
