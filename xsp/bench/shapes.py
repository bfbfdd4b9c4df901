"""Shapes of curves of time over size: latency, seconds per byte, and the sizes at which both change.

A piece of a curve is t = α + β·size with β ≥ 0, and in the first one α ≥ 0, fitted by least absolute deviations of
relative errors, so that small sizes count as much as large ones and a disturbed size has little influence. The starts
of pieces are found exactly, by dynamic programming over all cuts between sizes; their number is chosen by Schwarz's
criterion (BIC, with the correction for few points), in which residuals below the noise of the timings count as noise.
The criterion uses logarithms of ratios as residuals: a relative residual is at most 1 for a line far below a time, so a
curve with a knee and uncertain timings would seem to be one line.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from xsp import stats
from xsp.errors import UsageError
from xsp.stats import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MIN_POINTS = 3
"""Least number of points in a piece."""

MOST_PIECES = 5
LEAST_NOISE = 0.005
"""Lower bound of the relative noise; no timing is known better."""

ROUNDS = 30
SMALLEST_RESIDUAL = 1e-5
SMALLEST_RATIO = 1e-3
"""Least ratio of a fitted time to the measured one that counts; smaller ratios are raised to it."""

RESAMPLES = 200
MAX_RESIDUAL = 0.1
"""Relative residual above which a size counts as leaving the model, and an extrapolation is rejected."""

EXTRAPOLATION_FACTORS = (4, 2)
"""Factors beyond the largest size for which an extrapolation is tried, by leaving out the largest sizes."""


@dataclass(frozen=True)
class LinePiece:
    """A range of sizes in which time grows linearly."""

    since: float
    until: float
    """Smallest and largest size of the piece, in bytes."""

    start: Interval
    """α in seconds."""

    per_byte: Interval
    """β in seconds per byte."""

    def seconds(self, size: float) -> float:
        """Return the seconds that a size takes."""
        return self.start.value + self.per_byte.value * size


@dataclass(frozen=True)
class Shape:
    """The shape of a curve: fitted pieces, knees between them, and the quality of the fit."""

    pieces: tuple[LinePiece, ...]
    knees: tuple[Interval, ...]
    """Sizes between pieces in bytes: where both meet, else the middle of the gap in which the curve jumps."""

    points: int
    residual: float
    """Median of the absolute relative residuals."""

    worst: float
    worst_at: float
    """Largest absolute relative residual, and the size in bytes at which it occurs."""

    held_out: float | None
    """Median relative error at every other size, predicted from a fit of the rest; None if there are too few sizes."""

    reach: float
    """Bytes up to which the curve may be extrapolated, as tested by leaving out the largest sizes."""

    @property
    def alpha(self) -> Interval:
        """Latency: α of the first piece, in seconds."""
        return self.pieces[0].start

    @property
    def beta(self) -> Interval:
        """Seconds per byte: β of the last piece."""
        return self.pieces[-1].per_byte

    @property
    def has_outlier(self) -> bool:
        """Whether a size is further from the model than `MAX_RESIDUAL`."""
        return self.worst > MAX_RESIDUAL

    def piece(self, size: float) -> LinePiece:
        """Return the piece that a size belongs to; beyond the ends, the first or last piece."""
        return self.pieces[sum(size > knee.value for knee in self.knees)]

    def seconds(self, size: float) -> float:
        """Return the seconds that a size takes; beyond the ends, the outer pieces are extrapolated."""
        return self.piece(size).seconds(size)


def fit(sizes: Sequence[float], seconds: Sequence[float], noise: float = 0.0, most: int = MOST_PIECES) -> Shape:
    """Return the shape of a curve.

    Args:
        sizes: distinct sizes in bytes, above 0, at least three.
        seconds: time of each size, above 0.
        noise: relative half interval of the timings; residuals below it split no piece.
        most: most pieces.

    Raises:
        UsageError: there are too few points, or a point is invalid.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < MIN_POINTS:
        raise UsageError(f"a curve needs {MIN_POINTS} distinct sizes, each with a time; there are {len(set(sizes))}")
    if len(set(sizes)) != len(sizes) or not all(math.isfinite(number) and number > 0 for number in (*sizes, *seconds)):
        raise UsageError("sizes and times of a curve must be above 0, and each size must occur once")
    order = np.argsort(sizes)
    x, t = np.asarray(sizes, float)[order], np.asarray(seconds, float)[order]
    cuts = _cuts(x, t, max(noise, LEAST_NOISE), most)
    return replace(_shape(x, t, cuts), held_out=_held_out(x, t, noise, most), reach=_reach(x, t, noise, most))


def _cuts(x: Numbers, t: Numbers, noise: float, most: int) -> list[tuple[int, int]]:
    """Return the pieces as ranges of points."""
    count = len(x)
    spans = [(i, j) for i in range(count) for j in range(i + MIN_POINTS, count + 1)]
    start, slope = _lines(x, t, spans)
    cost = {}
    for index, (i, j) in enumerate(spans):
        ratio = np.maximum((start[index] + slope[index] * x[i:j]) / t[i:j], SMALLEST_RATIO)
        cost[i, j] = float(np.abs(np.log(ratio)).sum())  # a tenth is as far off as ten times
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # pieces → end → cost, start of the last
    for _ in range(min(most, count // MIN_POINTS)):
        best_by_end: dict[int, tuple[float, int]] = {}
        for end in range(MIN_POINTS, count + 1):
            candidates = [(best[-1][since][0] + cost[since, end], since) for since in best[-1] if (since, end) in cost]
            if candidates:
                best_by_end[end] = min(candidates)
        best.append(best_by_end)
    piece_count, lowest = 1, math.inf
    for pieces in range(1, len(best)):
        if count not in best[pieces]:
            continue
        parameters = 3 * pieces - 1
        spread = max(best[pieces][count][0] / count, noise)
        correction = 2 * parameters * (parameters + 1) / max(count - parameters - 1, 0.5)
        criterion = 2 * count * math.log(spread) + parameters * math.log(count) + correction
        if criterion < lowest - 1e-9:
            piece_count, lowest = pieces, criterion
    spans, end = [], count
    for pieces in range(piece_count, 0, -1):
        since = best[pieces][end][1]
        spans.insert(0, (since, end))
        end = since
    return spans


def _lines(x: Numbers, t: Numbers, spans: Sequence[tuple[int, int]]) -> tuple[Numbers, Numbers]:
    """Return α and β of each range of points, all at once, by iteratively reweighted least squares."""
    mask = np.zeros((len(spans), x.shape[-1]))
    for row, (i, j) in enumerate(spans):
        mask[row, i:j] = 1
    is_first = np.array([i == 0 for i, _ in spans])
    return _weighted(np.broadcast_to(x, mask.shape), np.broadcast_to(t, mask.shape), mask, is_first)


def _weighted(x: Numbers, t: Numbers, mask: Numbers, is_first: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Return α and β of each row from the points inside it; in a first piece α is a latency, never below 0."""
    u, v = mask / t, mask * x / t
    scale_u, scale_v = u.max(1, keepdims=True), v.max(1, keepdims=True)
    u, v = u / scale_u, v / scale_v
    weight = mask.copy()
    for _ in range(ROUNDS):
        uu, uv, vv = (weight * u * u).sum(1), (weight * u * v).sum(1), (weight * v * v).sum(1)
        su, sv = (weight * u).sum(1), (weight * v).sum(1)
        determinant = uu * vv - uv * uv
        safe = np.where(determinant > 1e-14 * uu * vv, determinant, 1.0)
        alpha, beta = (su * vv - sv * uv) / safe, (sv * uu - su * uv) / safe
        flat, steep = (beta < 0) | (determinant <= 1e-14 * uu * vv), is_first & (alpha < 0)
        alpha = np.where(flat, su / uu, np.where(steep, 0.0, alpha))
        beta = np.where(flat, 0.0, np.where(steep, sv / vv, beta))
        residual = np.abs(alpha[:, None] * u + beta[:, None] * v - mask)
        weight = mask / np.maximum(residual, SMALLEST_RESIDUAL)
    return alpha / scale_u[:, 0], beta / scale_v[:, 0]


def _shape(x: Numbers, t: Numbers, cuts: Sequence[tuple[int, int]]) -> Shape:
    starts, slopes = _lines(x, t, cuts)
    fitted = np.concatenate([starts[k] + slopes[k] * x[i:j] for k, (i, j) in enumerate(cuts)])
    residual = t / fitted - 1
    a_many, b_many = _resampled(x, fitted, residual, cuts)
    pieces = tuple(
        LinePiece(float(x[i]), float(x[j - 1]), _estimate(starts[k], a_many[:, k]), _estimate(slopes[k], b_many[:, k]))
        for k, (i, j) in enumerate(cuts)
    )
    knees = []
    for k, ((_, j), _) in enumerate(itertools.pairwise(cuts)):
        gap = float(x[j - 1]), float(x[j])
        knee = _knee(starts[k], slopes[k], starts[k + 1], slopes[k + 1], gap)
        samples = [_knee(a[k], b[k], a[k + 1], b[k + 1], gap) for a, b in zip(a_many, b_many, strict=True)]
        jumps = knee == math.sqrt(gap[0] * gap[1])
        knees.append(Interval(gap[0], knee, gap[1]).at(knee) if jumps else _estimate(knee, np.array(samples)))
    worst = int(np.argmax(np.abs(residual)))
    return Shape(
        pieces, tuple(knees), len(x), float(np.median(np.abs(residual))), float(abs(residual[worst])),
        float(x[worst]), None, float(x[-1]),
    )  # fmt: skip


def _knee(a: float, b: float, c: float, d: float, gap: tuple[float, float]) -> float:
    """Return where two lines meet, if that is near the gap between their sizes, else the middle of the gap."""
    low, high = gap
    if b != d:
        meet = (c - a) / (b - d)
        if low / 2 <= meet <= high * 2:
            return float(meet)
    return math.sqrt(low * high)


def _resampled(
    x: Numbers, fitted: Numbers, residual: Numbers, cuts: Sequence[tuple[int, int]]
) -> tuple[Numbers, Numbers]:
    """Return α and β of each piece in bootstrap samples of the residuals, with a fixed seed."""
    rng = np.random.default_rng(0)
    starts, slopes = [], []
    for i, j in cuts:
        count = j - i
        residuals = residual[i:j] * math.sqrt(count / max(count - 2, 1))
        times = fitted[i:j] * np.maximum(1 + rng.choice(residuals, (RESAMPLES, count)), 0.05)
        a, b = _weighted(np.broadcast_to(x[i:j], times.shape), times, np.ones_like(times), np.full(RESAMPLES, i == 0))
        starts.append(a)
        slopes.append(b)
    return np.stack(starts, 1), np.stack(slopes, 1)


def _estimate(value: float, samples: Numbers) -> Interval:
    low, high = map(float, stats.resampled_ends(samples))
    return Interval(low, float(value), high).at(float(value))


def _held_out(x: Numbers, t: Numbers, noise: float, most: int) -> float | None:
    mask = np.arange(len(x)) % 2 == 0
    mask[-1] = True  # predicts between sizes, not beyond them
    if mask.sum() < MIN_POINTS or mask.all():
        return None
    shape = _shape(x[mask], t[mask], _cuts(x[mask], t[mask], max(noise, LEAST_NOISE), most))
    return statistics.median(  # type: ignore[no-any-return]
        abs(shape.seconds(size) / measured - 1)
        for size, measured in zip(x[~mask].tolist(), t[~mask].tolist(), strict=True)
    )


def _reach(x: Numbers, t: Numbers, noise: float, most: int) -> float:
    """Return the size up to which the curve may be extrapolated: a fit without the largest sizes predicts them."""
    for factor in EXTRAPOLATION_FACTORS:
        mask = x <= x[-1] / factor
        if mask.sum() < MIN_POINTS:
            continue
        shape = _shape(x[mask], t[mask], _cuts(x[mask], t[mask], max(noise, LEAST_NOISE), most))
        if all(
            abs(shape.seconds(size) / measured - 1) <= MAX_RESIDUAL
            for size, measured in zip(x[~mask], t[~mask], strict=True)
        ):
            return float(x[-1] * factor)
    return float(x[-1])
