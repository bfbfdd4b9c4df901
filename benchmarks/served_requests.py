"""Are the figures of a served model's requests those that its clients measure?

The server of `parts/completions.py` runs under `xsp run`, and clients send it the same load in turns: xsp's own, and
guidellm, if it is found (`--guidellm PATH`). `xsp.account.served` states the times of each request inside the server,
here with those of recorded steps. The server's handlers read a clock of their own, when a request has been read and
when each token is sent; a client's times also contain the way to the server and back.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from generation_load import FIGURES, USERS, of_guidellm, of_server, of_times, of_xsp, write_tokenizer
from parts import completions, turns

from xsp.account.served import Request, as_measured
from xsp.ingest.load import load

CLOCKS = ("the handlers' clock", "xsp's client", "guidellm")
COLUMNS = ("load", "figure", *(f"xsp ÷ {name}" for name in CLOCKS))


def of_run(served: Sequence[Request], since_ns: int, until_ns: int) -> dict[str, float]:
    """Return the figures of the requests that arrived in a time."""
    chosen = [each for each in served if since_ns <= each.start_ns < until_ns and each.status == "ok"]
    seconds = (
        max(each.start_ns + each.latency_ns for each in chosen) - min(each.start_ns for each in chosen)
    ) / 1e9  # fmt: skip
    return dict(
        of_times(
            [(each.ttft_ns or 0) / 1e6 for each in chosen], [(each.tpot_ns or 0) / 1e6 for each in chosen],
            sum(each.output_tokens for each in chosen) / seconds,
        )
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, print, save."""
    parser = turns.parser(__doc__, rounds=5)
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), metavar="PATH", help="the program guidellm")
    options = turns.parse(parser, arguments)
    report = turns.Report("served_requests", "Figures of requests in a server, and of its clients", COLUMNS)
    count = 40 if options.quick else 100
    measured: list[tuple[str, str, int, int, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        with completions.served(run=folder / "run") as address:
            of_xsp(address, None, 10, options.seed)
            completions.times_of(address)
            for load_name, rate in ((f"{USERS} users", None), ("Poisson, 6 a second", 6.0)):
                for number in range(options.rounds):
                    turns.say(f"  {load_name}: round {number + 1} of {options.rounds}")
                    for client in CLOCKS[1:] if options.guidellm else CLOCKS[1:2]:
                        began_ns = time.time_ns()
                        if client == CLOCKS[1]:
                            values = of_xsp(address, rate, count, options.seed + number)
                        else:
                            values = of_guidellm(options.guidellm, folder, address, rate, count)
                        until_ns = time.time_ns()
                        for clock, found in ((client, dict(values)), (CLOCKS[0], of_server(address))):
                            measured.append((load_name, clock, began_ns, until_ns, found))
        served = as_measured(load(folder / "run"))
    for load_name in dict.fromkeys(row[0] for row in measured):
        for figure in FIGURES:
            compared = {}
            for clock in CLOCKS:
                ratios = [
                    of_run(served, since_ns, until_ns)[figure] / values[figure]
                    for each, name, since_ns, until_ns, values in measured if (each, name) == (load_name, clock)
                ]  # fmt: skip
                if ratios:
                    compared[clock] = turns.middle(ratios)
            cells = [compared[clock].text(3) if clock in compared else "–" for clock in CLOCKS]
            report.add([load_name, figure, *cells], **compared)
    report.notes.append("Medians over the rounds of ratios of one round.")
    report.finish(options)


if __name__ == "__main__":
    main()
