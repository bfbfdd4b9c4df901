"""Polynomials without negative coefficients, fitted to figures with intervals, and the crossing of two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from xsp.stats import NORMAL, UPPER, student

LEAST_ERROR = 0.01
"""Minimum relative error that is assumed for a figure, because different shapes use different kernels."""

MAX_CROSSING = 1 << 40
"""Maximum n of a crossing; polynomials that do not cross up to it are assumed never to cross."""

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Polynomial:
    """`coefficients[0] + coefficients[1] * n + …` with the covariance of the coefficients."""

    coefficients: tuple[float, ...]
    covariance: Matrix

    def at(self, n: float) -> float:
        """Return the value at n."""
        return math.fsum(coefficient * n**power for power, coefficient in enumerate(self.coefficients))

    def half(self, n: float) -> float:
        """Return half of the 95 % interval at n."""
        powers = [n**power for power in range(len(self.coefficients))]
        variance = math.fsum(a * b * self.covariance[i][j] for i, a in enumerate(powers) for j, b in enumerate(powers))
        return NORMAL * math.sqrt(max(0.0, variance))

    def half_of(self, power: int) -> float:
        """Return half of the 95 % interval of a coefficient."""
        return NORMAL * math.sqrt(max(0.0, self.covariance[power][power]))

    def __add__(self, other: Polynomial) -> Polynomial:
        size = max(len(self.coefficients), len(other.coefficients))
        left, right = self._padded(size), other._padded(size)
        return Polynomial(
            tuple(a + b for a, b in zip(left.coefficients, right.coefficients, strict=True)),
            tuple(
                tuple(a + b for a, b in zip(left_row, right_row, strict=True))
                for left_row, right_row in zip(left.covariance, right.covariance, strict=True)
            ),
        )

    def _padded(self, size: int) -> Polynomial:
        missing = size - len(self.coefficients)
        rows = tuple((*row, *(0.0,) * missing) for row in self.covariance)
        return Polynomial((*self.coefficients, *(0.0,) * missing), (*rows, *((0.0,) * size,) * missing))


ZERO = Polynomial((0.0,), ((0.0,),))


def constant(value: float, half: float) -> Polynomial:
    """Return a constant polynomial with half of a 95 % interval."""
    return Polynomial((value,), (((half / NORMAL) ** 2,),))


def fit(points: Sequence[float], values: Sequence[float], halves: Sequence[float], degree: int) -> Polynomial:
    """Return the least-squares polynomial without negative coefficients, with figures weighted by their errors.

    All subsets of the powers are tried, which is exact and cheap for low degrees. If the residuals are larger than the
    errors, the intervals follow from the residuals.

    Args:
        points: the n of each figure.
        values: the figures.
        halves: half of the 95 % interval of each figure.
        degree: the highest power.

    Raises:
        ValueError: there are fewer figures than coefficients.
    """
    if len(points) <= degree:
        raise ValueError(f"{len(points)} figures do not determine a polynomial of degree {degree}")
    largest = max(points) or 1.0
    errors = [max(half / NORMAL, LEAST_ERROR * abs(value)) or 1.0 for value, half in zip(values, halves, strict=True)]
    best: tuple[float, tuple[int, ...], list[float], list[list[float]]] | None = None
    for size in range(1, degree + 2):
        for powers in combinations(range(degree + 1), size):
            rows = [
                [(n / largest) ** power / error for power in powers] for n, error in zip(points, errors, strict=True)
            ]
            targets = [value / error for value, error in zip(values, errors, strict=True)]
            inverse = _inverse([[math.fsum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)])
            if inverse is None:
                continue
            moments = [
                math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(size)
            ]
            solution = [math.fsum(inverse[i][j] * moments[j] for j in range(size)) for i in range(size)]
            if min(solution) < 0:
                continue
            residual = math.fsum(
                (target - math.fsum(a * b for a, b in zip(row, solution, strict=True))) ** 2
                for row, target in zip(rows, targets, strict=True)
            )
            if best is None or residual < best[0] * (1 - 1e-9):
                best = residual, powers, solution, inverse
    if best is None:
        return Polynomial((0.0,) * (degree + 1), ((0.0,) * (degree + 1),) * (degree + 1))
    residual, powers, solution, inverse = best
    degrees_of_freedom = len(points) - len(powers)
    widening = 1.0
    if degrees_of_freedom and residual > degrees_of_freedom:
        widening = residual / degrees_of_freedom * (student(UPPER, degrees_of_freedom) / NORMAL) ** 2
    size = degree + 1
    coefficients, covariance = [0.0] * size, [[0.0] * size for _ in range(size)]
    for i, power in enumerate(powers):
        coefficients[power] = solution[i] / largest**power
        for j, other_power in enumerate(powers):
            covariance[power][other_power] = widening * inverse[i][j] / largest ** (power + other_power)
    return Polynomial(tuple(coefficients), tuple(map(tuple, covariance)))


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """Return the inverse of a small matrix by elimination; None if it is singular."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-12 * max(1e-300, abs(matrix[column][column])):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        rows[column] = [number / head for number in rows[column]]
        for row in range(size):
            if row != column and rows[row][column]:
                factor = rows[row][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [row[size:] for row in rows]


@dataclass(frozen=True)
class Crossing:
    """The n from which on one polynomial is above another, with an interval; an end is None if it is never above."""

    n: float
    low: float | None
    high: float | None


def crossing(rising: Polynomial, other: Polynomial) -> Crossing | None:
    """Return the n from which on a polynomial is above another that is larger at first; None if it never is."""
    root = _root(rising, other, 1.0, 1.0)
    if root is None:
        return None
    up, down = _relative(rising, root), _relative(other, root)
    low = _root(rising, other, 1 + up, max(0.0, 1 - down))
    high = _root(rising, other, max(0.0, 1 - up), 1 + down)
    return Crossing(root, low, high)


def _relative(polynomial: Polynomial, n: float) -> float:
    value = polynomial.at(n)
    return polynomial.half(n) / value if value else 0.0


def _root(rising: Polynomial, other: Polynomial, scale: float, other_scale: float) -> float | None:
    def is_above(n: float) -> bool:
        return scale * rising.at(n) >= other_scale * other.at(n)

    if rising.at(MAX_CROSSING) <= 0:
        return None
    if is_above(1):
        return 1.0
    high = 2.0
    while not is_above(high):
        high *= 2
        if high > MAX_CROSSING:
            return None
    low = high / 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


STRAIGHT = 1e-3
"""Maximum deviation from a line, as a share of the largest value, for growth to count as linear."""


def is_straight(lengths: Sequence[int], values: Sequence[float]) -> bool:
    """Return whether values are a linear function of the lengths."""
    first, last = values[0], values[-1]
    slope = (last - first) / (lengths[-1] - lengths[0])
    return all(
        abs(first + slope * (n - lengths[0]) - value) <= STRAIGHT * max(map(abs, values), default=0.0) + 1e-9
        for n, value in zip(lengths, values, strict=True)
    )
