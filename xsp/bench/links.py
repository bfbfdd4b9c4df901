"""What is asked of transfers and collectives, timed into the table, and what the table says of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xsp.bench import numanodes, plan, transfers
from xsp.bench.plan import Progress
from xsp.bench.repeatability import LIMITS
from xsp.bench.spec import Spec
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, DIRECTORY, FAMILIES, OF_RANKS, ROOM, Curve
from xsp.errors import UsageError
from xsp.processes import cores

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems whose files are memory."""

MOST_RANKS = 16
MOST_NAMED = 4
"""Families that a line names one by one."""


@dataclass(frozen=True)
class Asked:
    """What is to be timed."""

    specs: tuple[Spec, ...]
    refused: tuple[str, ...] = ()
    """A line for each kind that cannot be had here."""

    directory: Path | None = None


def asked(
    timings: Timings,
    what: str,
    families: str | None,
    ranks: Sequence[int],
    threads: Sequence[int] | None = None,
    directory: Path | None = None,
    *,
    times: bool = True,
) -> Asked:
    """Return the specs of transfers or of collectives.

    Args:
        timings: of the machine that is asked about; its devices decide what is left out.
        what: `transfers` or `collectives`.
        families: names with commas, of families or their groups; all unless told otherwise.
        ranks: of collectives.
        threads: of what threads of torch do (one, and as many as there are cores), or of each rank (one).
        directory: where storage is timed.
        times: whether they are to be timed, so that the directory needs room.

    Raises:
        UsageError: there is no such family, it needs a device or a folder with room and there is none, or ranks are
            below 2 or too many.
    """
    if what == COLLECTIVES:
        if not all(2 <= each <= MOST_RANKS for each in ranks):
            raise UsageError(f"collectives are of 2 to {MOST_RANKS} ranks on this machine: --ranks 2,4")
        names = transfers.named(families, OF_RANKS)
        specs = [each for count in threads or (1,) for each in transfers.of_collectives(names, ranks, count)]
        return Asked(tuple(specs))
    place = directory or Path(tempfile.gettempdir())
    if not place.is_dir():
        raise UsageError(f"{place}: no folder; storage is timed in one: --directory DIR")
    names = transfers.named(families, FAMILIES)
    devices = len(timings.environment.equal.get("devices") or ())
    names, refused = _here(names, devices, place, times)
    counts = tuple(dict.fromkeys((1, cores()))) if threads is None else threads
    found = transfers.of_transfers(names, counts, filesystem(place))
    return Asked(tuple(found), tuple(refused), place)


def _here(names: Sequence[str], devices: int, place: Path, times: bool) -> tuple[list[str], list[str]]:
    """Return the families that this machine has what they need for, and a line for each kind of the others.

    Raises:
        UsageError: there is none.
    """
    every = FAMILIES.values()
    own = [each for each in names if FAMILIES[each].in_folder]
    why_not = _no_room(place, max(FAMILIES[each].most for each in own)) if own and times else None
    kind = filesystem(place)
    lacking = (
        ("no device here", "there is no device here, which is needed for {}",
         () if devices else [each.name for each in every if each.device]),
        ("one device here", "there is one device here, and two are needed for {}",
         () if devices > 1 else [each.name for each in every if each.peers]),
        ("one NUMA node here", "there is one NUMA node here, and two are needed for {}",
         () if numanodes.pair() else [each.name for each in every if each.nodes]),
        (why_not or "", f"{why_not}, so there is nothing to time {{}} with: name another folder, --directory DIR",
         own if why_not else ()),
        (f"files of {place} ({kind}) are memory",
         f"files of {place} ({kind}) are memory, and a disk is needed for {{}}: name a folder of one, --directory DIR",
         [each.name for each in every if each.disk] if kind in IN_MEMORY else ()),
    )  # fmt: skip
    found, refused = list(names), []
    for there, what, those in lacking:
        left = [name for name in found if name in those]
        found = [name for name in found if name not in left]
        if left and not found:
            raise UsageError(what.format(", ".join(left)))
        if left:
            said = f"{len(left)} families that need one" if len(left) > MOST_NAMED else ", ".join(left)
            refused.append(f"{there}, so not timed: {said}")
    return found, refused


def _no_room(place: Path, size: int) -> str | None:
    """Return why files of so many bytes cannot be made in a folder; None if they can."""
    try:
        with tempfile.TemporaryFile(dir=place):
            free = os.statvfs(place)
    except OSError as error:
        return f"no file can be made in {place} ({error.strerror or error})"
    if free.f_bavail * free.f_frsize < ROOM * size:
        return f"no file fits into {place} (it takes {ROOM * size >> 20} MiB of room)"
    return None


def fill(found: Asked, timings: Timings, seconds: float, progress: Progress, *, again: bool = False) -> int:
    """Time what has no timing yet, in this order, and return how many timings there are of it now.

    Raises:
        BenchError: as `xsp.bench.plan.fill`.
    """
    before = os.environ.get(DIRECTORY)
    try:
        if found.directory is not None:
            os.environ[DIRECTORY] = str(found.directory.absolute())  # read by the process that times
        made = plan.fill(found.specs, timings, seconds, progress, again=again, limits=LIMITS, in_order=True)
    finally:
        if before is None:
            os.environ.pop(DIRECTORY, None)
        else:
            os.environ[DIRECTORY] = before
    return sum(each.is_timed for each in made)


def known(found: Asked, timings: Timings) -> tuple[list[Curve], int]:
    """Return the curves of what was asked for, and how many of its specs have no timing."""
    of = timings.of(found.specs)
    there = [each for each in of.values() if each.taken_ns]
    return transfers.curves(there), len(of) - len(there)


def filesystem(place: Path) -> str:
    """Return the kind of file system that a folder lies on, `ext4`; empty if it cannot be told."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    whole = str(place.resolve())
    best = ("", "")
    for line in lines:
        parts = line.split()
        if len(parts) > 2:
            mounted = parts[1].replace("\\040", " ").rstrip("/") or "/"
            inside = mounted == "/" or whole == mounted or whole.startswith(f"{mounted}/")
            if inside and len(mounted) >= len(best[0]):
                best = mounted, parts[2]
    return best[1]
