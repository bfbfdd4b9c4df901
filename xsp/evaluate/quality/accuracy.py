"""Accuracy of outputs against the ground truth: classes, boxes, masks, texts, images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xsp.errors import AnalysisError

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def top_k(scores: ArrayLike, labels: ArrayLike, k: int = 1) -> float:
    """Return the share of rows whose label is among the k highest scores; of equal scores the lower class is first.

    Raises:
        AnalysisError: there are no rows, labels are missing, a label is not a class, or a score is NaN.
    """
    given, wanted = np.asarray(scores, float), np.asarray(labels)
    if given.ndim != 2 or not given.size or wanted.shape != given.shape[:1]:
        raise AnalysisError(f"top-{k} needs rows of scores and a label for each, not {given.shape} and {wanted.shape}")
    if not 1 <= k <= given.shape[1]:
        raise AnalysisError(f"top-{k} of {given.shape[1]} classes does not exist")
    if np.isnan(given).any():
        raise AnalysisError(f"{int(np.isnan(given).any(axis=1).sum())} of {len(given)} rows have scores that are NaN")
    if not np.issubdtype(wanted.dtype, np.integer) or wanted.min() < 0 or wanted.max() >= given.shape[1]:
        raise AnalysisError(f"labels are whole numbers from 0 to {given.shape[1] - 1}")
    own = np.take_along_axis(given, wanted[:, None], axis=1)
    earlier = np.arange(given.shape[1])[None, :] < wanted[:, None]
    ahead = ((given > own) | ((given == own) & earlier)).sum(axis=1)
    return float((ahead < k).mean())


def iou(a: Box, b: Box) -> float:
    """Return the intersection over the union of two boxes; 0 for boxes without an area.

    Raises:
        AnalysisError: a box ends before it begins.
    """
    for box in (a, b):
        if not (box[0] <= box[2] and box[1] <= box[3]):
            raise AnalysisError(f"the box {box} ends before it begins: it is left, top, right, bottom")
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


def mask_iou(a: ArrayLike, b: ArrayLike, classes: int) -> float:
    """Return the mean intersection over union of two class maps, over the classes that occur in either.

    Raises:
        AnalysisError: the maps are empty, have different shapes, or contain none of the classes.
    """
    first, second = np.asarray(a), np.asarray(b)
    if first.shape != second.shape or not first.size:
        raise AnalysisError(f"two maps of one shape are needed, not {first.shape} and {second.shape}")
    shares = []
    for each in range(classes):
        union = int(((first == each) | (second == each)).sum())
        if union:
            shares.append(int(((first == each) & (second == each)).sum()) / union)
    if not shares:
        raise AnalysisError(f"none of the {classes} classes is in the maps")
    return float(np.mean(shares))


@dataclass(frozen=True)
class Truth:
    """An object in an image."""

    image: int | str
    kind: int | str
    box: Box


@dataclass(frozen=True)
class Detection(Truth):
    """A detected object."""

    score: float


COCO = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))


def average_precision(
    found: Sequence[Detection], truths: Sequence[Truth], overlap: float = 0.5, points: int | None = 101
) -> float:
    """Return the average precision of the boxes of one class.

    Detections are processed by decreasing score; each is matched to the object that it overlaps most, among those of
    its image not yet matched. The precision at a recall is the highest precision at that recall or above.

    Args:
        found: detections.
        truths: objects; at least one.
        overlap: minimum intersection over union for an object to be found.
        points: 101 recalls as in COCO, 11 as in VOC 2007, None for the area under the curve as in VOC 2010.

    Raises:
        AnalysisError: there is no object, or a score is NaN.
    """
    if not truths:
        raise AnalysisError("average precision needs an object to be found")
    if any(math.isnan(each.score) for each in found):
        raise AnalysisError(f"{sum(math.isnan(each.score) for each in found)} detections have scores that are NaN")
    free: dict[int | str, list[Box]] = {}
    for truth in truths:
        free.setdefault(truth.image, []).append(truth.box)
    right = []
    for each in sorted(found, key=lambda detection: -detection.score):
        boxes = free.get(each.image, [])
        shares = [iou(each.box, box) for box in boxes]
        best = max(range(len(boxes)), key=shares.__getitem__, default=None)
        right.append(best is not None and shares[best] >= overlap)
        if right[-1] and best is not None:
            del boxes[best]
    if not right:
        return 0.0
    hits = np.cumsum(right)
    recall, precision = hits / len(truths), hits / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    if points is None:
        return float((np.diff(recall, prepend=0.0) * precision).sum())
    # one hit of ten reaches a recall of 1/10, despite rounding
    places = np.searchsorted(recall + 1e-12, np.linspace(0, 1, points), "left")
    return float(np.append(precision, 0.0)[places].mean())


def mean_average_precision(
    found: Sequence[Detection], truths: Sequence[Truth], overlaps: Sequence[float] = COCO, points: int | None = 101
) -> float:
    """Return the mean of `average_precision` over overlaps and over the classes that have an object.

    Raises:
        As `average_precision`.
    """
    if not truths:
        raise AnalysisError("average precision needs an object to be found")
    kinds = dict.fromkeys(truth.kind for truth in truths)
    return float(
        np.mean(
            [
                average_precision(
                    [each for each in found if each.kind == kind],
                    [each for each in truths if each.kind == kind],
                    overlap,
                    points,
                )
                for kind in kinds
                for overlap in overlaps
            ]
        )
    )


def perplexity(scores: ArrayLike, tokens: ArrayLike, ignored: int | None = -100) -> float:
    """Return exp of the mean negative log-likelihood of tokens.

    Args:
        scores: scores before softmax, over the vocabulary on the last axis; a row scores the token at its own place.
        tokens: one token for each row of scores.
        ignored: the token that does not count.

    Raises:
        AnalysisError: shapes do not match, a token is not in the vocabulary, no token counts, or a score is NaN.
    """
    given, wanted = np.asarray(scores, np.float64), np.asarray(tokens)
    if given.ndim < 1 or wanted.shape != given.shape[:-1]:
        raise AnalysisError(f"perplexity needs a token for each row of scores, not {wanted.shape} for {given.shape}")
    rows, flat = given.reshape(-1, given.shape[-1]), wanted.reshape(-1)
    counted = flat != ignored if ignored is not None else np.ones(len(flat), bool)
    rows, flat = rows[counted], flat[counted]
    if not len(flat):
        raise AnalysisError("no token counts, so there is no perplexity")
    if np.isnan(rows).any():
        raise AnalysisError(f"{int(np.isnan(rows).any(axis=1).sum())} of {len(rows)} tokens have scores that are NaN")
    if flat.min() < 0 or flat.max() >= rows.shape[1]:
        raise AnalysisError(f"tokens are whole numbers from 0 to {rows.shape[1] - 1}")
    highest = rows.max(axis=1)
    logs = highest + np.log(np.exp(rows - highest[:, None]).sum(axis=1))
    with np.errstate(over="ignore"):
        return float(np.exp((logs - rows[np.arange(len(flat)), flat]).mean()))


def psnr(a: ArrayLike, b: ArrayLike, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio of two images in decibels; infinite for equal images.

    Raises:
        AnalysisError: they are empty, have different shapes, or have values that are not finite.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.shape != second.shape or not first.size:
        raise AnalysisError(f"two images of one shape are needed, not {first.shape} and {second.shape}")
    apart: NDArray[np.float64] = (first - second) ** 2
    error = float(apart.mean())
    if not math.isfinite(error):
        raise AnalysisError("an image has numbers that are not finite")
    return 10 * math.log10(peak * peak / error) if error else math.inf
