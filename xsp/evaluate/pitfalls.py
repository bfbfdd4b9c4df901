"""The cost of small differences before the model: the pitfalls of the MLModelScope paper, on images from a seed.

Images belong to classes: each blends its own noise with the noise of its class. A model with weights from a seed
computes features; a linear readout is fitted to them once, by least squares, under the right pipeline, which gives an
accuracy without any download. The other half of the images goes through pipelines with one difference each. The readout
was not trained through the model, but it measures what the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsp.errors import ManifestError, XspError
from xsp.evaluate import datasets, pipeline, reading
from xsp.evaluate.pipeline import Array
from xsp.evaluate.predictors import Torch
from xsp.evaluate.quality import divergence
from xsp.evaluate.quality.judging import constant

CLASSES, TRAINING, TESTING = 8, 12, 6
"""Number of classes, and of training and test images per class."""

SIDE = 112
RESIZE = SIDE * 256 // 224
RIDGE = 1e-3

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def _steps(**changes: Any) -> list[Any]:
    """Return the right pipeline with some steps replaced: by None to remove a step, by a list for several steps."""
    defaults: dict[str, Any] = {
        "decode": "decode",
        "resize": {"resize": {"size": RESIZE}},
        "crop": {"crop": SIDE},
        "normalise": {"normalise": {"divide": 255, "mean": MEAN, "std": STD}},
        "layout": "layout",
    }
    steps: list[Any] = []
    for step in {**defaults, **changes}.values():
        steps += step if isinstance(step, list) else [] if step is None else [step]
    return steps


PITFALLS: Mapping[str, tuple[str, list[Any]]] = {
    "right": ("", _steps()),
    "BGR for RGB": ("colour order", _steps(decode={"decode": {"color_mode": "BGR"}})),
    "gray for colour": (
        "colour order",
        _steps(decode=[{"decode": {"color_mode": "gray"}}, {"op": "gray3"}]),
    ),
    "decoder of torchvision": ("decoder", _steps(decode={"decode": {"decoder": "torchvision"}})),
    "decoded at half size": ("decoder", _steps(decode={"decode": {"decoder": "pillow-half"}})),
    "no crop": ("crop", _steps(resize={"resize": {"size": [SIDE, SIDE]}}, crop=None)),
    "crop of 60 %": (
        "crop",
        _steps(crop=[{"crop": {"fraction": 0.6}}, {"resize": {"size": [SIDE, SIDE]}}]),
    ),
    "nearest": ("resize", _steps(resize={"resize": {"size": RESIZE, "method": "nearest", "antialias": False}})),
    "bilinear, no antialias": ("resize", _steps(resize={"resize": {"size": RESIZE, "antialias": False}})),
    "bicubic": ("resize", _steps(resize={"resize": {"size": RESIZE, "method": "bicubic"}})),
    "0 to 255": ("normalise", _steps(normalise={"cast": {"to": "float32"}})),
    "0 to 1": ("normalise", _steps(normalise={"rescale": {"factor": 1 / 255}})),
    "-1 to 1": ("normalise", _steps(normalise={"normalise": {"divide": 127.5, "mean": 1.0}})),
    "divided as integers": (
        "normalise",
        _steps(normalise=[{"rescale": {"element_type": "uint8"}}, {"normalise": {"mean": MEAN, "std": STD}}]),
    ),
    "HWC read as CHW": ("layout", _steps(layout={"reshape": {"shape": [3, SIDE, SIDE]}})),
}
"""Subject and steps by name."""


@dataclass(frozen=True)
class Effect:
    """The effect of one difference."""

    name: str
    subject: str
    accuracy: float
    """Share of images that are classified correctly."""

    agreement: float
    """Share of images with the same answer as under the right pipeline."""

    apart: float
    """Norm of the difference of the features from the right ones, over the norm of the right ones."""

    js: float | None
    """Jensen-Shannon divergence of the class probabilities, in natural logarithms; None if undefined."""


def rows(
    source: str = "torchvision:squeezenet1_1", seed: int = 0, names: Sequence[str] = (), data: Path | None = None
) -> list[Effect]:
    """Return the effect of each difference on the answers of a model.

    Args:
        source: a model of images, with weights from the seed.
        seed: seed of weights and images.
        names: names in `PITFALLS`; all if empty. The right pipeline always comes first.
        data: a folder of images by class, every third of which is used for testing; images from the seed if None.

    Raises:
        ManifestError: there is no such model or pitfall.
    """
    unknown = [name for name in names if name not in PITFALLS]
    if unknown:
        raise ManifestError(f"there is no pitfall {unknown[0]!r}; there are {', '.join(PITFALLS)}")
    split = None if data is None else _split_folder(data)  # refused before a model is built
    content = {"model": {"name": "pitfalls", "source": source, "seed": seed, "inputs": [{"shape": [3, SIDE, SIDE]}]}}
    predictor = Torch()
    handle = predictor.open(reading.of_plain(content).manifest, Path(), "")
    try:
        if len(handle.takes) != 1 or next(iter(handle.takes.values())).shape != (3, SIDE, SIDE):
            raise ManifestError(f"{source} does not take one image of {SIDE} x {SIDE}: name an image model")

        def features(files: Sequence[bytes], steps: Sequence[Any]) -> Array:
            preprocess = _preprocessor(steps)
            name = next(iter(handle.takes))
            batch = np.stack([preprocess(file) for file in files])
            parts = [batch[start : start + 16] for start in range(0, len(batch), 16)]
            answers = predictor.predict(handle, ({name: part} for part in parts))
            flattened = np.concatenate([answer.outputs[0].reshape(len(answer.outputs[0]), -1) for answer in answers])
            return np.asarray(flattened, np.float64)

        if split is None:
            split = *images(seed, range(TRAINING)), *images(seed, range(TRAINING, TRAINING + TESTING))
        train_files, train_classes, test_files, test_classes = split
        train_features = features(train_files, PITFALLS["right"][1])
        if explanation := constant({"its output": train_features}):
            raise ManifestError(f"{source} does not distinguish images: {explanation}")
        scorer = _readout(train_features, train_classes)
        reference = features(test_files, PITFALLS["right"][1])
        effects = []
        for name in ["right", *(pitfall for pitfall in names or PITFALLS if pitfall != "right")]:
            outputs = reference if name == "right" else features(test_files, PITFALLS[name][1])
            effects.append(_row(name, reference, outputs, scorer, test_classes))
    finally:
        predictor.close(handle)
    return effects


def images(seed: int, numbers: Sequence[int]) -> tuple[list[bytes], Array]:
    """Return JPEG files, one per class and number, and their classes."""
    parsed = reading.of_plain({"model": {"name": "x"}, "dataset": {"seed": seed, "height": 160, "width": 200}})
    dataset = parsed.manifest.dataset
    files, classes = [], []
    for class_number in range(CLASSES):
        for number in numbers:
            files.append(datasets.of_class(dataset, class_number, 1000 * class_number + number))
            classes.append(class_number)
    return files, np.array(classes)


MOST_IMAGES = 3_000
"""Maximum number of images used of a folder, the same number per class."""


def _split_folder(data: Path) -> tuple[list[bytes], Array, list[bytes], Array]:
    """Return the images and classes for the fit, and those for the test: every third image of each class."""
    content = {"model": {"name": "x"}, "dataset": {"source": f"folder:{data.resolve()}", "samples": MOST_IMAGES}}
    dataset = reading.of_plain(content).manifest.dataset
    samples = datasets.of(dataset, {}, Path(), may_leave_folder=True)
    if not samples.labels:
        raise ManifestError(f"{data}: no images by class: it needs a subfolder with images for each class")
    indices = {label: index for index, label in enumerate(sorted(set(samples.labels)))}
    subsets: tuple[list[int], list[int]] = [], []
    counts = dict.fromkeys(indices, 0)
    for number, label in enumerate(samples.labels):
        counts[label] += 1
        subsets[counts[label] % 3 == 0].append(number)
    small_classes = [samples.classes[index] for index, label in enumerate(indices) if counts[label] < 3]
    if small_classes:
        raise ManifestError(
            f"{data}: the class {small_classes[0]} has fewer than three images, so none is left for testing"
        )
    parts = [
        ([samples[number] for number in subset], np.array([indices[samples.labels[number]] for number in subset]))
        for subset in subsets
    ]
    return *parts[0], *parts[1]


def _preprocessor(steps: Sequence[Any]) -> Any:
    if not any(isinstance(step, dict) and step.get("op") == "gray3" for step in steps):
        return pipeline.preprocessor(_parse_steps(steps))
    position = next(index for index, step in enumerate(steps) if isinstance(step, dict) and step.get("op") == "gray3")
    head, tail = (
        pipeline.preprocessor(_parse_steps(steps[:position])),
        pipeline.preprocessor(_parse_steps(steps[position + 1 :])),
    )
    return lambda value: tail(np.repeat(head(value), 3, axis=-1))


def _parse_steps(steps: Sequence[Any]) -> list[Any]:
    parsed = reading.of_plain({"model": {"name": "x", "inputs": [{"steps": list(steps)}]}})
    return list(parsed.manifest.model.inputs[0].steps)


def _readout(features: Array, classes: Array) -> Any:
    """Return the best function from features to class scores: ridge regression on standardised features."""
    centre, spread = features.mean(axis=0), features.std(axis=0) + 1e-9
    inputs = (features - centre) / spread
    count = int(classes.max()) + 1
    targets = np.eye(count)[classes] - 1 / count
    gram = inputs @ inputs.T
    gram += RIDGE * np.trace(gram) / len(inputs) * np.eye(len(inputs))
    weights = inputs.T @ np.linalg.solve(gram, targets)
    return lambda values: (values - centre) / spread @ weights


def _row(name: str, reference: Array, features: Array, scorer: Any, classes: Array) -> Effect:
    scores, baseline = scorer(features), scorer(reference)
    answers = scores.argmax(axis=1)
    try:
        js: float | None = divergence.js(divergence.softmax(baseline), divergence.softmax(scores))
    except (XspError, ValueError):
        js = None
    return Effect(
        name, PITFALLS[name][0], float((answers == classes).mean()), float((answers == baseline.argmax(axis=1)).mean()),
        float(np.linalg.norm(features - reference) / np.linalg.norm(reference)), js,
    )  # fmt: skip
