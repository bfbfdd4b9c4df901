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
        found = json.loads(python(PROFILED, json.dumps(HEAVY), f"{folder}/run").splitlines()[-1])
    if not found["stored"]:
        raise SystemExit("the profiled program stored no step: nothing to report")
    return {name: found[name] for name in ("before", "after")}


def measure(taker: turns.Turns, rounds: int) -> list[turns.Round]:
    """Return the wall times of fresh processes."""
    codes = {"pass": "pass", "import xsp": "import xsp"}
    conditions = [Condition(name, lambda code=code: python(code)) for name, code in codes.items()]
    return taker.take([Group(conditions)], rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=40), arguments)
    columns = ("fresh process", "wall ms", "more than `pass`, ms [95 %]", "< 100 ms")
    report = turns.Report("import_time", "Time of `import xsp` in a fresh process, in turns", columns)
    taker = turns.turns_of(options)
    rounds = measure(taker, options.rounds)
    for name in ("pass", "import xsp"):
        wall = turns.middle([each[name] for each in rounds]).shown(1, 1e-6)
        more = turns.difference(rounds, name, "pass")
        cells = ["", ""] if name == "pass" else [more.shown(1, 1e-6), turns.verdict(more, GOAL_MS * 1e6)]
        report.add([name, wall, *cells], more=more, rounds=[each[name] for each in rounds])
    modules = heavy_modules()
    report.notes += [*_sentences(modules), taker.note()]
    report.data["heavy"] = modules
    report.finish(options)


def _sentences(modules: dict[str, list[str]]) -> list[str]:
    ours = [name for name in modules["after"] if name not in modules["before"]]
    absent = [name for name in HEAVY if name not in modules["after"]]
    return [
        f"In a profiled process: not loaded {', '.join(absent) or 'none'}; "
        f"loaded by the program itself (torch) {', '.join(modules['before']) or 'none'}; "
        f"loaded by xsp {', '.join(ours) or 'none'}.",
    ]


if __name__ == "__main__":
    main()
