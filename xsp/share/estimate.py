"""Whether sharing weights would pay, estimated from their size and number and from constants of this machine.

ρ of a way to load without a store is the time it takes beyond that of `attach`: bytes over the bandwidth at which it
moves them, minus the extra time of `attach` per tensor and per request to the store (A. Dakkak et al., TrIMS, 2019):

    ρ = bytes / bandwidth - (tensors · (attach - other) + request)

Bandwidths come from `xsp bench transfers`; the costs per tensor and per request are measured on two small files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xsp import atomic, clock
from xsp.bench import transfers
from xsp.bench.shapes import Shape
from xsp.bench.timings import Timings
from xsp.errors import ShareError
from xsp.share import measuring, weights
from xsp.share.loadworker import ATTACH, MMAP, PICKLE, WAYS
from xsp.share.measuring import COLD, WARM

FEW_TENSORS, MANY_TENSORS = 2, 1000
"""Numbers of tensors in the two files on which costs are measured."""

TURNS = 3
REQUIRED_FAMILIES = ("copy", "read-cached", "first-touch")
"""Families of transfers that the estimate needs."""


class WayCost(NamedTuple):
    """Nanoseconds that a way takes, without moving the bytes."""

    fixed_ns: float
    tensor_ns: float

    def of(self, tensors: int) -> float:
        """Return the nanoseconds for this number of tensors."""
        return self.fixed_ns + tensors * self.tensor_ns


@dataclass(frozen=True)
class Constants:
    """Constants of this machine."""

    costs: Mapping[str, WayCost]
    """Costs by way."""

    shapes: Mapping[str, Shape]
    """Curves by family of transfers."""

    digest_ns: float
    """Nanoseconds per byte of the SHA-256 by which the store identifies weights."""

    def move_ns(self, family: str, nbytes: int) -> float:
        """Return the nanoseconds to move this number of bytes."""
        return max(0.0, self.shapes[family].seconds(nbytes)) * 1e9


class SavingEstimate(NamedTuple):
    """The estimated saving of sharing over one way, in one state."""

    way: str
    state: str
    nbytes: int
    tensors: int
    other_ns: float
    """Nanoseconds that the way takes to load, without the first call."""

    attach_ns: float

    @property
    def saved_ns(self) -> float:
        """ρ in nanoseconds."""
        return self.other_ns - self.attach_ns

    @property
    def is_saving(self) -> bool:
        """Whether ρ is above zero."""
        return self.saved_ns > 0


def curves(timings: Timings) -> dict[str, Shape]:
    """Return the single-threaded curves of the families in `REQUIRED_FAMILIES`.

    Raises:
        ShareError: a family was not timed on this machine.
    """
    shapes = {
        curve.family.name: curve.shape
        for curve in transfers.curves(timings)
        if curve.family.name in REQUIRED_FAMILIES and curve.threads == 1 and curve.shape is not None
    }
    missing = [name for name in REQUIRED_FAMILIES if name not in shapes]
    if missing:
        raise ShareError(
            f"{timings.folder}: not timed on this machine, or at too few sizes: {', '.join(missing)}; "
            f"xsp bench transfers --families {','.join(REQUIRED_FAMILIES)} --threads 1"
        )
    return shapes


def costs(on_progress: measuring.ProgressCallback = lambda *_: None) -> dict[str, WayCost]:
    """Measure the cost per tensor and per request, by way, on files of 2 and of 1000 tiny tensors, in turns.

    Raises:
        ShareError: libraries are missing, or no store can be started.
    """
    times: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(atomic.temporary_folder()))
        request = {
            "cwd": os.getcwd(),
            "folder": str(folder),
            "store": str(folder / "s"),
            "counts": [FEW_TENSORS, MANY_TENSORS],
        }
        process = stack.enter_context(measuring.worker_process())
        stack.enter_context(measuring.running_store(folder / "s", 256 << 20))
        measuring.request_answer(process, {"do": "small", **request})
        for turn in range(TURNS):
            for index, (way, count) in enumerate((way, count) for way in WAYS for count in (FEW_TENSORS, MANY_TENSORS)):
                on_progress(f"what a tensor takes: {way}", turn * 2 * len(WAYS) + index, TURNS * 2 * len(WAYS))
                answer = measuring.request_answer(process, {"do": "time", "way": way, "count": count, **request})
                times.setdefault((way, count), []).append(answer["load_ns"])
    by_way = {}
    for way in WAYS:
        few_ns, many_ns = min(times[way, FEW_TENSORS]), min(times[way, MANY_TENSORS])
        per_tensor = max(0.0, (many_ns - few_ns) / (MANY_TENSORS - FEW_TENSORS))
        by_way[way] = WayCost(max(0.0, few_ns - FEW_TENSORS * per_tensor), per_tensor)
    return by_way


def digest_ns() -> float:
    """Return the nanoseconds that SHA-256 takes per byte."""
    data = bytes(weights.CHUNK)
    times = []
    for _ in range(TURNS):
        start = clock.monotonic_ns()
        hashlib.sha256(data).digest()
        times.append(clock.monotonic_ns() - start)
    return min(times) / len(data)


def estimate_savings(nbytes: int, tensors: int, constants: Constants) -> list[SavingEstimate]:
    """Return the saving of sharing weights over each way, warm and cold.

    Warm: the file is in the page cache and the store holds the weights. `load_file` and `attach` map memory, and both
    touch the same pages later; `torch.load` reads into fresh memory. Cold: neither holds. All ways read the file from
    the disk, and the store fills fresh memory first, for which the next client does not have to wait again.
    """
    copying_ns = constants.move_ns("first-touch", nbytes) + constants.move_ns("read-cached", nbytes)
    attach_ns = constants.costs[ATTACH].of(tensors)
    storing_ns = copying_ns + constants.move_ns("copy", nbytes) + nbytes * constants.digest_ns
    result = []
    for way, reading_ns in ((MMAP, 0.0), (PICKLE, copying_ns)):
        for state, stored_ns in ((WARM, 0.0), (COLD, storing_ns)):
            way_ns = constants.costs[way].of(tensors) + reading_ns
            result.append(SavingEstimate(way, state, nbytes, tensors, way_ns, attach_ns + stored_ns))
    return result


def groups(tensors: Sequence[weights.StoredTensor]) -> dict[str, tuple[int, int]]:
    """Return bytes and number of tensors of a model's parts, by the first component of the names, largest first."""
    totals: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        name = tensor.name.partition(".")[0]
        nbytes, count = totals.get(name, (0, 0))
        totals[name] = nbytes + tensor.nbytes, count + 1
    return dict(sorted(totals.items(), key=lambda pair: -pair[1][0]))
