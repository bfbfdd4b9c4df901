"""Conclusions from many evaluations: scaling of throughput with the batch, the Pareto front of models, their cost.

Rank correlations are those of `xsp.evaluate.quality.divergence`.
"""

from __future__ import annotations

import csv
import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from xsp.analyses import optimal_batch
from xsp.errors import AnalysisError, UsageError
from xsp.evaluate.quality.divergence import rank

LEAST_GAIN = 0.05
"""Minimum gain of throughput that makes a doubling worthwhile, as a share, by XSP's definition."""

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Scalability:
    """Throughput by batch size, and the optimal size by each definition."""

    shares: Mapping[int, float]
    """Throughput by batch size, as a share of the highest throughput."""

    best_size: int
    """The size of the highest throughput: MLModelScope's optimal batch."""

    plateau_size: int
    """The smallest size whose doubling gains at most 5 %: the rule of XSP's paper."""

    last_gain_size: int
    """The size reached by the last doubling with a gain above 5 %. If throughput falls and rises again, it is beyond
    `plateau_size`."""


def scalability(inputs_per_second: Mapping[int, float]) -> Scalability:
    """Return how throughput grows with the batch.

    Args:
        inputs_per_second: by batch size, each about double the previous one.

    Raises:
        AnalysisError: it is empty, or a throughput is not a positive number.
    """
    _positive(inputs_per_second)
    sizes = sorted(inputs_per_second)
    best = max(inputs_per_second.values())
    optimum = optimal_batch(sizes, [1000 * size / inputs_per_second[size] for size in sizes])
    assert optimum.max_throughput is not None
    assert optimum.first_plateau is not None
    gains = [
        larger
        for smaller, larger in pairwise(sizes)
        if inputs_per_second[larger] > (1 + LEAST_GAIN) * inputs_per_second[smaller]
    ]
    shares = {size: inputs_per_second[size] / best for size in sizes}
    return Scalability(shares, optimum.max_throughput, optimum.first_plateau, gains[-1] if gains else sizes[0])


def pareto(rows: Sequence[Mapping[str, float | None]], maximised: Sequence[str], minimised: Sequence[str]) -> list[int]:
    """Return the indices of the rows on the Pareto front: no other row is as good in all figures and better in one.

    A row that lacks one of the figures is not on the front and beats no row. Equal rows are on it together.

    Args:
        rows: rows of figures.
        maximised: figures of which more is better.
        minimised: figures of which less is better.

    Raises:
        UsageError: no figure was given.
    """
    if not maximised and not minimised:
        raise UsageError("a Pareto front needs a figure for which more, or less, is better")
    points = []
    for index, row in enumerate(rows):
        figures = [*(row.get(name) for name in maximised), *(row.get(name) for name in minimised)]
        present = [figure for figure in figures if figure is not None and not math.isnan(figure)]
        if len(present) == len(figures):
            points.append((index, [*present[: len(maximised)], *(-figure for figure in present[len(maximised) :])]))
    return [
        index
        for index, point in points
        if not any(
            rival != point and all(b >= a for a, b in zip(point, rival, strict=True)) for _, rival in points
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Price:
    """Price of a machine per hour, with its date."""

    machine: str
    per_hour: float
    currency: str
    date: datetime.date
    source: str = ""


@dataclass(frozen=True)
class InputsCost:
    """Cost of a million inputs, at full load."""

    amount: float
    currency: str
    date: datetime.date
    """Date of the price."""


PAPER = datetime.date(2019, 11, 19)
PRICES = (
    Price("p3.2xlarge", 3.06, "USD", PAPER, "arXiv 1911.08031, Table 1"),
    Price("g3.4xlarge", 0.90, "USD", PAPER, "arXiv 1911.08031, Table 1"),
    Price("p2.xlarge", 0.75, "USD", PAPER, "arXiv 1911.08031, Table 1"),
)
"""Published prices, with the date of the paper; its text swaps the last two."""


def prices(path: str | os.PathLike[str]) -> list[Price]:
    """Return the prices of a CSV file with the columns machine, per_hour, currency, date (YYYY-MM-DD), source.

    Raises:
        UsageError: it cannot be read; for an invalid price, the message names the line.
    """
    price_list = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for line, row in enumerate(csv.DictReader(file), 2):
                try:
                    per_hour = float(row["per_hour"])
                    date = datetime.date.fromisoformat(row["date"])
                    price_list.append(Price(row["machine"], per_hour, row["currency"], date, row.get("source") or ""))
                    if not 0 <= per_hour < math.inf:
                        raise ValueError(f"{per_hour} is not a price")
                    if not row["machine"] or not row["currency"]:
                        raise ValueError("machine or currency is empty")
                except (KeyError, TypeError, ValueError) as error:
                    raise UsageError(f"{os.fspath(path)}:{line}: not a price with a date: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{os.fspath(path)} cannot be read as prices: {error}") from error
    return price_list


def cost_per_million(inputs_per_second: float, machine: str, price_list: Sequence[Price] = PRICES) -> InputsCost | None:
    """Return the cost of a million inputs on a machine at its latest price; None if it has no price.

    Raises:
        AnalysisError: the throughput is not a positive number.
    """
    _positive({machine: inputs_per_second})
    matches = [entry for entry in price_list if entry.machine.lower() == machine.lower()]
    if not matches:
        return None
    price = max(matches, key=lambda entry: entry.date)
    return InputsCost(price.per_hour * 1e6 / (SECONDS_PER_HOUR * inputs_per_second), price.currency, price.date)


def rank_correlations(
    rows: Sequence[Mapping[str, float | None]], names: Sequence[str]
) -> dict[tuple[str, str], float | None]:
    """Return Spearman's correlation of each pair of figures, over the rows that have both.

    Args:
        rows: rows of figures.
        names: names of the figures.

    Returns:
        The correlation by pair; None if fewer than three rows have both figures, or one figure is constant.
    """
    correlations: dict[tuple[str, str], float | None] = {}
    for index, name_a in enumerate(names):
        for name_b in names[index + 1 :]:
            candidates = [(row.get(name_a), row.get(name_b)) for row in rows]
            pairs = [(a, b) for a, b in candidates if a is not None and b is not None]
            try:
                a, b = zip(*pairs, strict=True) if pairs else ((), ())
                correlations[name_a, name_b] = rank(a, b) if len(pairs) >= 3 else None
            except AnalysisError:
                correlations[name_a, name_b] = None
    return correlations


def _positive(figures: Mapping[int, float] | Mapping[str, float]) -> None:
    if not figures:
        raise AnalysisError("no throughput was given")
    for name, throughput in figures.items():
        if not 0 < throughput < math.inf:
            raise AnalysisError(f"the throughput of {name} is {throughput}, not a positive number of inputs per second")
