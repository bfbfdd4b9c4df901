"""Requests for timings of transfers and collectives: their specs, timing into the table, and the resulting curves."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xsp.bench import numanodes, plan, transfers
from xsp.bench.plan import Progress
from xsp.bench.repeatability import LIMITS
from xsp.bench.spec import Spec
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, DIRECTORY, FAMILIES, OF_RANKS, ROOM, TransferCurve
from xsp.errors import UsageError
from xsp.processes import cores, system_text

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""

MOST_RANKS = 16
MOST_NAMED = 4
"""Most families that a line lists by name."""


@dataclass(frozen=True)
class TransferPlan:
    """A request: the specs to be timed."""

    specs: tuple[Spec, ...]
    refusals: tuple[str, ...] = ()
    """One line for each missing resource, with the families that are left out."""

    directory: Path | None = None
    names: tuple[str, ...] = ()
    """The families of the specs."""

    def includes(self, spec: Spec) -> bool:
        """Return whether a spec is of these families and, if it uses a file, of the directory's kind of file system."""
        name, arguments = transfers.arguments(spec)
        default = filesystem(self.directory) if self.directory is not None else ""
        return name in self.names and arguments.get("filesystem", default) == default


def plan_transfers(
    timings: Timings,
    target: str,
    families: str | None,
    ranks: Sequence[int],
    threads: Sequence[int] | None = None,
    directory: Path | None = None,
    *,
    for_timing: bool = True,
) -> TransferPlan:
    """Return the specs of transfers or of collectives.

    Args:
        timings: timings of the machine; its devices decide which families are left out.
        target: `transfers` or `collectives`.
        families: comma-separated names of families or of their groups; default: all.
        ranks: numbers of ranks of collectives.
        threads: numbers of torch threads of transfers (default: one, and the number of cores), or of each rank (one).
        directory: folder in which storage is timed; default: the folder for temporary files.
        for_timing: whether the specs are to be timed, so that the directory needs room.

    Raises:
        UsageError: there is no such family, all families lack a device or another resource, there is no such folder,
            or a number of ranks is below 2 or too large.
    """
    if target == COLLECTIVES:
        if not all(2 <= count <= MOST_RANKS for count in ranks):
            raise UsageError(f"collectives need 2 to {MOST_RANKS} ranks on this machine: --ranks 2,4")
        names = transfers.select_families(families, OF_RANKS)
        specs = [spec for count in threads or (1,) for spec in transfers.of_collectives(names, ranks, count)]
        return TransferPlan(tuple(specs), names=tuple(names))
    try:
        folder = directory or Path(tempfile.gettempdir())
    except OSError as error:
        raise UsageError(f"no folder accepts temporary files ({error.strerror}): name one, --directory DIR") from error
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder; name one in which to time storage: --directory DIR")
    names = transfers.select_families(families, FAMILIES)
    devices = len(timings.environment.properties.get("devices") or ())
    names, refused = _available_families(names, devices, folder, for_timing)
    counts = tuple(dict.fromkeys((1, cores()))) if threads is None else threads
    transfer_specs = transfers.of_transfers(names, counts, filesystem(folder))
    return TransferPlan(tuple(transfer_specs), tuple(refused), folder, tuple(names))


def _available_families(
    names: Sequence[str], devices: int, folder: Path, for_timing: bool
) -> tuple[list[str], list[str]]:
    """Return the families for which this machine has the resources, and one line per missing resource for the others.

    Raises:
        UsageError: no family is left.
    """
    families = FAMILIES.values()
    in_folder = [name for name in names if FAMILIES[name].in_folder]
    folder_problem = (
        _no_room(folder, max(FAMILIES[name].most for name in in_folder)) if in_folder and for_timing else None
    )
    kind = filesystem(folder)
    requirements = (
        ("no device here", "there is no device here, which is needed for {}",
         () if devices else [family.name for family in families if family.device]),
        ("only one device here", "there is only one device here, and two are needed for {}",
         () if devices > 1 else [family.name for family in families if family.peers]),
        ("only one NUMA node here", "there is only one NUMA node here, and two are needed for {}",
         () if numanodes.pair() else [family.name for family in families if family.nodes]),
        (folder_problem or "", f"{folder_problem}, so {{}} cannot be timed: name another folder, --directory DIR",
         in_folder if folder_problem else ()),
        (f"files in {folder} ({kind}) are in memory",
         f"files in {folder} ({kind}) are in memory, and a disk is needed for {{}}: name another one, --directory DIR",
         [family.name for family in families if family.disk] if kind in IN_MEMORY else ()),
    )  # fmt: skip
    available, refused = list(names), []
    for summary, message, affected in requirements:
        excluded = [name for name in available if name in affected]
        available = [name for name in available if name not in excluded]
        if excluded and not available:
            raise UsageError(message.format(", ".join(excluded)))
        if excluded:
            text = f"{len(excluded)} families that need one" if len(excluded) > MOST_NAMED else ", ".join(excluded)
            refused.append(f"{summary}, so not timed: {text}")
    return available, refused


def _no_room(folder: Path, size: int) -> str | None:
    """Return the reason why files of `size` bytes cannot be created in a folder; None if they can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = os.statvfs(folder)
    except OSError as error:
        return f"no file can be created in {folder} ({error.strerror or error})"
    if free.f_bavail * free.f_frsize < ROOM * size:
        return f"{folder} has too little room ({ROOM * size >> 20} MiB are needed)"
    return None


@contextlib.contextmanager
def storage_folder(directory: Path | None) -> Iterator[None]:
    """Make worker processes that start within the block time storage in a folder; None keeps their default."""
    previous = os.environ.get(DIRECTORY)
    try:
        if directory is not None:
            os.environ[DIRECTORY] = str(directory.absolute())
        yield
    finally:
        if previous is None:
            os.environ.pop(DIRECTORY, None)
        else:
            os.environ[DIRECTORY] = previous


def fill(request: TransferPlan, timings: Timings, seconds: float, progress: Progress, *, again: bool = False) -> int:
    """Time the specs that have no timing yet, in their order, and return how many of them got a figure.

    Raises:
        BenchError: see `xsp.bench.plan.fill`.
    """
    with storage_folder(request.directory):
        results = plan.fill(request.specs, timings, seconds, progress, again=again, limits=LIMITS, in_order=True)
    return sum(timing.is_timed for timing in results)


def existing_curves(request: TransferPlan, timings: Timings) -> tuple[list[TransferCurve], int]:
    """Return the curves of the requested specs, and how many of the specs have no timing."""
    by_spec = timings.of(request.specs)
    existing = [timing for timing in by_spec.values() if timing.taken_ns]
    return transfers.curves(existing), len(by_spec) - len(existing)


def filesystem(folder: Path) -> str:
    """Return the type of the file system of a folder, such as `ext4`; empty if the system does not report it."""
    path = str(folder.resolve())
    best = ("", "")
    for line in system_text(MOUNTS).splitlines():
        parts = line.split()
        if len(parts) > 2:
            mount = parts[1].replace("\\040", " ").rstrip("/") or "/"
            contains = mount == "/" or path == mount or path.startswith(f"{mount}/")
            if contains and len(mount) >= len(best[0]):
                best = mount, parts[2]
    return best[1]
