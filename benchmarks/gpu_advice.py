"""Is the right advice first for programs with one flaw on a GPU, is none given to sound ones, and do gains come true?

Each program of `parts/gpu_programs.py` runs by itself, with the flaw and without, which gives the real gain; `xsp run`
records it, and `xsp advise` is asked without timings. `--fixtures DIR` keeps the run directories, from which tests
check wording and order on machines without a GPU. What is finished is kept in `--out`: a second call continues.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from advice import Flaw
from parts import gpu_workloads, turns
from parts.gpu_programs import FLAWS, SOUND

from xsp import advise
from xsp.advise import Needs
from xsp.errors import XspError

PROGRAM = Path(__file__).parent / "parts" / "gpu_programs.py"
GOAL_FIRST, GOAL_SOUND_PERCENT, GOAL_ERROR_PERCENT = 0.9, 10.0, 30.0
"""Goals: share of flaws whose advice comes first; most that is promised to a sound program; median error of a gain."""

COLUMNS = ("program", "right advice at", "first advice", "promised", "real gain", "error")
LIMIT_S = 120.0

PLANTED: Mapping[str, Flaw] = {
    "sync_item": Flaw(("synchronisations", "device-idle"), ("single values",)),
    "values_in_hooks": Flaw(("synchronisations", "device-idle"), ("single values",)),
    "synchronize_in_hooks": Flaw(("device-idle",), ("synchronize()",)),
    "mask_index": Flaw(("device-idle",), ("depends on values",)),
    "small_kernels": Flaw(("device-idle",), ("cuda graphs", "fewer launches")),
    "samples_one_by_one": Flaw(("samples", "device-idle"), ("sample by sample", "fewer launches", "larger batch")),
    "optimizer_one_by_one": Flaw(("optimizer",), ("one by one",)),
    "empty_cache": Flaw(("device-memory", "device-idle"), ("memory is returned", "memory is requested")),
    "loader_without_workers": Flaw(("data", "device-idle"), ("data",)),
    "pageable": Flaw(("device-copies", "device-idle", "between"), ("pin_memory", "pageable")),
    "small_copies": Flaw(("device-copies", "device-idle", "between"), ("copied to the device", "pin_memory", "htod")),
    "results_to_host": Flaw(("device-copies", "device-idle", "between"), ("copied to the host", ".cpu()")),
    "copies_within": Flaw(("device-copies", "copies", "device-fusion"), (".clone()", "copies within")),
    "fp32_matmul": Flaw(("device-tensor-cores", "precision"), ("tf32",)),
    "layout": Flaw(("device-layout", "choice"), ("channels",)),
    "attention": Flaw(("device-attention",), ("attention",)),
    "pointwise": Flaw(("device-fusion",), ("elementwise",)),
    "double": Flaw(("device-double",), ("double",)),
    "dense_gradient": Flaw(("device-gradients",), ("dense",)),
    "without_cudnn_benchmark": Flaw(("choice", "device-roof"), ("cudnn", "convolution")),
}
"""Program → how the right advice is recognised."""


class Answer(NamedTuple):
    """What was said of a program, and what its author would gain."""

    rank: int | None
    """Place of the right advice, from 1; None if it was not given, or the program is sound."""

    first: str
    promised_percent: float
    real_percent: float | None


def judged(name: str, pieces: Sequence[Mapping[str, Any]], real_percent: float | None) -> Answer:
    """Return the answer for a program, from its advice (options and gains that are not known left out)."""
    flaw = PLANTED.get(name)
    rank = None
    if flaw is not None:
        rank = next((place for place, piece in enumerate(pieces, 1) if flaw.is_named_by(piece)), None)
    chosen = pieces[(rank or 1) - 1] if pieces else None
    return Answer(
        rank, str(pieces[0]["what"])[:60] if pieces else "none",
        float(chosen["of_step_percent"]) if chosen is not None else 0.0, real_percent,
    )  # fmt: skip


def plain(report: advise.AdviceReport) -> list[dict[str, Any]]:
    """Return the pieces with a known gain as plain values, best first."""
    return [
        {"question": piece.question, "what": piece.what, "do": piece.do, "why": list(piece.why), "trial": piece.trial,
         "of_step_percent": piece.of_step_percent, "at_most": piece.at_most}
        for piece in report.advice
        if piece.gain_known and not piece.option
    ]  # fmt: skip


def time_of(name: str, seconds: float, *words: str, device: str = "cuda", run: Path | None = None) -> float:
    """Return the milliseconds of a step by the program itself; recorded into a directory if one is given.

    Raises:
        XspError: the program failed.
    """
    command = [sys.executable, *(["-m", "xsp.cli", "run", "--out", str(run), "--overwrite", "-q"] if run else [])]
    environment = {**os.environ, "SECONDS": str(seconds), "DEVICE": device}
    result = subprocess.run(
        [*command, str(PROGRAM), name, *words], capture_output=True, text=True, timeout=LIMIT_S, env=environment,
        check=False,
    )  # fmt: skip
    match = re.search(r"^LOOP ([\d.]+) ms", result.stdout, re.MULTILINE)
    if result.returncode or match is None:
        raise XspError((result.stderr.strip().splitlines() or ["it printed no time"])[-1])
    return float(match[1])


def answer_of(name: str, folder: Path, seconds: float, device: str, small: bool) -> dict[str, Any]:
    """Run a program with and without its flaw and under xsp, and return what was said, as plain values."""
    words = ["--small"] if small else []
    flawed_ms = time_of(name, seconds, *words, device=device)
    mended_ms = None if name in SOUND else time_of(name, seconds, "--mended", *words, device=device)
    time_of(name, 2 * seconds, *words, device=device, run=folder / name)
    pieces = plain(advise.of(str(folder / name), max_needs=Needs.TRACE))
    real = None if mended_ms is None else 100 * (1 - mended_ms / flawed_ms)
    return {"ms": flawed_ms, "mended_ms": mended_ms, "pieces": pieces, "answer": judged(name, pieces, real)._asdict()}


def keep(folder: Path, name: str, fixtures: Path) -> None:
    """Pack a run directory for the tests."""
    fixtures.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fixtures / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(folder / name, name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, save."""
    argument_parser = turns.parser(__doc__)
    argument_parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs (default: all)")
    argument_parser.add_argument("--out", type=Path, metavar="DIR", help="where runs and answers are kept")
    argument_parser.add_argument("--fixtures", type=Path, metavar="DIR", help="also pack the run directories here")
    argument_parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each loop (default: 1)")
    argument_parser.add_argument("--minutes", type=float, help="start no program after so many minutes")
    options = turns.parse(argument_parser, arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_advice", "Advice on programs with one flaw on a GPU", COLUMNS)
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    with turns.working_folder(options.out) as folder, report.until_interrupted():
        done = turns.stored_rows(folder / "answers.jsonl")
        for name in options.only or (*FLAWS, *SOUND):
            if end is not None and time.monotonic() > end:
                report.mark_partial(f"Out of time before {name}.")
                break
            with report.trying(name):
                found = done.get(name) or answer_of(name, folder, options.seconds, "cuda", options.quick)
                turns.store_row(folder / "answers.jsonl", name, found)
                if options.fixtures is not None and (folder / name).exists():
                    keep(folder, name, options.fixtures)
                _add(report, name, Answer(**found["answer"]), found)
    _summarise(report)
    report.notes.append(gpu_workloads.device_line())
    report.finish(options)


def _add(report: turns.Report, name: str, answer: Answer, found: Mapping[str, Any]) -> None:
    error = None
    if answer.real_percent and answer.rank is not None:
        error = abs(answer.promised_percent - answer.real_percent) / abs(answer.real_percent) * 100
    cells = ("–" if value is None else f"{value:.0f} %" for value in (answer.real_percent, error))
    place = "sound" if name in SOUND else str(answer.rank or "not given")
    report.add([name, place, answer.first, f"{answer.promised_percent:.0f} %", *cells], **found, error=error)


def _summarise(report: turns.Report) -> None:
    answers = {name: data["answer"] for name, data in report.data.items()}
    flawed = [answer for name, answer in answers.items() if name in FLAWS]
    sound = [answer["promised_percent"] for name, answer in answers.items() if name in SOUND]
    errors = [data["error"] for data in report.data.values() if data["error"] is not None]
    first = sum(answer["rank"] == 1 for answer in flawed)
    if flawed:
        report.notes.append(f"Right advice first in {first} of {len(flawed)} (goal {GOAL_FIRST:.0%}).")
    if sound:
        report.notes.append(f"Most promised to a sound program: {max(sound):.0f} % (goal {GOAL_SOUND_PERCENT:.0f}).")
    if errors:
        report.notes.append(f"Median error of a gain: {turns.median(errors):.0f} % (goal {GOAL_ERROR_PERCENT:.0f}).")


if __name__ == "__main__":
    main()
