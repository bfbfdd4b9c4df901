"""How long does `import xsp` take, and which heavy modules does xsp load into the program that it measures?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from parts import turns
from parts.turns import Condition, Group

GOAL_MS = 100
HEAVY = ("duckdb", "pandas", "pyarrow", "polars", "numpy", "rich", "opentelemetry.sdk")
PROFILED = """
import json, sys
import torch
heavy = json.loads(sys.argv[1])
model, value = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(2, 8)
model(value)
before = [name for name in heavy if name in sys.modules]
import xsp
with xsp.profile("heavy", levels="M/L/G", out=sys.argv[2]) as prof:
    for _ in range(prof.schedule.steps_for(2)):
        with prof.step():
            model(value).sum().backward()
after = [name for name in heavy if name in sys.modules]
print(json.dumps({"before": before, "after": after, "stored": prof.steps_stored}))
"""


def python(code: str, *arguments: str) -> str:
    """Run code in a fresh process and return what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def heavy_modules() -> dict[str, list[str]]:
    """Return the heavy modules that a program has loaded before and after it profiles itself."""
    with tempfile.TemporaryDirectory() as folder:
        result = json.loads(python(PROFILED, json.dumps(HEAVY), f"{folder}/run").splitlines()[-1])
    if not result["stored"]:
        raise SystemExit("the profiled program stored no step: nothing to report")
    return {name: result[name] for name in ("before", "after")}


def measure(method: turns.Turns, rounds: int) -> list[turns.Round]:
    """Return the wall times of fresh processes."""
    codes = {"pass": "pass", "import xsp": "import xsp"}
    conditions = [Condition(name, lambda code=code: python(code)) for name, code in codes.items()]
    return method.take([Group(conditions)], rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=40), arguments)
    columns = ("fresh process", "wall ms", "more than `pass`, ms [95 %]", "< 100 ms")
    report = turns.Report("import_time", "Time of `import xsp` in a fresh process, in turns", columns)
    method = turns.turns_of(options)
    rounds = measure(method, options.rounds)
    for name in ("pass", "import xsp"):
        wall = turns.middle([round_times[name] for round_times in rounds]).text(1, 1e-6)
        excess = turns.difference(rounds, name, "pass")
        cells = ["", ""] if name == "pass" else [excess.text(1, 1e-6), turns.verdict(excess, GOAL_MS * 1e6)]
        report.add([name, wall, *cells], more=excess, rounds=[round_times[name] for round_times in rounds])
    modules = heavy_modules()
    report.notes += [*_sentences(modules), method.note()]
    report.data["heavy"] = modules
    report.finish(options)


def _sentences(modules: dict[str, list[str]]) -> list[str]:
    added = [name for name in modules["after"] if name not in modules["before"]]
    absent = [name for name in HEAVY if name not in modules["after"]]
    return [
        f"In a profiled process: not loaded {', '.join(absent) or 'none'}; "
        f"loaded by the program itself (torch) {', '.join(modules['before']) or 'none'}; "
        f"loaded by xsp {', '.join(added) or 'none'}.",
    ]


if __name__ == "__main__":
    main()
