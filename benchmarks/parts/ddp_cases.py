"""A case of DistributedDataParallel on this machine: a recorded run of one process, and ranks timed in turns."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xsp import processes

WORKER = Path(__file__).with_name("ddp_worker.py")
FAMILIES = "all_reduce,together-product,together-copy,beside,after"
LIMIT_S = 240.0
"""Timeout for one worker process."""


class CaseError(Exception):
    """Raised when a process of a case fails or takes too long; the message says which one, and how it ended."""


def measure_case(
    name: str, batch: int, steps: int, rounds: int, run: Path, ranks: int = 2, limits: Sequence[float] = ()
) -> dict[str, Any]:
    """Record one process, unless its run exists, and time ranks in rounds.

    Args:
        name: a key of `ddp_worker.MODELS`.
        batch: batch size of each rank.
        steps: number of steps of each kind in a round.
        rounds: number of rounds, each with new processes.
        run: directory of the recorded run.
        ranks: number of processes that train together.
        limits: bucket sizes in MiB, timed separately; if empty, DistributedDataParallel's default.

    Returns:
        By kind of step (`ddp_worker`) the medians over rounds in seconds; the steps of each round as `all`; the median
        share of communication that overlaps computation as `overlap`, None if unknown.

    Raises:
        Failed: a process failed, or printed no figures.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER), name, str(batch), str(steps)]
    limit_words = [",".join(f"{limit:g}" for limit in limits)] if limits else []
    round_results = []
    for turn in range(rounds):
        if turn == rounds // 2 and not run.exists():
            part = run.with_suffix(".part")  # an interrupted run is recorded again
            shutil.rmtree(part, ignore_errors=True)
            recording = subprocess.Popen(
                [*command, "one", str(part)], env=environment, stdout=subprocess.DEVNULL, text=True
            )
            _wait_for([recording], "the recorded process")
            part.rename(run)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            rank_processes = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), store, *limit_words],
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(ranks)
            ]
            answer = _wait_for(rank_processes, "rank")
        try:
            round_results.append(json.loads(answer))
        except ValueError as error:
            raise CaseError("rank 0 printed no figures, although it ended well") from error
    kinds = [kind for kind, value in round_results[0].items() if isinstance(value, dict)]
    overlaps = [result["overlap"] for result in round_results if result["overlap"] is not None]
    return {
        **{
            kind: {
                part: statistics.median(result[kind][part] for result in round_results)
                for part in round_results[0][kind]
            }
            for kind in kinds
        },
        "all": [{kind: result[kind]["step"] for kind in kinds} for result in round_results],
        "overlap": statistics.median(overlaps) if overlaps else None,
    }


def _wait_for(running: Sequence[subprocess.Popen[str]], name: str) -> str:
    """Wait for the ranks of a case, and return what the first one printed; no process is left running.

    Raises:
        Failed: one of them ended with an error, or they took longer than `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        printed, _ = running[0].communicate(timeout=LIMIT_S)
        if running[0].returncode == 0:  # else the others may wait for it
            for process in running[1:]:
                process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise CaseError(f"{name}: took more than {LIMIT_S:.0f} s") from error
    finally:
        codes = [process.poll() for process in running]
        for process in running:
            process.kill()
            process.wait()
    names = [f"{name} {rank}" for rank in range(len(running))] if len(running) > 1 else [name]
    failed = [
        f"{process_name} ended with {processes.exit_description(code)}"
        for process_name, code in zip(names, codes, strict=True)
        if code
    ]
    if failed:
        raise CaseError(f"{', '.join(failed)}; the reason is printed above")
    return printed or ""
