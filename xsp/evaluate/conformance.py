"""The contract of a predictor as a function that checks it, for the tests of predictor authors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xsp.evaluate import datasets
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.predictors import Batch, Predictor

SAMPLES = 3


def check(predictor: Predictor, manifest: Manifest, folder: Path = Path(), tests_batches: bool = True) -> None:
    """Test whether a predictor fulfils the contract.

    Args:
        predictor: the predictor.
        manifest: manifest of a model that it can open.
        folder: folder of relative paths in the manifest.
        tests_batches: also predict a batch of several samples, and compare its answers with those for single samples.

    Raises:
        AssertionError: the predictor violates the contract; the message says how.
    """
    handle = predictor.open(manifest, folder, "")
    try:
        assert handle.takes, "open must return a handle whose `takes` names at least one input"
        samples = datasets.of(manifest.dataset.model_copy(update={"source": "synthetic"}), handle.takes, folder, False)
        rows = [samples[number] for number in range(SAMPLES)]
        batches: list[Batch] = [{name: row[name][None] for name in handle.takes} for row in rows]
        consumed: list[int] = []

        def stream() -> Iterator[Batch]:
            for number, batch in enumerate(batches):
                consumed.append(number)
                yield batch

        answers = []
        for answer in predictor.predict(handle, stream()):
            answers.append(answer)
            assert len(consumed) == len(answers), "predict must answer a batch before it takes the next one"
        assert len(answers) == SAMPLES, "predict must yield one answer for each batch"
        assert all(answer.outputs for answer in answers), "an answer must have at least one array"
        repeated = list(predictor.predict(handle, batches[:1]))
        for before, after in zip(answers[0].outputs, repeated[0].outputs, strict=True):
            assert np.array_equal(before, after, equal_nan=before.dtype.kind == "f"), (
                "the same batch must get the same answer"
            )
        if tests_batches:
            all_rows = {name: np.stack([row[name] for row in rows]) for name in handle.takes}
            (combined,) = predictor.predict(handle, [all_rows])
            assert len(combined.outputs[0]) == SAMPLES, "an answer must have its samples along the first axis"
            for number, single in enumerate(answers):
                close = np.allclose(combined.outputs[0][number], single.outputs[0][0], rtol=1e-3, atol=1e-5)
                assert close, "a sample must get the same answer alone and in a batch"
    finally:
        predictor.close(handle)
    predictor.close(handle)
