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

LAST = (
    "true_time", "short_steps", "same_results", "compare_runs", "layer_overhead", "op_overhead", "service_cost",
    "long_run", "sampling_cost", "graph_corpus", "block_timings", "shared_layers", "construction", "measures_latency",
    "language_lengths", "estimators", "share_models", "share_load", "advice", "predict_configurations",
    "predict_scaling", "predict_ddp", "predict_curves", "predict_buckets",
    "otlp_encode", "otlp_million", "otlp_loss", "parents", "reopen",
    "rank_scale", "spark_ranks", "kineto_scale", "kineto_peers",
)  # fmt: skip
"""Scripts that take minutes, in their order; all other scripts run first."""

SHARE = 3.0
"""Maximum time of a script, as a multiple of an equal share of the remaining time; short scripts leave time unused."""

SECONDS, SECONDS_FULL = 840.0, 2640.0
"""Seconds for all scripts together, quick and full: 14 and 44 minutes."""

GRACE = 10
"""Seconds for an interrupted script to remove its files before it and its subprocesses are killed."""

WIDE = 90
"""Maximum number of characters of a reason in the table."""


class Ended(NamedTuple):
    """How a script ended."""

    script: str
    how: str
    seconds: float
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether the script failed, was cut off or was not run."""
        return self.how not in ("ran", "skipped")


def scripts() -> list[Path]:
    """Return the benchmark scripts, the ones in `LAST` at the end."""
    found = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name != Path(__file__).name]
    return sorted(found, key=lambda path: LAST.index(path.stem) if path.stem in LAST else -1)


def run(script: Path, options: Sequence[str], seconds: float) -> Ended:
    """Run a script in a new process group, which is killed at the timeout or when the script ends."""
    print(f"\n## {script.stem}\n", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as told:
        process = subprocess.Popen([sys.executable, str(script), *options], stderr=told, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        lines = told.read().splitlines()
    taken, last = time.monotonic() - begin, next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code is None:
        return Ended(script.stem, "cut off", taken, f"limit of {seconds:.0f} s; last: {last}")
    if code == turns.SKIPPED:
        return Ended(script.stem, "skipped", taken, last)
    if code != 0:
        print("\n".join(lines), file=sys.stderr)
    return Ended(script.stem, "failed" if code else "ran", taken, f"exit status {code}: {last}" if code else "")


def run_all(those: Sequence[Path], options: Sequence[str], seconds: float) -> list[Ended]:
    """Run scripts in order, each with a share of the remaining time."""
    end, ended = time.monotonic() + seconds, []
    for place, script in enumerate(those):
        left = end - time.monotonic()
        share = min(left, SHARE * left / (len(those) - place))
        ended.append(run(script, options, share) if left > 0 else Ended(script.stem, "not run", 0, "out of time"))
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts, rewrite the page of figures, and return 1 if one failed."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("only", nargs="*", metavar="NAME", help="script, such as layer_overhead (default: all)")
    made.add_argument(
        "--limit", type=float, help=f"seconds for all scripts (default: {SECONDS:.0f}, full: {SECONDS_FULL:.0f})"
    )
    made.add_argument("--full", action="store_true", help="real figures: up to 45 minutes, on a quiet machine")
    made.add_argument("--save", action="store_true", help="write benchmarks/results/*.json as well (needs --full)")
    made.add_argument("--page", action="store_true", help="run nothing: write the page of the saved figures")
    options = made.parse_args(arguments)
    if options.save and not options.full:
        made.error("--save: figures of a quick run are not kept; add --full")
    those = [script for script in scripts() if not options.only or script.stem in options.only]
    if unknown := set(options.only) - {script.stem for script in those}:
        made.error(f"there is no benchmark {', '.join(sorted(unknown))}; see benchmarks/README.md")
    ended: list[Ended] = []
    if not options.page:
        passed = [*([] if options.full else ["--quick"]), *(["--save"] if options.save else [])]
        ended = run_all(those, passed, options.limit or (SECONDS_FULL if options.full else SECONDS))
        rows = [[each.script, each.how, f"{each.seconds:.0f}", each.why[:WIDE]] for each in ended]
        print("\n".join(["", *turns.table(["script", "", "s", "why"], rows), ""]))
    page.update()
    print(f"all saved figures: {page.PAGE}")
    return int(any(each.failed for each in ended))


if __name__ == "__main__":
    sys.exit(main())
