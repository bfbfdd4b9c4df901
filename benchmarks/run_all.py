"""Run all benchmarks, one after the other, in bounded time; what needs a GPU or a peer that is absent is skipped."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import page
from turns import SKIPPED

SCRIPTS = (
    "idle_cost",
    "import_time",
    "layer_overhead",
    "op_overhead",
    "true_time",
    "sampling_cost",
    "long_run",
    "long_run",
    "otlp_encode",
    "otlp_loss",
    "otlp_million",
    "service_cost",
    "parents",
    "reopen",
    "kineto_scale",
    "kineto_peers",
    "rank_scale",
    "cupti_decode",
    "gpu_rungs",
    "gpu_true_time",
    "gpu_attribution",
    "gpu_kineto",
    "gpu_drops",
)


def run(script: str, options: Sequence[str], seconds: float) -> str:
    """Run a script; return `ran`, `skipped`, or what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), *options]
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return "ran out of time"
    return {0: "ran", SKIPPED: "skipped"}.get(code, f"failed with exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them, write the page of figures anew, and return 1 if one failed."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--limit", type=float, default=2700, help="seconds for all of them together (default: 2700)")
    made.add_argument("--full", action="store_true", help="real figures: up to 45 minutes, on a quiet machine")
    made.add_argument("--save", action="store_true", help="write benchmarks/results/*.json as well (needs --full)")
    made.add_argument("--page", action="store_true", help="run nothing: write the page of figures from what is saved")
    options = made.parse_args(arguments)
    if options.save and not options.full:
        made.error("--save: figures of a quick run are not kept; add --full")
    failed = [] if options.page else _all(options)
    page.main([])
    return 1 if failed else 0


def _all(options: argparse.Namespace) -> list[str]:
    """Run all scripts; return the names of those that failed."""
    passed = [*([] if options.full else ["--quick"]), *(["--save"] if options.save else [])]
    end = time.monotonic() + options.limit
    ends = {}
    for script in SCRIPTS:
        print(f"\n## {script}\n", flush=True)
        begin = time.monotonic()
        ends[script] = run(script, passed, end - begin) if begin < end else "not run: out of time"
        print(f"({ends[script]}, {time.monotonic() - begin:.0f} s)", flush=True)
    for what in dict.fromkeys(ends.values()):
        print(f"{what}: {', '.join(script for script, each in ends.items() if each == what)}")
    return [script for script, each in ends.items() if each not in ("ran", "skipped")]


if __name__ == "__main__":
    sys.exit(main())
