"""Nsight Compute's command line: find it, run a program under it, export its report, explain its failures.

`ncu` replays each kernel between `cudaProfilerStart` and `cudaProfilerStop` as often as the wanted metrics require, and
restores the device's memory before each replay. It flushes the caches before each replay, so that counters do not
depend on earlier work (`--cache-control all`), and does not change the clocks (`--clock-control none`), because its
times are not used. Options are those of versions 2021.1 and later.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from xsp.device import metrics
from xsp.errors import CounterError

PROGRAM = "ncu"
MACHINE = "a machine with an NVIDIA GPU"

_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_LIMIT_S = 120
"""Timeout in seconds for short commands; a program under ncu has no timeout."""

_ATTEMPTS = 3
"""Maximum number of starts: an unknown metric ends ncu before the program starts, and is then left out."""

_UNKNOWN_METRIC = re.compile(r"Failed to find metric (?:regex:\^)?(\w+?__\w+)")

FAILURES: tuple[tuple[str, str], ...] = (
    (
        "ERR_NVGPUCTRPERM",
        "this user may not read the device's performance counters (ERR_NVGPUCTRPERM): run as root, give the container "
        "the capability SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
        "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)",
    ),
    ("driver resource was unavailable", "another program holds the device's counters, DCGM for instance: stop it"),
    (
        "InterprocessLockFailed",
        "the lock file of another user's ncu is in the way: set TMPDIR to a directory of your own",
    ),
    ("driver is not compatible", "the driver is too old or too new for this ncu: install one that matches"),
    ("unsupported chip", "this ncu does not know the device: it is too old or too new"),
    ("LibraryNotLoaded", "ncu could not load its libraries into the program"),
)
"""Text in ncu's output → its meaning."""

NO_KERNELS = "No kernels were profiled"


def find() -> str:
    """Return the path of ncu: on the PATH, else in the folders of CUDA's packages.

    Raises:
        CounterError: ncu is not installed.
    """
    path = shutil.which(PROGRAM)
    if path is None:
        paths = [file for folder in _FOLDERS for file in sorted(Path(folder).glob(f"**/{PROGRAM}"), reverse=True)]
        path = next((str(file) for file in paths if os.access(file, os.X_OK) and file.is_file()), None)
    if path is None:
        raise CounterError(
            f"{PROGRAM} is not installed: install NVIDIA Nsight Compute (package nsight-compute, or with the CUDA "
            "toolkit) and put it on the PATH"
        )
    return path


def collect(command: Sequence[str], folder: Path) -> Path:
    """Run a program under ncu, and return the table of its report.

    Args:
        command: the program, which marks the kernels to count with `cudaProfilerStart` and `cudaProfilerStop`.
        folder: folder for the report, which contains the host's name, so the caller must delete the folder.

    Returns:
        The path of a CSV file that `xsp.counters.reading` reads.

    Raises:
        CounterError: there are no counters, with the reason.
    """
    program = find()
    names = available(program)
    log = folder / "ncu.log"
    for _ in range(_ATTEMPTS):
        code = subprocess.run([*_command(program, names, folder / "report", log), *command], check=False).returncode
        output = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        unknown = set(_UNKNOWN_METRIC.findall(output))
        report = next(folder.glob("report.*rep*"), None)  # ncu adds the suffix, which changed in 2020
        if report is not None or not unknown:
            break
        names = [name for name in names if name.partition(".")[0] not in unknown]
    if report is None or NO_KERNELS in output:
        raise CounterError(reason(output, code))
    return _export_table(program, report, folder / "report.csv")


def available(program: str) -> list[str]:
    """Return the wanted metrics that the devices here have; all of them if ncu does not list any."""
    try:
        listing = subprocess.run(
            [program, "--query-metrics"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return metrics.requested()
    available_names = set(re.findall(r"^\W*(\w+?__\w+)", listing.stdout, re.MULTILINE))
    return metrics.requested(available_names) or metrics.requested()


def reason(output: str, code: int) -> str:
    """Return a sentence on why there are no counters."""
    for pattern, meaning in FAILURES:
        if pattern.lower() in output.lower():
            return meaning
    errors = re.findall(r"==ERROR== (.+)", output)
    if errors:
        message = re.sub(r"(?<![\w:])/\S+", "…", errors[0].strip())  # paths may contain a user's name
        return f"ncu failed: {message}"
    if NO_KERNELS in output:
        return "ncu saw no kernel in the step; it does not support devices before compute capability 7.0"
    return f"ncu wrote no report (exit status {code})"


def _command(program: str, names: Sequence[str], report: Path, log: Path) -> list[str]:
    """Return the command of ncu, to which the words of the program are added."""
    return [
        program,
        *("--export", str(report), "--force-overwrite", "--log-file", str(log)),
        *("--metrics", ",".join(names), "--nvtx", "--profile-from-start", "off"),
        *("--target-processes", "application-only", "--replay-mode", "kernel"),
        *("--cache-control", "all", "--clock-control", "none"),
    ]


def _export_table(program: str, report: Path, path: Path) -> Path:
    """Write a report's page `raw` as CSV; an ncu without the option for units uses its own units."""
    command = [program, "--import", str(report), "--csv", "--page", "raw"]
    for units in (["--print-units", "base"], []):
        with open(path, "wb") as table:
            process = subprocess.run(
                [*command, *units], stdout=table, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}, check=False
            )
        if process.returncode == 0:
            return path
    output = process.stderr.decode(errors="replace") + path.read_text(encoding="utf-8", errors="replace")
    raise CounterError(reason(output, process.returncode))
