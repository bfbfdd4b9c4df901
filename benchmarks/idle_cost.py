"""What do xsp's calls cost in a program that is not being profiled, compared with an empty context manager?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType

from parts import turns
from parts.turns import Condition, Group

import xsp


class Empty:
    """A minimal context manager in Python, which does nothing; each block creates a new one."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Empty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def repeated(enter: Callable[[], contextlib.AbstractContextManager[object]], times: int) -> Callable[[], None]:
    """Return a function that enters and leaves a block `times` times."""

    def run() -> None:
        for _ in range(times):
            with enter():
                pass

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=60), arguments)
    times = 2_000 if options.quick else 20_000
    disabled = xsp.profile("idle", enabled=False)
    unused = xsp.profile("idle")
    enters: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "empty context manager": lambda: Empty("x"),
        'xsp.span("x")': lambda: xsp.span("x"),
        "prof.step(), block never entered": lambda: unused.step(),
        "prof.step(), enabled=False": lambda: disabled.step(),
    }
    conditions = [Condition(name, repeated(enter, times)) for name, enter in enters.items()]
    method = turns.turns_of(options)
    with disabled:
        rounds = method.take([Group(conditions)], options.rounds)
    columns = ("with …: pass", "ns [95 %]", "more than empty, ns", "ratio to empty")
    report = turns.Report("idle_cost", "Cost of xsp's calls when nothing is recorded", columns)
    for name in enters:
        block_ns = turns.middle([round_times[name] / times for round_times in rounds])
        excess = turns.difference(rounds, name, "empty context manager")
        ratio = turns.ratio(rounds, name, "empty context manager")
        report.add([name, block_ns.text(1), excess.text(1, 1 / times), ratio.text(3)],
                   ns=block_ns, ratio=ratio, rounds=[round_times[name] for round_times in rounds])  # fmt: skip
    report.notes += ["Each block is created by a lambda, whose cost is included in all rows.", method.note()]
    report.finish(options)


if __name__ == "__main__":
    main()
