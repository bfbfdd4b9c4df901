"""How large is the error of the generic model on held-out configurations: steps of small models, recorded here?

The models are MLPs, CNNs and autoencoders with random batch, width, depth, kernel, stride, activation, optimizer,
threads and processes. Steps of two processes use DistributedDataParallel over gloo, each process with the full batch;
their time is that of the slower process. With two threads each, they have more threads than two cores, and the row
includes that effect. Each configuration is measured in `--rounds` short turns, all configurations once per round in a
new order; its time is the minimum of the medians of its turns, since other processes only add to it. Turns are kept in
`--out`, one per line, so that a run limited by `--seconds` can be resumed. When all turns are measured, the model and
its baselines are evaluated on groups left out:

    python benchmarks/predict_configurations.py --out turns.jsonl --seconds 540     repeat until all is measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from parts import turns

COUNT, COUNT_QUICK = 300, 24
TURN_S = 0.25
"""Seconds of measured steps in a turn."""

GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "mlp": {"batch": (4, 8, 16, 32, 64, 128, 256), "width": (32, 64, 128, 256, 512), "depth": (1, 2, 3, 4, 6),
            "kernel": (1,), "stride": (1,)},
    "cnn": {"batch": (2, 4, 8, 16, 32), "width": (4, 8, 16, 24, 32), "depth": (1, 2, 3, 4), "kernel": (1, 3, 5),
            "stride": (1, 2)},
    "autoencoder": {"batch": (4, 8, 16, 32, 64, 128, 256), "width": (64, 128, 256, 512), "depth": (1, 2, 3, 4),
                    "kernel": (1,), "stride": (1,)},
}  # fmt: skip
ALL = {"activation": ("relu", "tanh", "gelu"), "optimizer": ("sgd", "adam"), "threads": (1, 2), "processes": (1, 2)}
FACTORS = ("batch", "width", "depth", "kernel", "stride", "activation", "optimizer", "threads", "processes")
CROWDED = "crowded"
"""Factor: whether all processes together have more threads than cores, which no product of powers can express."""

WORK = ("mflops", "melements", "mparameters", "modules")

FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str | None]] = {
    "what was chosen, each kind by itself": ((), (*FACTORS, CROWDED), "kind"),
    "what is computed": (WORK, ("threads", "processes", CROWDED, "kind", "activation", "optimizer"), None),
    "what is computed, each kind by itself": (
        WORK[:3], ("threads", "processes", CROWDED, "activation", "optimizer"), "kind"
    ),
}  # fmt: skip
"""Name of a form → intrinsic factors, extrinsic factors, and the factor with a separate model for each value."""


STUCK = timedelta(seconds=120)
"""Timeout of a process that waits for another one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure missing turns, then judge, print and save."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--rank"]:  # a process of `Together`
        serve(int(given[1]), int(given[2]), given[3])
        return
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--out", type=Path, help="where turns are kept (default: nowhere)")
    made.add_argument("--seconds", type=float, default=3000, help="time limit of this run (default: 3000)")
    made.add_argument("--count", type=int, help=f"number of configurations (default: {COUNT}, quick: {COUNT_QUICK})")
    options = turns.parse(made, arguments)
    wanted = drawn(options.count or (COUNT_QUICK if options.quick else COUNT), options.seed)
    try:
        rows = measured(wanted, options)
    except KeyboardInterrupt:
        turns.say(f"interrupted: run it again, the turns before go on in {options.out}")
        return
    if len(rows) < options.rounds * len(wanted):
        turns.say(f"{len(rows)} of {options.rounds * len(wanted)} turns: run it again to continue in {options.out}")
        return
    judge(wanted, rows, options).finish(options)


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different random configurations, equally many of each kind."""
    chance, found = random.Random(seed), {}
    while len(found) < count:
        kind = tuple(GRID)[len(found) % len(GRID)]
        each = {"kind": kind, **{name: chance.choice(values) for name, values in (GRID[kind] | ALL).items()}}
        found[json.dumps(each)] = each
    return list(found.values())


def measured(wanted: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the turns of this call and of earlier ones."""
    keys = {json.dumps(each): each for each in wanted}
    rows = []
    if options.out is not None and options.out.exists():
        rows = [each for each in kept(options.out) if each["key"] in keys and each["round"] < options.rounds]
    done = {(each["key"], each["round"]) for each in rows}
    end = time.monotonic() + options.seconds
    with ExitStack() as stack:
        ranks: dict[int, Together] = {}
        for number in range(options.rounds):
            order = list(keys)
            random.Random(options.seed + number).shuffle(order)
            for key in order:
                if (key, number) in done:
                    continue
                if time.monotonic() > end:
                    return rows
                count = keys[key]["processes"]
                if count > 1 and count not in ranks:
                    ranks[count] = stack.enter_context(Together(count))
                took = ranks[count].turn(keys[key], options.quick) if count > 1 else turn(keys[key], options.quick)
                row = {"key": key, "round": number, **took}
                rows.append(row)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            turns.say(f"  round {number + 1} of {options.rounds}: {len(rows)} turns")
    return rows


def kept(place: Path) -> list[dict[str, Any]]:
    """Return the turns in a file, and truncate an incomplete last line that a killed program has left."""
    whole = place.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1]
    if len(lines) < len(whole):
        os.truncate(place, len(lines))
    return [json.loads(line) for line in lines.splitlines()]


class Together:
    """Processes that train together over gloo, one configuration after another; they end with the block."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.stack = ExitStack()

    def __enter__(self) -> Together:
        store = str(Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "store")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.those = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(self.ranks), store],
                env=environment, stdin=subprocess.PIPE, stdout=None if rank else subprocess.PIPE, text=True,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.those:
            if each.stdin is not None and each.poll() is None:
                each.stdin.close()
        for each in self.those:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self.stack.close()

    def turn(self, each: dict[str, Any], quick: bool) -> dict[str, Any]:
        """Train a configuration in all processes, and return the answer of the first one."""
        asked = json.dumps({"each": each, "quick": quick}) + "\n"
        for process in self.those:
            assert process.stdin is not None
            process.stdin.write(asked)
            process.stdin.flush()
        assert self.those[0].stdout is not None
        said = self.those[0].stdout.readline()
        if not said:
            raise SystemExit(f"a process ended over {each}: its error is above; earlier measurements are kept")
        return json.loads(said)


def serve(rank: int, ranks: int, store: str) -> None:
    """Train the configurations from stdin as one rank, until stdin ends; rank 0 prints a line for each."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=STUCK)
    for line in sys.stdin:
        found = turn(**json.loads(line))
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def turn(each: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Build a model, train some steps, and return the median step time with the work of one process.

    If there are several ranks, all of them take the same number of steps, and the time is that of the slowest rank.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    torch.set_num_threads(each["threads"])
    net, batch, loss = built(each)
    rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[each["optimizer"]](net.parameters(), lr=1e-3)

    def step() -> None:
        rule.zero_grad(set_to_none=True)
        loss(net(batch)).backward()
        rule.step()

    elements = 0

    def count(_module: Any, _given: Any, out: Any) -> None:
        nonlocal elements
        elements += out.numel()

    modules = [part for part in net.modules() if not list(part.children())]
    hooks = [part.register_forward_hook(count) for part in modules]
    with FlopCounterMode(display=False) as flops:
        step()
    for hook in hooks:
        hook.remove()
    together = each["processes"] > 1
    modelled = net
    if together:
        net = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(3):  # buckets are rebuilt after the first step
        step()
    least = TURN_S / 25 if quick else TURN_S
    took: list[float] = []
    begin = time.perf_counter()
    step()
    wanted = torch.tensor([float(min(1000, max(5, least / (time.perf_counter() - begin))))])
    if together:
        dist.broadcast(wanted, 0)
    for _ in range(int(wanted)):
        begin = time.perf_counter()
        step()
        took.append(time.perf_counter() - begin)
    middle = torch.tensor([statistics.median(took)], dtype=torch.float64)
    if together:
        dist.all_reduce(middle, dist.ReduceOp.MAX)
    parameters = sum(part.numel() for part in modelled.parameters())
    return {"step_s": float(middle), "mflops": flops.get_total_flops() / 1e6, "melements": elements / 1e6,
            "mparameters": parameters / 1e6, "modules": len(modules)}  # fmt: skip


def built(each: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a model, its batch and its loss."""
    import torch
    from torch import nn

    width, depth = each["width"], each["depth"]
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[each["activation"]]
    parts: list[Any] = []
    if each["kind"] == "cnn":
        channels = 3
        for number in range(depth):
            stride = each["stride"] if number == 0 else 1
            parts += [nn.Conv2d(channels, width, each["kernel"], stride, each["kernel"] // 2), activation()]
            channels = width
        net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
        batch = torch.randn(each["batch"], 3, 32, 32)
    else:
        inputs = 64 if each["kind"] == "mlp" else 256
        sizes = [inputs, *([width] * depth), 10]
        if each["kind"] == "autoencoder":
            down = [max(4, width >> number) for number in range(depth)]
            sizes = [inputs, *down, *reversed(down[:-1]), inputs]
        for one, other in itertools.pairwise(sizes):
            parts += [nn.Linear(one, other), activation()]
        net, batch = nn.Sequential(*parts[:-1]), torch.randn(each["batch"], inputs)
    if each["kind"] == "autoencoder":
        return net, batch, lambda out: nn.functional.mse_loss(out, batch)
    classes = torch.arange(each["batch"]) % 10
    return net, batch, lambda out: nn.functional.cross_entropy(out, classes)


def judge(
    wanted: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], options: argparse.Namespace
) -> turns.Report:
    """Report the errors of the model and its baselines on groups of configurations left out."""
    from xsp.errors import UsageError
    from xsp.predict import configurations, crossvalidation

    table = []
    for each in wanted:
        those = [row for row in rows if row["key"] == json.dumps(each)]
        crowded = each["threads"] * each["processes"] > (os.cpu_count() or 1)
        table.append({**each, **{name: those[0][name] for name in WORK}, CROWDED: "yes" if crowded else "no",
                      "step_s": min(row["step_s"] for row in those)})  # fmt: skip
    title = f"Errors on held-out configurations of {len(table)} recorded ones, and beyond the learned batch sizes"
    report = turns.Report("predict_configurations", title, ("form", "model", "held out, %", "median, %", "beyond, %"))
    for name, (intrinsic, extrinsic, by) in FORMS.items():
        try:
            chosen = (*intrinsic, *extrinsic, *((by,) if by else ()))
            held = configurations.of_rows(table, "step_s", factors=chosen)
            split = crossvalidation.split_of(held, intrinsic, extrinsic, by)
            found = crossvalidation.judge(held, split, options.seed, 20, with_extrapolations=False)
            further = beyond(table, chosen, split, options.seed)
        except UsageError as error:
            report.notes.append(f"{name}: {error}")
            continue
        for error in found.errors:
            ends = f"{100 * further[error.model]:.1f}" if error.model in further else "–"
            report.rows.append((name, error.model, f"{100 * error.mean:.1f}", f"{100 * error.median:.1f}", ends))
        report.data[name] = {"errors": [each._asdict() for each in found.errors], "beyond": further}
        own = next((each.mean for each in found.errors if each.model == crossvalidation.GENERIC), None)
        text = (
            "no figure" if own is None else f"{100 * own:.1f} %, goal at most 10 %: {'met' if own <= 0.1 else 'missed'}"
        )
        report.notes.append(f"{name}: generic {text}; offered: {found.offered_model}.")
        for what, errors in (("held out", {each.model: each.mean for each in found.errors}), ("beyond", further)):
            others = {model: error for model, error in errors.items() if model != crossvalidation.GENERIC}
            if crossvalidation.GENERIC in errors and others:
                best = min(others, key=others.__getitem__)
                report.notes.append(
                    f"{name}, {what}: generic {100 * errors[crossvalidation.GENERIC]:.1f} %, best baseline ({best}) "
                    f"{100 * others[best]:.1f} %."
                )
    report.data["table"] = table
    return report


def beyond(table: Sequence[dict[str, Any]], chosen: Sequence[str], split: Any, seed: int) -> dict[str, float]:
    """Return the mean errors at the largest batch of each kind, learned from the smaller batches."""
    import numpy as np

    from xsp.predict import configurations, crossvalidation

    largest = {kind: max(values["batch"]) for kind, values in GRID.items()}
    held = configurations.of_rows(table, "step_s", factors=chosen)
    is_out = np.array([each["batch"] == largest[each["kind"]] for each in table])
    inside, out = held.take(np.flatnonzero(~is_out)), held.take(np.flatnonzero(is_out))
    if not len(out):
        return {}
    trained = crossvalidation.train_models(inside, split, seed)
    found = {name: float(np.abs(model(out.values) / out.seconds - 1).mean()) for name, model in trained.items()}
    return {name: each for name, each in found.items() if np.isfinite(each)}


if __name__ == "__main__":
    main()
