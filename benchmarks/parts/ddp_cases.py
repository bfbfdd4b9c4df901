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
FAMILIES = "all_reduce,together-product,together-copy,beside"
LIMIT_S = 240.0
"""Timeout for one worker process."""


class Failed(Exception):
    """Raised when a process of a case fails or takes too long; the message says which one, and how it ended."""


def one(
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
    told = [",".join(f"{each:g}" for each in limits)] if limits else []
    found = []
    for turn in range(rounds):
        if turn == rounds // 2 and not run.exists():
            part = run.with_suffix(".part")  # an interrupted run is recorded again
            shutil.rmtree(part, ignore_errors=True)
            recording = subprocess.Popen(
                [*command, "one", str(part)], env=environment, stdout=subprocess.DEVNULL, text=True
            )
            _ended([recording], "the recorded process")
            part.rename(run)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            those = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), store, *told], env=environment, stdout=subprocess.PIPE, text=True
                )
                for rank in range(ranks)
            ]
            said = _ended(those, "rank")
        try:
            found.append(json.loads(said))
        except ValueError as error:
            raise Failed("rank 0 printed no figures, although it ended well") from error
    kinds = [kind for kind, value in found[0].items() if isinstance(value, dict)]
    overlaps = [each["overlap"] for each in found if each["overlap"] is not None]
    return {
        **{
            kind: {part: statistics.median(each[kind][part] for each in found) for part in found[0][kind]}
            for kind in kinds
        },
        "all": [{kind: each[kind]["step"] for kind in kinds} for each in found],
        "overlap": statistics.median(overlaps) if overlaps else None,
    }


def _ended(those: Sequence[subprocess.Popen[str]], name: str) -> str:
    """Wait for the ranks of a case, and return what the first one printed; no process is left running.

    Raises:
        Failed: one of them ended with an error, or they took longer than `LIMIT_S`.
    """
    until = time.monotonic() + LIMIT_S
    try:
        said, _ = those[0].communicate(timeout=LIMIT_S)
        if those[0].returncode == 0:  # else the others may wait for it
            for each in those[1:]:
                each.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{name}: took more than {LIMIT_S:.0f} s") from error
    finally:
        codes = [each.poll() for each in those]
        for each in those:
            each.kill()
            each.wait()
    names = [f"{name} {rank}" for rank in range(len(those))] if len(those) > 1 else [name]
    failed = [
        f"{one} ended with {processes.exit_description(code)}" for one, code in zip(names, codes, strict=True) if code
    ]
    if failed:
        raise Failed(f"{', '.join(failed)}; the reason is printed above")
    return said or ""
