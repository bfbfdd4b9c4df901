"""A case of DistributedDataParallel on this machine: a recorded run of one process, and ranks timed in turns."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("ddp_worker.py")
FAMILIES = "all_reduce,together-product,together-copy,beside"
LIMIT_S = 240.0
"""Timeout for one worker process."""


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
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER), name, str(batch), str(steps)]
    told = [",".join(f"{each:g}" for each in limits)] if limits else []
    found = []
    for turn in range(rounds):
        if turn == rounds // 2 and not run.exists():
            part = run.with_suffix(".part")  # an interrupted run is recorded again
            shutil.rmtree(part, ignore_errors=True)
            subprocess.run(
                [*command, "one", str(part)], env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL
            )
            part.rename(run)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            those = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), store, *told], env=environment, stdout=subprocess.PIPE, text=True
                )
                for rank in range(ranks)
            ]
            try:
                said, _ = those[0].communicate(timeout=LIMIT_S)
                for each in those[1:]:
                    each.communicate(timeout=LIMIT_S)
            finally:
                for each in those:
                    each.kill()
                    each.wait()
        found.append(json.loads(said))
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
