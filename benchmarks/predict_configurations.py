"""How large is the error of the generic model on held-out configurations: steps of small models, recorded here?

The models are MLPs, CNNs and autoencoders with random batch, width, depth, kernel, stride, activation, optimizer,
threads and processes. Steps of two processes use DistributedDataParallel over gloo, each process with the full batch;
their time is that of the slower process. With two threads each, they have more threads than two cores, and the row
includes that effect. Each configuration is measured in `--rounds` short turns, all configurations once per round in a
new order; its time is the minimum of the medians of its turns, since other processes only add to it. Turns are kept in
`--out`, one per line, so that a run limited by `--seconds` can be resumed. When all turns are measured, the model and
its baselines are evaluated on groups left out:

    python benchmarks/predict_configurations.py --out turns.jsonl --seconds 540     repeat until all is measured
    python benchmarks/predict_configurations.py --table results/predict_configurations.json    evaluate that table again
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
from collections.abc import Callable, Sequence
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
COMMON_FACTORS = {
    "activation": ("relu", "tanh", "gelu"),
    "optimizer": ("sgd", "adam"),
    "threads": (1, 2),
    "processes": (1, 2),
}
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


RANK_TIMEOUT = timedelta(seconds=120)
"""Timeout of a process that waits for another one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure missing turns, then judge, print and save."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--rank"]:  # a process of `RankProcesses`
        serve(int(words[1]), int(words[2]), words[3])
        return
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--out", type=Path, help="where turns are kept (default: nowhere)")
    parser.add_argument("--seconds", type=float, default=3000, help="time limit of this run (default: 3000)")
    parser.add_argument("--count", type=int, help=f"number of configurations (default: {COUNT}, quick: {COUNT_QUICK})")
    parser.add_argument(
        "--table", type=Path, help="a saved result, whose table is evaluated again; nothing is measured"
    )
    options = turns.parse(parser, arguments)
    if options.table is not None:
        saved = json.loads(options.table.read_text(encoding="utf-8"))
        report = judge(saved["data"]["table"], options)
        report.notes.append(f"The rows were measured on {saved['data'].get('measured', saved['date'])}.")
        report.data["measured"] = saved["data"].get("measured", saved["date"])
        report.finish(options)
        return
    configurations = draw_configurations(options.count or (COUNT_QUICK if options.quick else COUNT), options.seed)
    try:
        rows = measure_turns(configurations, options)
    except KeyboardInterrupt:
        turns.say(f"interrupted: run it again, the finished turns are in {options.out}")
        return
    if len(rows) < options.rounds * len(configurations):
        turns.say(
            f"{len(rows)} of {options.rounds * len(configurations)} turns: run it again to continue in {options.out}"
        )
        return
    judge(tabulate(configurations, rows), options).finish(options)


def draw_configurations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different random configurations, equally many of each kind."""
    chance, configurations = random.Random(seed), {}
    while len(configurations) < count:
        kind = tuple(GRID)[len(configurations) % len(GRID)]
        configuration = {
            "kind": kind,
            **{name: chance.choice(values) for name, values in (GRID[kind] | COMMON_FACTORS).items()},
        }
        configurations[json.dumps(configuration)] = configuration
    return list(configurations.values())


def measure_turns(configurations: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the turns of this call and of earlier ones."""
    keys = {json.dumps(configuration): configuration for configuration in configurations}
    rows = []
    if options.out is not None and options.out.exists():
        rows = [row for row in read_turns(options.out) if row["key"] in keys and row["round"] < options.rounds]
    finished = {(row["key"], row["round"]) for row in rows}
    end = time.monotonic() + options.seconds
    with ExitStack() as stack:
        ranks: dict[int, RankProcesses] = {}
        for number in range(options.rounds):
            order = list(keys)
            random.Random(options.seed + number).shuffle(order)
            for key in order:
                if (key, number) in finished:
                    continue
                if time.monotonic() > end:
                    return rows
                count = keys[key]["processes"]
                if count > 1 and count not in ranks:
                    ranks[count] = stack.enter_context(RankProcesses(count))
                result = ranks[count].turn(keys[key], options.quick) if count > 1 else turn(keys[key], options.quick)
                row = {"key": key, "round": number, **result}
                rows.append(row)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            turns.say(f"  round {number + 1} of {options.rounds}: {len(rows)} turns")
    return rows


def read_turns(path: Path) -> list[dict[str, Any]]:
    """Return the turns in a file, and truncate an incomplete last line that a killed program has left."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1]
    if len(lines) < len(content):
        os.truncate(path, len(lines))
    return [json.loads(line) for line in lines.splitlines()]


class RankProcesses:
    """Processes that train together over gloo, one configuration after another; they end with the block."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.stack = ExitStack()

    def __enter__(self) -> RankProcesses:
        store = str(Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "store")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(self.ranks), store],
                env=environment, stdin=subprocess.PIPE, stdout=None if rank else subprocess.PIPE, text=True,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.stack.close()

    def turn(self, configuration: dict[str, Any], quick: bool) -> dict[str, Any]:
        """Train a configuration in all processes, and return the answer of the first one."""
        request = json.dumps({"configuration": configuration, "quick": quick}) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        assert self.processes[0].stdout is not None
        answer = self.processes[0].stdout.readline()
        if not answer:
            raise SystemExit(f"a process ended over {configuration}: its error is above; earlier measurements are kept")
        return json.loads(answer)


def serve(rank: int, ranks: int, store: str) -> None:
    """Train the configurations from stdin as one rank, until stdin ends; rank 0 prints a line for each."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=RANK_TIMEOUT
    )
    for line in sys.stdin:
        result = turn(**json.loads(line))
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def turn(configuration: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Build a model, train some steps, and return the median step time with the work of one process.

    If there are several ranks, all of them take the same number of steps, and the time is that of the slowest rank.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    torch.set_num_threads(configuration["threads"])
    net, batch, loss = build(configuration)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[configuration["optimizer"]](
        net.parameters(), lr=1e-3
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(net(batch)).backward()
        optimizer.step()

    elements = 0

    def count(_module: Any, _inputs: Any, out: Any) -> None:
        nonlocal elements
        elements += out.numel()

    modules = [part for part in net.modules() if not list(part.children())]
    hooks = [part.register_forward_hook(count) for part in modules]
    with FlopCounterMode(display=False) as flops:
        step()
    for hook in hooks:
        hook.remove()
    is_distributed = configuration["processes"] > 1
    modelled = net
    if is_distributed:
        net = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(3):  # buckets are rebuilt after the first step
        step()
    min_s = TURN_S / 25 if quick else TURN_S
    times: list[float] = []
    begin = time.perf_counter()
    step()
    step_count = torch.tensor([float(min(1000, max(5, min_s / (time.perf_counter() - begin))))])
    if is_distributed:
        dist.broadcast(step_count, 0)
    for _ in range(int(step_count)):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    median = torch.tensor([statistics.median(times)], dtype=torch.float64)
    if is_distributed:
        dist.all_reduce(median, dist.ReduceOp.MAX)
    parameters = sum(part.numel() for part in modelled.parameters())
    return {"step_s": float(median), "mflops": flops.get_total_flops() / 1e6, "melements": elements / 1e6,
            "mparameters": parameters / 1e6, "modules": len(modules)}  # fmt: skip


def build(configuration: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a model, its batch and its loss."""
    import torch
    from torch import nn

    width, depth = configuration["width"], configuration["depth"]
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[configuration["activation"]]
    parts: list[Any] = []
    if configuration["kind"] == "cnn":
        channels = 3
        for number in range(depth):
            stride = configuration["stride"] if number == 0 else 1
            parts += [
                nn.Conv2d(channels, width, configuration["kernel"], stride, configuration["kernel"] // 2),
                activation(),
            ]
            channels = width
        net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
        batch = torch.randn(configuration["batch"], 3, 32, 32)
    else:
        inputs = 64 if configuration["kind"] == "mlp" else 256
        sizes = [inputs, *([width] * depth), 10]
        if configuration["kind"] == "autoencoder":
            down = [max(4, width >> number) for number in range(depth)]
            sizes = [inputs, *down, *reversed(down[:-1]), inputs]
        for width_in, width_out in itertools.pairwise(sizes):
            parts += [nn.Linear(width_in, width_out), activation()]
        net, batch = nn.Sequential(*parts[:-1]), torch.randn(configuration["batch"], inputs)
    if configuration["kind"] == "autoencoder":
        return net, batch, lambda out: nn.functional.mse_loss(out, batch)
    classes = torch.arange(configuration["batch"]) % 10
    return net, batch, lambda out: nn.functional.cross_entropy(out, classes)


def tabulate(selection: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each configuration: its factors, its work, and the minimum of its turns."""
    table = []
    for configuration in selection:
        config_rows = [row for row in rows if row["key"] == json.dumps(configuration)]
        crowded = configuration["threads"] * configuration["processes"] > (os.cpu_count() or 1)
        table.append({**configuration, **{name: config_rows[0][name] for name in WORK},
                      CROWDED: "yes" if crowded else "no",
                      "step_s": min(row["step_s"] for row in config_rows)})  # fmt: skip
    return table


def judge(table: Sequence[dict[str, Any]], options: argparse.Namespace) -> turns.Report:
    """Report the errors of the model and its baselines on groups of configurations left out."""
    from xsp.errors import UsageError
    from xsp.predict import configurations, crossvalidation

    title = f"Errors on held-out configurations of {len(table)} recorded ones, and beyond the learned batch sizes"
    report = turns.Report("predict_configurations", title, ("form", "model", "held out, %", "median, %", "beyond, %"))
    for name, (intrinsic, extrinsic, split_factor) in FORMS.items():
        try:
            columns = (*intrinsic, *extrinsic, *((split_factor,) if split_factor else ()))
            data = configurations.of_rows(table, "step_s", factors=columns)
            split = crossvalidation.split_of(data, intrinsic, extrinsic, split_factor)
            evaluation = crossvalidation.judge(data, split, options.seed, 20, with_extrapolations=False)
            extrapolation = extrapolation_errors(table, columns, split, options.seed)
        except UsageError as error:
            report.notes.append(f"{name}: {error}")
            continue
        for error in evaluation.errors:
            beyond_text = f"{100 * extrapolation[error.model]:.1f}" if error.model in extrapolation else "–"
            report.rows.append((name, error.model, f"{100 * error.mean:.1f}", f"{100 * error.median:.1f}", beyond_text))
        report.data[name] = {
            "errors": [model_error._asdict() for model_error in evaluation.errors],
            "beyond": extrapolation,
        }
        generic = next(
            (model_error.mean for model_error in evaluation.errors if model_error.model == crossvalidation.GENERIC),
            None,
        )
        text = (
            "no figure"
            if generic is None
            else f"{100 * generic:.1f} %, goal at most 10 %: {'met' if generic <= 0.1 else 'missed'}"
        )
        report.notes.append(
            f"{name}: generic {text}; offered: {evaluation.offered_model}; {len(evaluation.outliers)} outliers."
        )
        for scope, errors in (
            ("held out", {model_error.model: model_error.mean for model_error in evaluation.errors}),
            ("beyond", extrapolation),
        ):
            baselines = {model: error for model, error in errors.items() if model != crossvalidation.GENERIC}
            if crossvalidation.GENERIC in errors and baselines:
                best = min(baselines, key=baselines.__getitem__)
                report.notes.append(
                    f"{name}, {scope}: generic {100 * errors[crossvalidation.GENERIC]:.1f} %, best baseline ({best}) "
                    f"{100 * baselines[best]:.1f} %."
                )
    report.notes += [*_notes_on_rows(table, options.seed), *_notes_by_kind(table, options.seed)]
    report.data["table"] = table
    return report


KINDS_OF_ROWS: dict[str, Callable[[dict[str, Any]], bool]] = {
    **{f"{kind}s": lambda row, kind=kind: row["kind"] == kind for kind in GRID},
    "one process": lambda row: row["processes"] == 1,
    "two processes, not more threads than cores": lambda row: row["processes"] == 2 and row[CROWDED] == "no",
    "more threads than cores": lambda row: row[CROWDED] == "yes",
    "steps below 1 ms": lambda row: row["step_s"] < 1e-3,
    "steps above 10 ms": lambda row: row["step_s"] > 1e-2,
}


def _notes_by_kind(table: Sequence[dict[str, Any]], seed: int) -> list[str]:
    """Return the errors of each kind of row, held out from one model of all rows by what is computed."""
    import numpy as np

    from xsp.predict import configurations, crossvalidation, generic

    intrinsic, extrinsic, split_factor = FORMS["what is computed"]
    data = configurations.of_rows(table, "step_s", factors=(*intrinsic, *extrinsic))
    split = crossvalidation.split_of(data, intrinsic, extrinsic, split_factor)
    errors = {name: np.full(len(data), np.nan) for name in (crossvalidation.GENERIC, "ridge")}
    for training_rows, heldout_rows in generic.folds(data.groups, crossvalidation.FOLDS, seed):
        models = crossvalidation.train_models(data.take(training_rows), split, seed)
        heldout = data.take(heldout_rows)
        for name, figures in errors.items():
            figures[heldout_rows] = models[name](heldout.values) / heldout.seconds - 1
    notes = []
    for what, is_of_kind in KINDS_OF_ROWS.items():
        chosen = np.array([is_of_kind(row) for row in table])
        parts = [
            f"{name} {100 * np.abs(figures[chosen]).mean():.0f} % (median {100 * np.median(figures[chosen]):+.0f} %)"
            for name, figures in errors.items()
        ]
        notes.append(f"Of {chosen.sum()} rows, {what}: {', '.join(parts)}.")
    return notes


def _notes_on_rows(table: Sequence[dict[str, Any]], seed: int) -> list[str]:
    """Return the errors by what is computed if only some rows are there: which rows make them large."""
    from xsp.errors import UsageError
    from xsp.predict import configurations, crossvalidation

    notes = []
    intrinsic, extrinsic, split_factor = FORMS["what is computed"]
    for what, rows in (
        ("without more threads than cores", [row for row in table if row[CROWDED] == "no"]),
        ("of one process", [row for row in table if row["processes"] == 1]),
    ):
        try:
            data = configurations.of_rows(rows, "step_s", factors=(*intrinsic, *extrinsic))
            split = crossvalidation.split_of(data, intrinsic, extrinsic, split_factor)
            evaluation = crossvalidation.judge(data, split, seed, 20, with_extrapolations=False)
        except UsageError as error:
            notes.append(f"what is computed, {what}: {error}")
            continue
        errors = {error.model: error.mean for error in evaluation.errors}
        notes.append(f"what is computed, {what}, {len(rows)} rows: " + ", ".join(
            f"{model} {100 * errors[model]:.1f} %" for model in ("generic", "ridge") if model in errors
        ) + ".")  # fmt: skip
    return notes


def extrapolation_errors(
    table: Sequence[dict[str, Any]], columns: Sequence[str], split: Any, seed: int
) -> dict[str, float]:
    """Return the mean errors at the largest batch of each kind, learned from the smaller batches."""
    import numpy as np

    from xsp.predict import configurations, crossvalidation

    largest = {kind: max(values["batch"]) for kind, values in GRID.items()}
    data = configurations.of_rows(table, "step_s", factors=columns)
    is_out = np.array([row["batch"] == largest[row["kind"]] for row in table])
    smaller, held_out = data.take(np.flatnonzero(~is_out)), data.take(np.flatnonzero(is_out))
    if not len(held_out):
        return {}
    models = crossvalidation.train_models(smaller, split, seed)
    mean_errors = {
        name: float(np.abs(model(held_out.values) / held_out.seconds - 1).mean()) for name, model in models.items()
    }
    return {name: error for name, error in mean_errors.items() if np.isfinite(error)}


if __name__ == "__main__":
    main()
