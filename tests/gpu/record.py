"""Record on a GPU what tests replay without one: runs, raw records of CUPTI, traces of Kineto, a report of ncu.

    python record.py OUT

OUT gets `runs/STEP-SOURCE` (run directories), `records/STEP.json` (what CUPTI's callback copied),
`kineto/STEP.json.gz`, `ncu.csv`, and `failures.json` with what could not be had and why. Names of the host, the user
and folders are taken out of all text; nothing else is changed.
"""

from __future__ import annotations

import faulthandler
import getpass
import gzip
import json
import platform
import re
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small
import torch

import xsp
from xsp import plugins
from xsp.counters import ncu
from xsp.launch import models
from xsp.schema import Level

SOURCES = ("cupti", "kineto")
STEPS = 2
MOST_BYTES = 5_000_000


def run(step: small.Step, source: str, out: Path) -> None:
    """Record a run with all levels."""
    with xsp.profile(out.name, levels="M/L/G", out=out, kernels=source) as prof:
        for _ in range(prof.schedule.steps_for(STEPS)):
            with prof.step():
                step()


def records(step: small.Step, out: Path) -> None:
    """Record a step, and keep what CUPTI's callback copied, before anything is made of it.

    Raises:
        RuntimeError: CUPTI cannot be had.
    """
    collector: Any = plugins.load("xsp.collectors", "cupti")()
    step()
    reason = collector.available() or collector.trial()
    if reason is not None:
        raise RuntimeError(reason)
    collector.is_device_source = True
    collector.open()
    try:
        collector.start(Level.KERNEL, describe=False)
        step()
        torch.cuda.synchronize()
        collector.stop()
        rows = collector._records.take().rows()
    finally:
        collector.close()
    fields = {type(row).__name__: row._fields for _, row in rows}
    content = {"fields": fields, "rows": [[int(kind), type(row).__name__, *row] for kind, row in rows]}
    out.write_text(json.dumps(content), encoding="utf-8")


def kineto(step: small.Step, out: Path) -> None:
    """Record a step with torch.profiler, and keep its trace, compressed."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        text = scrubbed(plain.read_text(encoding="utf-8", errors="replace"))
    out.write_bytes(gzip.compress(text.encode(), mtime=0))


def counters(out: Path) -> None:
    """Count one step of the convolutional net with Nsight Compute, and keep the table."""
    with tempfile.TemporaryDirectory() as folder:
        table = ncu.collect([sys.executable, str(Path(__file__).with_name("small.py"))], Path(folder))
        shutil.copyfile(table, out)


def scrubbed(text: str) -> str:
    """Return a text without the names of the host and the user, and without folders."""
    for name in {socket.gethostname(), platform.node(), _user()} - {"", "root", "localhost"}:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "scrubbed", text)
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@-]+)+/(?=[\w.+@-]+)", "", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""


def main(out: Path) -> int:
    """Record everything that can be had; return 1 if something could not."""
    faulthandler.dump_traceback_later(45, repeat=True)  # where it hangs, if it does
    failures: dict[str, str] = {}
    models.set_library_variables("auto")

    def attempt(name: str, record: Callable[[], object]) -> None:
        try:
            record()
        except Exception as error:  # one that fails must not cost the others
            failures[name] = scrubbed(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"{name}: {failures.get(name, 'recorded')}", flush=True)

    for folder in ("runs", "records", "kineto"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    try:
        for name, make in small.STEPS.items():
            for source in SOURCES:
                attempt(f"{name}-{source}", lambda n=name, m=make, s=source: run(m(), s, out / "runs" / f"{n}-{s}"))
            attempt(f"{name} records", lambda n=name, m=make: records(m(), out / "records" / f"{n}.json"))
            attempt(f"{name} kineto", lambda n=name, m=make: kineto(m(), out / "kineto" / f"{n}.json.gz"))
            torch._dynamo.reset()
        attempt("ncu", lambda: counters(out / "ncu.csv"))
    except KeyboardInterrupt:
        failures["the rest"] = "cut off"
    (out / "failures.json").write_text(json.dumps(failures, indent=1), encoding="utf-8")
    for path in (path for path in out.rglob("*") if path.suffix in (".json", ".csv", ".txt")):
        path.write_text(scrubbed(path.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB" + (f", more than the {MOST_BYTES / 1e6:.0f} MB meant" if size > MOST_BYTES else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
