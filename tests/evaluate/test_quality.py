"""Measures of outputs equal closed forms and other people's code, and say what they cannot tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xsp.errors import AnalysisError
from xsp.evaluate.quality import accuracy, divergence
from xsp.evaluate.quality.accuracy import Detection, Truth

CLOSE = 1e-9


@pytest.fixture(scope="module")
def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(7)
    return [(draw.dirichlet(np.ones(n)), draw.dirichlet(np.full(n, 0.3))) for n in (2, 3, 10, 1000)]


def test_divergences_equal_those_of_scipy(pairs) -> None:
    stats = pytest.importorskip("scipy.stats")
    distance = pytest.importorskip("scipy.spatial.distance")
    for p, q in pairs:
        q = np.maximum(q, 1e-300)
        assert divergence.kl(p, q) == pytest.approx(stats.entropy(p, q), abs=CLOSE, rel=CLOSE)
        assert math.sqrt(divergence.js(p, q)) == pytest.approx(distance.jensenshannon(p, q), abs=CLOSE)
        assert divergence.cosine(p, q) == pytest.approx(distance.cosine(p, q), abs=CLOSE)
        assert divergence.ks(p, q) == pytest.approx(stats.ks_2samp(p, q).statistic, abs=CLOSE)
        assert divergence.covariance(p, q) == pytest.approx(np.cov(p, q)[0, 1], abs=CLOSE)
        assert divergence.correlation(p, q) == pytest.approx(stats.pearsonr(p, q).statistic, abs=CLOSE)
        assert divergence.rank(p, q) == pytest.approx(stats.spearmanr(p, q).statistic, abs=CLOSE)


def test_samples_of_different_sizes_with_ties_equal_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(3)
    for _ in range(30):
        a, b = draw.integers(0, 9, draw.integers(1, 40)), draw.integers(2, 12, draw.integers(1, 40))
        assert divergence.ks(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic, abs=CLOSE)


def test_distances_equal_their_closed_forms() -> None:
    for p in (0.1, 0.5, 0.9):
        for q in (0.2, 0.5, 0.7):
            overlap = math.sqrt(p * q) + math.sqrt((1 - p) * (1 - q))
            a, b = [p, 1 - p], [q, 1 - q]
            assert divergence.hellinger(a, b) == pytest.approx(math.sqrt(max(0.0, 1 - overlap)), abs=1e-8)
            assert divergence.bhattacharyya(a, b) == pytest.approx(-math.log(overlap), abs=CLOSE)
            expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            assert divergence.kl(a, b) == pytest.approx(expected, abs=CLOSE)


def test_what_excludes_each_other_is_as_far_as_can_be() -> None:
    a, b = [1.0, 0.0], [0.0, 1.0]
    assert divergence.kl(a, b) == divergence.bhattacharyya(a, b) == math.inf
    assert divergence.js(a, b) == pytest.approx(math.log(2), abs=CLOSE)
    assert divergence.hellinger(a, b) == 1
    assert divergence.kl([1.0, 0.0], [0.5, 0.5]) == pytest.approx(math.log(2), abs=CLOSE)


def test_weights_are_divided_by_their_sum_and_rows_are_averaged() -> None:
    assert divergence.kl([2, 6], [30, 10]) == pytest.approx(divergence.kl([0.25, 0.75], [0.75, 0.25]))
    rows = divergence.js([[1, 1], [1, 3]], [[1, 1], [3, 1]])
    assert rows == pytest.approx(divergence.js([1, 3], [3, 1]) / 2)


@pytest.mark.parametrize("name", [*divergence.DISTRIBUTION_MEASURES, *divergence.NUMBER_MEASURES])
def test_each_measure_says_what_it_cannot_take(name: str) -> None:
    measure = {**divergence.DISTRIBUTION_MEASURES, **divergence.NUMBER_MEASURES}[name]
    with pytest.raises(AnalysisError, match="first outputs are empty"):
        measure([], [])
    with pytest.raises(AnalysisError, match="1 of 2 of the second outputs are not finite numbers"):
        measure([0.5, 0.5], [0.5, math.nan])
    if name != "ks":
        with pytest.raises(AnalysisError, match=r"different shapes: \(2,\) and \(3,\)"):
            measure([0.5, 0.5], [0.2, 0.3, 0.5])
    if name in divergence.DISTRIBUTION_MEASURES:
        with pytest.raises(AnalysisError, match="all 0, and not"):
            measure([0.0, 0.0], [0.5, 0.5])
        with pytest.raises(AnalysisError, match="below 0"):
            measure([0.5, 0.5], [-1.0, 2.0])
    if name in ("correlation", "rank"):
        with pytest.raises(AnalysisError, match="outputs of one side are equal"):
            measure([1.0, 1.0], [1.0, 2.0])


def test_all_measures_come_with_the_reason_of_those_that_are_not_there() -> None:
    found = divergence.all_of([[-1.0, 2.0]], [[-1.5, 2.0]])
    assert found["kl"] == "1 of the first outputs are below 0: scores need softmax first"
    assert isinstance(found["cosine"], float)
    assert all(
        isinstance(each, float) for each in divergence.all_of([[-1.0, 2.0]], [[-1.5, 2.0]], scores=True).values()
    )


def test_top_k_counts_equal_scores_by_the_order_of_classes() -> None:
    scores, labels = [[0.1, 0.7, 0.2], [0.4, 0.4, 0.2], [0.0, 0.1, 0.9], [0.5, 0.3, 0.2]], [1, 1, 0, 0]
    assert accuracy.top_k(scores, labels, 1) == 0.5
    assert accuracy.top_k(scores, labels, 2) == 0.75
    assert accuracy.top_k(scores, labels, 3) == 1.0
    for wrong in (([], []), ([[1.0, 2.0]], [2]), ([[1.0, 2.0]], [0, 1]), ([[1.0, math.nan]], [0]), ([["a", "b"]], [0])):
        with pytest.raises(AnalysisError):
            accuracy.top_k(*wrong)
    with pytest.raises(AnalysisError, match="top-4 of 3"):
        accuracy.top_k(scores, labels, 4)


def test_intersection_over_union() -> None:
    assert accuracy.iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert accuracy.iou((0, 0, 1, 1), (1, 0, 2, 1)) == 0
    assert accuracy.iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0
    assert accuracy.mask_iou([[0, 0], [1, 1]], [[0, 1], [1, 1]], 5) == pytest.approx((1 / 2 + 2 / 3) / 2)
    with pytest.raises(AnalysisError, match="ends before it begins"):
        accuracy.iou((2, 0, 1, 1), (0, 0, 1, 1))


def test_mean_average_precision_equals_an_example_made_by_hand() -> None:
    """Kind 1 has two objects: found at 0.9, a miss at 0.8, found at 0.7: precisions 1 and 2/3 at recalls 1/2 and 1,
    an area of 5/6. Kind 2 has one object, found at once, and found a second time, which is a miss: 1."""
    here, there, off = (0.0, 0.0, 10.0, 10.0), (20.0, 20.0, 30.0, 30.0), (50.0, 50.0, 60.0, 60.0)
    truths = [Truth("a", 1, here), Truth("b", 1, there), Truth("a", 2, there)]
    found = [
        Detection("a", 1, here, 0.9),
        Detection("a", 1, off, 0.8),
        Detection("b", 1, there, 0.7),
        Detection("a", 2, there, 0.6),
        Detection("a", 2, there, 0.5),
        Detection("b", 3, there, 0.9),  # of no kind that is there
    ]
    assert accuracy.mean_average_precision(found, truths, [0.5], None) == pytest.approx((5 / 6 + 1) / 2)
    # of 11 recalls 0 to 0.5 have precision 1, and five have 2/3; of 101, 51 and 50
    assert accuracy.mean_average_precision(found, truths, [0.5], 11) == pytest.approx(((6 + 10 / 3) / 11 + 1) / 2)
    assert accuracy.mean_average_precision(found, truths) == pytest.approx(((51 + 100 / 3) / 101 + 1) / 2)
    assert accuracy.mean_average_precision([], truths) == 0
    with pytest.raises(AnalysisError, match="needs an object"):
        accuracy.mean_average_precision(found, [])


def test_a_detection_takes_an_object_of_its_image_only_and_each_once() -> None:
    box = (0.0, 0.0, 1.0, 1.0)
    assert accuracy.average_precision([Detection("b", 1, box, 1.0)], [Truth("a", 1, box)]) == 0
    twice = [Detection("a", 1, box, 1.0), Detection("a", 1, box, 0.9)]
    assert accuracy.average_precision(twice, [Truth("a", 1, box), Truth("b", 1, box)], points=None) == 0.5


def test_perplexity_of_a_uniform_guess_is_the_size_of_the_vocabulary() -> None:
    assert accuracy.perplexity(np.full((2, 3, 50), 7.0), np.ones((2, 3), int)) == pytest.approx(50)
    scores = [[0.0, math.log(3)], [5.0, 5.0], [1.0, 1.0]]
    assert accuracy.perplexity(scores, [1, 0, -100]) == pytest.approx(math.sqrt(4 / 3 * 2))
    assert accuracy.perplexity([[0.0, 1e5]], [0]) == math.inf
    for wrong in (([[0.0, 1.0]], [-100]), ([[0.0, 1.0]], [2]), ([[0.0, math.nan]], [0]), ([[0.0, 1.0]], [0, 1])):
        with pytest.raises(AnalysisError):
            accuracy.perplexity(*wrong)


def test_psnr() -> None:
    assert accuracy.psnr(np.zeros((4, 4)), np.full((4, 4), 255)) == 0
    assert accuracy.psnr([0.0, 0.0], [0.1, 0.1], peak=1) == pytest.approx(20)
    assert accuracy.psnr([1, 2], [1, 2]) == math.inf
    assert accuracy.psnr(np.array([0], np.uint8), np.array([255], np.uint8)) == 0  # no wrap-around
    with pytest.raises(AnalysisError, match="one shape"):
        accuracy.psnr([1], [1, 2])
