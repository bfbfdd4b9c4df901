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
from xsp.bench.transfers import COLLECTIVES, DIRECTORY, FAMILIES, OF_RANKS, ROOM, Curve
from xsp.errors import UsageError
from xsp.processes import cores

MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files lie in memory."""

MOST_RANKS = 16
MOST_NAMED = 4
"""Most families that a line lists by name."""


@dataclass(frozen=True)
class Asked:
    """A request: the specs to be timed."""

    specs: tuple[Spec, ...]
    refused: tuple[str, ...] = ()
    """One line for each missing resource, with the families that are left out."""

    directory: Path | None = None
    names: tuple[str, ...] = ()
    """The families of the specs."""

    def has(self, spec: Spec) -> bool:
        """Return whether a spec is of these families and, if it uses a file, of the directory's kind of file system."""
        name, given = transfers.arguments(spec)
        here = filesystem(self.directory) if self.directory is not None else ""
        return name in self.names and given.get("filesystem", here) == here


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
        timings: timings of the machine; its devices decide which families are left out.
        what: `transfers` or `collectives`.
        families: comma-separated names of families or of their groups; default: all.
        ranks: numbers of ranks of collectives.
        threads: numbers of torch threads of transfers (default: one, and the number of cores), or of each rank (one).
        directory: folder in which storage is timed; default: the folder for temporary files.
        times: whether the specs are to be timed, so that the directory needs room.

    Raises:
        UsageError: there is no such family, all families lack a device or another resource, there is no such folder,
            or a number of ranks is below 2 or too large.
    """
    if what == COLLECTIVES:
        if not all(2 <= each <= MOST_RANKS for each in ranks):
            raise UsageError(f"collectives need 2 to {MOST_RANKS} ranks on this machine: --ranks 2,4")
        names = transfers.named(families, OF_RANKS)
        specs = [each for count in threads or (1,) for each in transfers.of_collectives(names, ranks, count)]
        return Asked(tuple(specs), names=tuple(names))
    try:
        place = directory or Path(tempfile.gettempdir())
    except OSError as error:
        raise UsageError(f"no folder accepts temporary files ({error.strerror}): name one, --directory DIR") from error
    if not place.is_dir():
        raise UsageError(f"{place}: not a folder; name one in which to time storage: --directory DIR")
    names = transfers.named(families, FAMILIES)
    devices = len(timings.environment.equal.get("devices") or ())
    names, refused = _here(names, devices, place, times)
    counts = tuple(dict.fromkeys((1, cores()))) if threads is None else threads
    found = transfers.of_transfers(names, counts, filesystem(place))
    return Asked(tuple(found), tuple(refused), place, tuple(names))


def _here(names: Sequence[str], devices: int, place: Path, times: bool) -> tuple[list[str], list[str]]:
    """Return the families for which this machine has the resources, and one line per missing resource for the others.

    Raises:
        UsageError: no family is left.
    """
    every = FAMILIES.values()
    own = [each for each in names if FAMILIES[each].in_folder]
    why_not = _no_room(place, max(FAMILIES[each].most for each in own)) if own and times else None
    kind = filesystem(place)
    lacking = (
        ("no device here", "there is no device here, which is needed for {}",
         () if devices else [each.name for each in every if each.device]),
        ("only one device here", "there is only one device here, and two are needed for {}",
         () if devices > 1 else [each.name for each in every if each.peers]),
        ("only one NUMA node here", "there is only one NUMA node here, and two are needed for {}",
         () if numanodes.pair() else [each.name for each in every if each.nodes]),
        (why_not or "", f"{why_not}, so {{}} cannot be timed: name another folder, --directory DIR",
         own if why_not else ()),
        (f"files in {place} ({kind}) are in memory",
         f"files in {place} ({kind}) are in memory, and a disk is needed for {{}}: name another one, --directory DIR",
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
    """Return the reason why files of `size` bytes cannot be created in a folder; None if they can."""
    try:
        with tempfile.TemporaryFile(dir=place):
            free = os.statvfs(place)
    except OSError as error:
        return f"no file can be created in {place} ({error.strerror or error})"
    if free.f_bavail * free.f_frsize < ROOM * size:
        return f"{place} has too little room ({ROOM * size >> 20} MiB are needed)"
    return None


@contextlib.contextmanager
def timed_in(directory: Path | None) -> Iterator[None]:
    """Have worker processes that are started meanwhile time storage in a folder; None leaves theirs."""
    before = os.environ.get(DIRECTORY)
    try:
        if directory is not None:
            os.environ[DIRECTORY] = str(directory.absolute())
        yield
    finally:
        if before is None:
            os.environ.pop(DIRECTORY, None)
        else:
            os.environ[DIRECTORY] = before


def fill(found: Asked, timings: Timings, seconds: float, progress: Progress, *, again: bool = False) -> int:
    """Time the specs that have no timing yet, in their order, and return how many of them got a figure.

    Raises:
        BenchError: see `xsp.bench.plan.fill`.
    """
    with timed_in(found.directory):
        made = plan.fill(found.specs, timings, seconds, progress, again=again, limits=LIMITS, in_order=True)
    return sum(each.is_timed for each in made)


def known(found: Asked, timings: Timings) -> tuple[list[Curve], int]:
    """Return the curves of the requested specs, and how many of the specs have no timing."""
    of = timings.of(found.specs)
    there = [each for each in of.values() if each.taken_ns]
    return transfers.curves(there), len(of) - len(there)


def filesystem(place: Path) -> str:
    """Return the type of the file system of a folder, such as `ext4`; empty if the system does not report it."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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
