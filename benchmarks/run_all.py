"""Run all benchmarks, one after the other, in bounded time."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = (
    "idle_cost",
    "import_time",
    "layer_overhead",
    "op_overhead",
    "true_time",
    "sampling_cost",
    "otlp_encode",
    "otlp_loss",
    "otlp_million",
    "service_cost",
    "parents",
    "reopen",
    "kineto_scale",
    "kineto_peers",
    "cupti_decode",
)


def run(script: str, options: Sequence[str], seconds: float) -> str | None:
    """Run a script; return None if it went well, else what happened."""
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), *options]
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return "ran out of time"
    return None if code == 0 else f"failed with exit code {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; options of this script's own aside, all are passed on."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--limit", type=float, default=2700, help="seconds for all of them together (default: 2700)")
    made.add_argument("--quick", action="store_true", help="small and short: to see that they work")
    made.add_argument("--save", action="store_true", help="write benchmarks/results/*.json as well")
    options = made.parse_args(arguments)
    passed = [f"--{name}" for name in ("quick", "save") if getattr(options, name)]
    end = time.monotonic() + options.limit
    failures = 0
    for script in SCRIPTS:
        print(f"\n## {script}\n", flush=True)
        begin = time.monotonic()
        failed = run(script, passed, end - begin) if begin < end else "not run: out of time"
        failures += failed is not None
        print(f"({failed or f'{time.monotonic() - begin:.0f} s'})", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
