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
    """Return the share of rows whose label is among the k highest scores; of equal scores, the lower class ranks first.

    Raises:
        AnalysisError: there are no rows, labels are missing, a label is not a class, or a score is NaN or not a number.
    """
    try:
        matrix, targets = np.asarray(scores, float), np.asarray(labels)
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"top-{k} needs scores that are numbers: {error}") from None
    if matrix.ndim != 2 or not matrix.size or targets.shape != matrix.shape[:1]:
        raise AnalysisError(
            f"top-{k} needs rows of scores and a label for each, not {matrix.shape} and {targets.shape}"
        )
    if not 1 <= k <= matrix.shape[1]:
        raise AnalysisError(f"top-{k} of {matrix.shape[1]} classes does not exist")
    if np.isnan(matrix).any():
        raise AnalysisError(f"{int(np.isnan(matrix).any(axis=1).sum())} of {len(matrix)} rows have scores that are NaN")
    if not np.issubdtype(targets.dtype, np.integer) or targets.min() < 0 or targets.max() >= matrix.shape[1]:
        raise AnalysisError(f"labels are whole numbers from 0 to {matrix.shape[1] - 1}")
    target_scores = np.take_along_axis(matrix, targets[:, None], axis=1)
    is_earlier_class = np.arange(matrix.shape[1])[None, :] < targets[:, None]
    better_count = ((matrix > target_scores) | ((matrix == target_scores) & is_earlier_class)).sum(axis=1)
    return float((better_count < k).mean())


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
    map_a, map_b = np.asarray(a), np.asarray(b)
    if map_a.shape != map_b.shape or not map_a.size:
        raise AnalysisError(f"two maps of one shape are needed, not {map_a.shape} and {map_b.shape}")
    shares = []
    for label in range(classes):
        union = int(((map_a == label) | (map_b == label)).sum())
        if union:
            shares.append(int(((map_a == label) & (map_b == label)).sum()) / union)
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


COCO_OVERLAPS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))


def average_precision(
    detections: Sequence[Detection], truths: Sequence[Truth], overlap: float = 0.5, points: int | None = 101
) -> float:
    """Return the average precision of the boxes of one class.

    Detections are processed by decreasing score; each is matched to the object that it overlaps most, among those of
    its image not yet matched. The precision at a recall is the highest precision at that recall or above.

    Args:
        detections: detections.
        truths: objects; at least one.
        overlap: minimum intersection over union of a detection with its object.
        points: 101 recalls as in COCO, 11 as in VOC 2007, None for the area under the curve as in VOC 2010.

    Raises:
        AnalysisError: there is no object, or a score is NaN.
    """
    if not truths:
        raise AnalysisError("average precision needs an object to be found")
    if any(math.isnan(detection.score) for detection in detections):
        raise AnalysisError(
            f"{sum(math.isnan(detection.score) for detection in detections)} detections have scores that are NaN"
        )
    unmatched: dict[int | str, list[Box]] = {}
    for truth in truths:
        unmatched.setdefault(truth.image, []).append(truth.box)
    is_match = []
    for detection in sorted(detections, key=lambda detection: -detection.score):
        boxes = unmatched.get(detection.image, [])
        shares = [iou(detection.box, box) for box in boxes]
        best = max(range(len(boxes)), key=shares.__getitem__, default=None)
        is_match.append(best is not None and shares[best] >= overlap)
        if is_match[-1] and best is not None:
            del boxes[best]
    if not is_match:
        return 0.0
    hits = np.cumsum(is_match)
    recall, precision = hits / len(truths), hits / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    if points is None:
        return float((np.diff(recall, prepend=0.0) * precision).sum())
    # so that one hit of ten reaches a recall of 1/10, despite rounding
    indices = np.searchsorted(recall + 1e-12, np.linspace(0, 1, points), "left")
    return float(np.append(precision, 0.0)[indices].mean())


def mean_average_precision(
    detections: Sequence[Detection],
    truths: Sequence[Truth],
    overlaps: Sequence[float] = COCO_OVERLAPS,
    points: int | None = 101,
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
                    [detection for detection in detections if detection.kind == kind],
                    [truth for truth in truths if truth.kind == kind],
                    overlap,
                    points,
                )
                for kind in kinds
                for overlap in overlaps
            ]
        )
    )


def perplexity(scores: ArrayLike, tokens: ArrayLike, ignored_token: int | None = -100) -> float:
    """Return exp of the mean negative log-likelihood of tokens.

    Args:
        scores: scores before softmax, over the vocabulary on the last axis; row i scores token i.
        tokens: one token for each row of scores.
        ignored_token: token that does not count.

    Raises:
        AnalysisError: shapes do not match, a token is not in the vocabulary, no token counts, or a score is NaN.
    """
    logits, targets = np.asarray(scores, np.float64), np.asarray(tokens)
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise AnalysisError(f"perplexity needs a token for each row of scores, not {targets.shape} for {logits.shape}")
    rows, flat_targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    is_counted = flat_targets != ignored_token if ignored_token is not None else np.ones(len(flat_targets), bool)
    rows, flat_targets = rows[is_counted], flat_targets[is_counted]
    if not len(flat_targets):
        raise AnalysisError("no token counts, so there is no perplexity")
    if np.isnan(rows).any():
        raise AnalysisError(f"{int(np.isnan(rows).any(axis=1).sum())} of {len(rows)} tokens have scores that are NaN")
    if flat_targets.min() < 0 or flat_targets.max() >= rows.shape[1]:
        raise AnalysisError(f"tokens are whole numbers from 0 to {rows.shape[1] - 1}")
    highest = rows.max(axis=1)
    log_sums = highest + np.log(np.exp(rows - highest[:, None]).sum(axis=1))
    with np.errstate(over="ignore"):
        return float(np.exp((log_sums - rows[np.arange(len(flat_targets)), flat_targets]).mean()))


def psnr(a: ArrayLike, b: ArrayLike, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio of two images in decibels; infinite for equal images.

    Raises:
        AnalysisError: they are empty, have different shapes, or have values that are not finite.
    """
    image_a, image_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if image_a.shape != image_b.shape or not image_a.size:
        raise AnalysisError(f"two images of one shape are needed, not {image_a.shape} and {image_b.shape}")
    squares: NDArray[np.float64] = (image_a - image_b) ** 2
    error = float(squares.mean())
    if not math.isfinite(error):
        raise AnalysisError("an image has numbers that are not finite")
    return 10 * math.log10(peak * peak / error) if error else math.inf
