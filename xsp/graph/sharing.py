"""Layers that the models of a corpus share: the Jaccard index of their keys, groups of similar models, growth.

The Jaccard index of two models is the number of different computing calls that both have, over the number that at least
one of them has. How often a call occurs in a model does not matter: it is timed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.errors import GraphError, UsageError, nearest
from xsp.graph import corpus, files
from xsp.graph.corpus import Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_SIMILARITY = 0.5
"""Mean Jaccard index at or above which two groups count as one."""

_CHUNK = 4096


@dataclass(frozen=True)
class Member:
    """A model of a corpus."""

    spec: str
    keys: tuple[str, ...]
    """Keys of the computing calls, in the order of execution."""

    @property
    def unique(self) -> frozenset[str]:
        """The distinct keys."""
        return frozenset(self.keys)


@dataclass(frozen=True)
class Corpus:
    """The content of a folder of graphs."""

    path: Path
    members: tuple[Member, ...]
    """Models with a graph, in the order of capture."""

    holes: tuple[tuple[str, str], ...]
    """Models without a graph, each with the reason."""

    rows: tuple[dict[str, Any], ...]
    """The selected lines of `measures.jsonl`, including failures."""

    @property
    def settings(self) -> dict[str, Any]:
        """Batch and mode of the graphs."""
        return dict(next((row["asked"] for row in self.rows if isinstance(row.get("asked"), dict)), {}))


def read(
    path: Path, only: Sequence[str] = (), progress: Progress = lambda name, done, total: None, *, graphs: bool = True
) -> Corpus:
    """Read a corpus that `xsp graph --all` wrote; models with a missing or damaged graph are listed in `holes`.

    Args:
        path: folder of the corpus.
        only: patterns of names, such as `torchvision:resnet*`; default: all models.
        progress: callback that is given the name of a model, the number of models done, and the total.
        graphs: whether to read the graphs too; without them there are no members.

    Raises:
        GraphError: there is no corpus.
        UsageError: a pattern matches no model of the corpus.
    """
    if not (path / corpus.FILE).is_file():
        raise GraphError(f"{path}: not a corpus; make one: xsp graph --all torchvision --out {path}")
    rows = list({row["spec"]: row for row in corpus.rows(path)}.values())
    if not rows:
        raise GraphError(f"{path}: {corpus.FILE} lists no models; continue: xsp graph --all torchvision --out {path}")
    for pattern in only:
        if not any(fnmatchcase(row["spec"], pattern) for row in rows):
            raise UsageError(f"no model of {path} matches {pattern!r}{nearest(pattern, [row['spec'] for row in rows])}")
    selected = [row for row in rows if not only or any(fnmatchcase(row["spec"], pattern) for pattern in only)]
    members, holes = [], []
    for done, row in enumerate(selected):
        spec = row["spec"]
        if isinstance(row.get("error"), str):
            holes.append((spec, row["error"]))
        elif graphs:
            progress(spec, done, len(selected))
            try:
                computing = files.load(corpus.graph_path(path, spec)).computing
                members.append(Member(spec, tuple(node.key for node in computing)))
            except GraphError as error:
                holes.append((spec, str(error)))
    progress("done", len(selected), len(selected))
    return Corpus(path, tuple(members), tuple(holes), tuple(selected))


def growth(members: Sequence[Member]) -> list[tuple[int, int]]:
    """Return, after each model, the numbers of computing calls and of different ones so far."""
    known_keys: set[str] = set()
    calls, curve = 0, []
    for member in members:
        calls += len(member.keys)
        known_keys |= member.unique
        curve.append((calls, len(known_keys)))
    return curve


def count_new(member: Member, others: Sequence[Member]) -> int:
    """Return the number of different calls of a model that no other model has, and that remain to be timed."""
    other_keys: set[str] = set().union(*(other.unique for other in others))
    return len(member.unique - other_keys)


def jaccard(members: Sequence[Member]) -> NDArray[Any]:
    """Return the Jaccard index of each pair of models, as a square matrix; NaN for two without computing calls."""
    import numpy as np

    numbers: dict[str, int] = {}
    key_numbers = [[numbers.setdefault(key, len(numbers)) for key in sorted(member.unique)] for member in members]
    intersection = np.zeros((len(members), len(members)), dtype=np.float32)
    membership = np.zeros((len(members), len(numbers)), dtype=bool)
    for row, columns in enumerate(key_numbers):
        membership[row, columns] = True
    for start in range(0, len(numbers), _CHUNK):
        part = membership[:, start : start + _CHUNK].astype(np.float32)
        intersection += part @ part.T
    sizes = np.diag(intersection)
    union = sizes[:, None] + sizes[None, :] - intersection
    result: NDArray[Any] = np.full_like(intersection, np.nan, dtype=float)
    np.divide(intersection, union, out=result, where=union > 0)
    return result


@dataclass(frozen=True)
class SimilarModels:
    """A group of similar models."""

    places: tuple[int, ...]
    """Places of the models in the order of the clustering: neighbours are similar."""

    similarity: float
    """Mean Jaccard index between the two halves that were joined last; 1 for a single model."""


def groups(indexes: NDArray[Any], threshold: float = MIN_SIMILARITY) -> list[SimilarModels]:
    """Return the models in groups, by average linkage, in the order of the clustering.

    The two groups with the highest mean Jaccard index between their models are joined repeatedly. Groups joined at
    `threshold` or above form one group of the result; joining continues below that, so that neighbouring groups are
    similar too. Ties are broken by the order of the corpus.
    """
    import numpy as np

    count = len(indexes)
    similarity = np.nan_to_num(indexes, nan=0.0).copy()
    np.fill_diagonal(similarity, -1.0)
    exact = np.nan_to_num(indexes, nan=0.0)
    order: dict[int, tuple[int, ...]] = {place: (place,) for place in range(count)}
    parts = {place: [SimilarModels((place,), 1.0)] for place in range(count)}
    size = np.ones(count)
    for _ in range(count - 1):
        first, second = divmod(int(similarity.argmax()), count)
        level = float(similarity[first, second])
        flipped = _best_orientation(exact, order[first], order[second])
        pair = ((first, flipped[0]), (second, flipped[1]))
        order[first] = tuple(
            place for cluster, is_reversed in pair for place in order[cluster][:: -1 if is_reversed else 1]
        )
        if level >= threshold:
            parts[first] = [SimilarModels(order[first], level)]
        else:
            parts[first] = [group for cluster, is_reversed in pair for group in _oriented(parts[cluster], is_reversed)]
        del order[second], parts[second]
        row = (size[first] * similarity[first] + size[second] * similarity[second]) / (size[first] + size[second])
        row[similarity[first] < 0] = -1.0
        similarity[first], similarity[:, first] = row, row
        similarity[second], similarity[:, second] = -1.0, -1.0
        similarity[first, first] = -1.0
        size[first] += size[second]
    return parts[min(parts)] if parts else []


def _oriented(parts: list[SimilarModels], is_reversed: bool) -> list[SimilarModels]:
    return [SimilarModels(group.places[::-1], group.similarity) for group in parts[::-1]] if is_reversed else parts


def _best_orientation(indexes: NDArray[Any], first: tuple[int, ...], second: tuple[int, ...]) -> tuple[bool, bool]:
    """Return which of two rows of models to reverse, so that the models at the junction are as similar as possible."""
    orientations = [(False, False), (False, True), (True, False), (True, True)]
    return max(
        orientations,
        key=lambda orientation: indexes[first[0 if orientation[0] else -1], second[-1 if orientation[1] else 0]],
    )
