"""The correlation page on the published totals of eight GPUs: complete models only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")

from parts import golden

from xsp import graph
from xsp.bound import correlate


@pytest.fixture(scope="module")
def measures(shared: Path) -> list[dict[str, Any]]:
    return [{"spec": name, **graph.of(golden.source(name)).measures()} for name in golden.MODELS]


@pytest.mark.slow
def test_models_of_ours_do_the_published_work(shared: Path, measures: list[dict[str, Any]]) -> None:
    published = golden.multiply_adds(shared / "golden" / "benanza_table1.csv")
    for row in measures:
        expected = published[golden.normalised(row["spec"])]
        assert row["flops"] / 2 == pytest.approx(expected, rel=golden.TOLERANCE), row["spec"]


@pytest.mark.slow
def test_the_page_has_eight_gpus_at_three_batches_of_complete_models(
    shared: Path, measures: list[dict[str, Any]]
) -> None:
    found = correlate.groups(measures, golden.totals(shared / "golden" / "benanza_totals.csv"))
    assert len({group.device for group in found}) == 8
    assert len(found) == 24
    for group in found:
        names = {name for name, _, _ in group.points}
        assert len(names) >= 17
        assert ("ResNet152-v1" in names) == (group.batch == 32 or group.batch == 8)
        of = {each.measure: each for each in group.correlations}
        assert of["input_elements"].reason == "it is the same in all models"
        for measure in ("flops", "longest_path", "bytes"):
            assert of[measure].pearson is not None
            assert of[measure].pearson.low is not None
        assert group.regression is not None
