"""Accuracy of a model on samples with known classes: the share whose class is ranked first, or among the first five."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xsp import stats
from xsp.errors import AnalysisError
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array
from xsp.evaluate.quality import accuracy

RANKED = ("argsort", "top_k")
"""Final steps whose output is a ranking of classes, best first, instead of scores."""

TOP_KS = 1, 5


def of(manifest: Manifest, labels: Sequence[int], names: Sequence[str], first_output: Callable[[int], Array]) -> Any:
    """Return top-1 and top-5 as plain data: shares, their 95 % intervals, numbers of samples and classes; or an error.

    Args:
        manifest: the manifest; its last output step determines whether the output is scores or ranked classes.
        labels: the class of each sample.
        names: names of the classes.
        first_output: returns the first output for a sample, without the batch axis.

    Returns:
        A mapping with `top1`, `top5` (None if there are fewer than five classes), their `…_interval`, `samples` and
        `classes`; with `error` alone if the outputs determine no class.
    """
    steps = manifest.model.outputs[0].steps if manifest.model.outputs else []
    is_ranking = bool(steps) and steps[-1].op in RANKED
    rows: list[Array] = []
    for index in range(len(labels)):
        row = np.asarray(first_output(index))
        if row.ndim != 1 or (rows and len(row) != len(rows[0])):
            return {"error": f"the output for a sample has shape {row.shape}, and is not a list of scores of classes"}
        rows.append(row)
    try:
        hits = {k: _hits(np.stack(rows), np.asarray(labels), k, is_ranking) for k in TOP_KS}
    except AnalysisError as error:
        return {"error": str(error)}
    result: dict[str, Any] = {"samples": len(rows), "classes": len(names)}
    for k, share in hits.items():
        result[f"top{k}"] = share
        result[f"top{k}_interval"] = None if share is None else interval(share, len(rows))
    return result


def _hits(rows: Array, labels: Array, k: int, is_ranking: bool) -> float | None:
    if rows.shape[1] < k or (not is_ranking and rows.shape[1] == 1):
        return None
    if not is_ranking:
        return accuracy.top_k(rows, labels, k)
    return float((rows[:, :k] == labels[:, None]).any(axis=1).mean())


def interval(share: float, count: int) -> list[float]:
    """Return the 95 % interval of a share of independent samples: Wilson's score interval (Wilson 1927)."""
    return list(stats.share_interval(share, count).ends)


def percent_text(figures: Mapping[str, Any] | None, k: int = 1) -> str:
    """Return top-k in percent, or a dash if there is none."""
    share = (figures or {}).get(f"top{k}")
    return "-" if share is None else f"{100 * share:.1f}"


def sentence(figures: Mapping[str, Any]) -> str:
    """Return an accuracy as a sentence."""
    if "error" in figures:
        return f"no accuracy: {figures['error']}"
    parts = []
    for k in TOP_KS:
        if figures[f"top{k}"] is not None:
            low, high = figures[f"top{k}_interval"]
            parts.append(f"top-{k} {percent_text(figures, k)} % ({100 * low:.1f} to {100 * high:.1f})")
    return f"{', '.join(parts) or 'no accuracy'} of {figures['samples']} samples of {figures['classes']} classes"
