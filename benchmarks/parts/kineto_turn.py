"""One turn: a tool loads a trace in a process of its own and runs all its analyses.

The process runs the Python of the tool's own environment, so this file imports only the standard library until it knows
the tool. The process prints a `Turn` as one line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Answers = dict[str, Callable[[], Any]]
FIGURES = ("window", "busy", "idle", "communication", "exposed communication")
"""Times of a device, in milliseconds, that several tools report."""


@dataclass
class Turn:
    """The result of a turn. A time of None means that the turn failed before it."""

    tool: str
    version: str = ""
    load_s: float | None = None
    answers_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each analysis, whether it answered or raised."""

    raised: dict[str, str] = field(default_factory=dict)
    """Analysis, or `load` → its error."""

    refused: dict[str, str] = field(default_factory=dict)
    """Analysis → the tool's own reason why the trace does not support it."""

    figures: dict[str, float] = field(default_factory=dict)
    """The `FIGURES` that the tool reports."""

    peak_bytes: int = 0
    """Peak resident memory of the process over its whole life."""

    @property
    def analyses_s(self) -> float | None:
        """Seconds of all analyses, including those that raised; None if the trace was not loaded."""
        return None if self.load_s is None else sum(self.answers_s.values())


def run_tool(python: str, tool: str, trace: Path, limit_s: float = 3600) -> Turn:
    """Start the process, wait for it, and return its turn.

    Args:
        python: interpreter of the environment in which the tool is installed.
        tool: a name in `TOOLS`.
        trace: trace to load; for xsp also the directory of a run.
        limit_s: timeout in seconds, after which the process is killed; its exit status is then the error.
    """
    _warm(trace)
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([python, __file__, tool, str(trace)], stdout=out, stderr=subprocess.DEVNULL)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - begin > limit_s:
                process.kill()
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = out.read().decode(errors="replace").splitlines()
    turn = Turn(tool, raised={"load": f"the process ended with {process.returncode}"})
    if process.returncode == 0 and lines:
        turn = Turn(**json.loads(lines[-1]))
    turn.peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return turn


def _warm(trace: Path) -> None:
    """Read a file, or the files of a directory, once into the page cache, so that no tool pays for the disk."""
    for path in [trace, *trace.rglob("*")]:
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass


# --- in the process ---------------------------------------------------------------------------------------


def xsp(turn: Turn, trace: str) -> None:
    """Load the trace with xsp, and run all analyses."""
    import xsp
    from xsp.errors import AnalysisError

    turn.version = xsp.__version__
    os.environ["XSP_CACHE"] = ""  # each turn reads the trace
    load = xsp.load  # this attribute access imports the loader; imports are not timed for any tool
    with _loading(turn):
        loaded_trace = load(trace)
    if turn.load_s is None:
        return
    for name, analysis in xsp.analyses.ANALYSES.items():
        begin = time.perf_counter()
        try:
            analysis(loaded_trace).fetchall()
        except AnalysisError as refusal:
            turn.refused[name] = str(refusal)
        except Exception as error:
            turn.raised[name] = _error_text(error)
        turn.answers_s[name] = time.perf_counter() - begin
    with contextlib.suppress(AnalysisError):
        table = xsp.analyses.ANALYSES["device-activity"](loaded_trace)
        row = dict(zip(table.columns, table.fetchall()[-1], strict=True))  # the only device, or the sum over all
        turn.figures = {figure: row[f"{figure.replace(' ', '_')}_ms"] for figure in FIGURES}


def hta(turn: Turn, trace: str) -> None:
    """Load the trace with Holistic Trace Analysis, and run the nine analyses of one rank in its documentation."""
    from hta.configs.config import logger
    from hta.trace_analysis import TraceAnalysis

    logger.setLevel(logging.CRITICAL)
    turn.version = _version("traceinsight") or _version("HolisticTraceAnalysis")
    with _loading(turn):
        analysis = TraceAnalysis(trace_files={0: trace}, trace_dir="", include_last_profiler_step=True)
    if turn.load_s is None:
        return
    results: dict[str, Any] = {}
    answers: Answers = {
        "temporal breakdown": lambda: analysis.get_temporal_breakdown(visualize=False),
        "kernel breakdown": lambda: analysis.get_gpu_kernel_breakdown(visualize=False),
        "idle time breakdown": lambda: analysis.get_idle_time_breakdown(ranks=[0], visualize=False),
        "communication overlap": lambda: analysis.get_comm_comp_overlap(visualize=False),
        "launch statistics": lambda: analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False),
        "queue length": lambda: analysis.get_queue_length_summary(ranks=[0]),
        "memory bandwidth": lambda: analysis.get_memory_bw_summary(ranks=[0]),
        "kernel sequences": lambda: analysis.get_frequent_cuda_kernel_sequences(
            operator_name="aten::linear", output_dir=tempfile.gettempdir(), visualize=False
        ),
        "critical path": lambda: analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=0),
    }
    _run_analyses(turn, answers, results)
    with contextlib.suppress(Exception):
        row = results["temporal breakdown"].iloc[0]
        turn.figures |= {"window": row["kernel_time(us)"] / 1000, "idle": row["idle_time(us)"] / 1000}
    with contextlib.suppress(Exception):
        kinds = results["kernel breakdown"][0]
        is_communication = kinds["kernel_type"].str.contains("COMMUNICATION")
        is_exposed = ~kinds["kernel_type"].str.contains("COMPUTATION")
        turn.figures["busy"] = kinds["sum"].sum() / 1000
        turn.figures["communication"] = kinds[is_communication]["sum"].sum() / 1000
        turn.figures["exposed communication"] = kinds[is_communication & is_exposed]["sum"].sum() / 1000


def tracelens(turn: Turn, trace: str) -> None:
    """Load the trace with TraceLens, and generate its report."""
    from TraceLens import TreePerfAnalyzer
    from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch

    turn.version = _version("TraceLens")
    results: dict[str, Any] = {}
    from_file = TreePerfAnalyzer.from_file

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        tree = from_file(*args, **kwargs)
        turn.load_s = time.perf_counter() - begin
        return tree

    TreePerfAnalyzer.from_file = timed
    with tempfile.TemporaryDirectory() as folder:
        _run_analyses(turn, {"report": lambda: generate_perf_report_pytorch(trace, output_csvs_dir=folder)}, results)
    if turn.load_s is None:
        turn.raised["load"] = turn.raised.pop("report", "?")
        return
    turn.answers_s["report"] -= turn.load_s
    with contextlib.suppress(Exception):
        rows = results["report"]["gpu_timeline"].set_index("type")["time ms"]
        columns = {"window": "total_time", "idle": "idle_time", "busy": "busy_time",
                 "communication": "total_comm_time", "exposed communication": "exposed_comm_time"}  # fmt: skip
        turn.figures |= {figure: float(rows[column]) for figure, column in columns.items() if column in rows}


TOOLS = {"xsp": xsp, "hta": hta, "tracelens": tracelens}


@contextlib.contextmanager
def _loading(turn: Turn) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    except (Exception, SystemExit) as error:
        turn.raised["load"] = _error_text(error)
    else:
        turn.load_s = time.perf_counter() - begin


def _run_analyses(turn: Turn, answers: Answers, results: dict[str, Any]) -> None:
    """Run each analysis; an error ends only that analysis."""
    for name, answer in answers.items():
        begin = time.perf_counter()
        try:
            results[name] = answer()
        except (Exception, SystemExit) as error:
            turn.raised[name] = _error_text(error)
        turn.answers_s[name] = time.perf_counter() - begin


def _error_text(error: BaseException) -> str:
    """Return an error's type and first line, with paths reduced to the names of files."""
    lines = re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", str(error)).splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(tool: str, trace: str) -> None:
    """Take the turn, and print it as the last line, after any output of the tool."""
    warnings.simplefilter("ignore")
    turn = Turn(tool)
    TOOLS[tool](turn, trace)
    print("\n" + json.dumps(asdict(turn), default=float), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
