"""Run all benchmarks, one after the other, in bounded time; benchmarks without their GPU or peer are skipped.

Every script in this folder is a benchmark; their shared code is in `parts`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from parts import page, turns

SLOW_SCRIPTS = (
    "bare", "between", "unrecorded_steps", "phases", "true_time", "short_steps", "same_results", "compare_runs",
    "layer_overhead", "op_overhead", "service_cost", "long_run", "sampling_cost", "graph_corpus", "block_timings",
    "shared_layers", "graph_memory", "construction", "measures_latency",
    "language_lengths", "estimators", "share_models", "share_load", "advice", "predict_configurations",
    "predict_scaling", "predict_ddp", "predict_repeated", "predict_curves", "predict_buckets",
    "otlp_encode", "otlp_million", "otlp_loss", "serve_load", "generation_load", "served_requests", "engine_cost",
    "parents", "reopen",
    "rank_scale", "spark_ranks", "kineto_scale", "kineto_peers",
)  # fmt: skip
"""Scripts that take minutes, in their order; all other scripts run first."""

SHARE_FACTOR = 3.0
"""Maximum time of a script, as a multiple of an equal share of the remaining time; short scripts leave time unused."""

SECONDS, SECONDS_FULL = 840.0, 2640.0
"""Seconds for all scripts together, quick and full: 14 and 44 minutes."""

GRACE_S = 10
"""Seconds for an interrupted script to remove its files before it and its subprocesses are killed."""

REASON_LETTERS = 90
"""Maximum number of characters of a reason in the table."""


class Outcome(NamedTuple):
    """How a script ended."""

    script: str
    status: str
    seconds: float
    reason: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the script failed, was cut off or was not run."""
        return self.status not in ("ran", "skipped")


def scripts() -> list[Path]:
    """Return the benchmark scripts, the ones in `SLOW_SCRIPTS` at the end."""
    paths = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name != Path(__file__).name]
    return sorted(paths, key=lambda path: SLOW_SCRIPTS.index(path.stem) if path.stem in SLOW_SCRIPTS else -1)


def run(script: Path, options: Sequence[str], seconds: float) -> Outcome:
    """Run a script in a new process group, which is killed at the timeout or when the script ends."""
    print(f"\n## {script.stem}\n", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors_file:
        process = subprocess.Popen([sys.executable, str(script), *options], stderr=errors_file, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors_file.seek(0)
        lines = errors_file.read().splitlines()
    elapsed_s, last_line = (
        time.monotonic() - begin,
        next((line.strip() for line in reversed(lines) if line.strip()), ""),
    )
    if code is None:
        return Outcome(script.stem, "cut off", elapsed_s, f"limit of {seconds:.0f} s; last: {last_line}")
    if code == turns.SKIPPED:
        return Outcome(script.stem, "skipped", elapsed_s, last_line)
    if code != 0:
        print("\n".join(lines), file=sys.stderr)
    return Outcome(
        script.stem, "failed" if code else "ran", elapsed_s, f"exit status {code}: {last_line}" if code else ""
    )


def run_all(selection: Sequence[Path], options: Sequence[str], seconds: float) -> list[Outcome]:
    """Run scripts in order, each with a share of the remaining time."""
    end, outcomes = time.monotonic() + seconds, []
    for index, script in enumerate(selection):
        seconds_left = end - time.monotonic()
        share = min(seconds_left, SHARE_FACTOR * seconds_left / (len(selection) - index))
        outcomes.append(
            run(script, options, share) if seconds_left > 0 else Outcome(script.stem, "not run", 0, "out of time")
        )
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts, rewrite the page of figures, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", metavar="NAME", help="script, such as layer_overhead (default: all)")
    parser.add_argument(
        "--limit", type=float, help=f"seconds for all scripts (default: {SECONDS:.0f}, full: {SECONDS_FULL:.0f})"
    )
    parser.add_argument("--full", action="store_true", help="real figures: up to 45 minutes, on a quiet machine")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/*.json as well (needs --full)")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page of the saved figures")
    options = parser.parse_args(arguments)
    if options.save and not options.full:
        parser.error("--save: figures of a quick run are not kept; add --full")
    selection = [script for script in scripts() if not options.only or script.stem in options.only]
    if unknown := set(options.only) - {script.stem for script in selection}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; see benchmarks/README.md")
    outcomes: list[Outcome] = []
    if not options.page:
        script_options = [*([] if options.full else ["--quick"]), *(["--save"] if options.save else [])]
        outcomes = run_all(selection, script_options, options.limit or (SECONDS_FULL if options.full else SECONDS))
        rows = [
            [outcome.script, outcome.status, f"{outcome.seconds:.0f}", outcome.reason[:REASON_LETTERS]]
            for outcome in outcomes
        ]
        print("\n".join(["", *turns.table(["script", "", "s", "why"], rows), ""]))
    page.update()
    print(f"all saved figures: {page.PAGE}")
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
