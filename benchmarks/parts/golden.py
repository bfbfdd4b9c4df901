"""Benanza's published totals of layers on eight GPUs, and the available models that correspond to the published ones.

A row is complete if each of its layers has a figure. A model corresponds to a published one if its multiply-adds equal
the published number within `TOLERANCE`; `tests/bound/test_golden_totals.py` checks this.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from xsp.bound.latencies import Latency

TOLERANCE = 0.06

MODELS: Mapping[str, str] = {
    "BVLC_AlexNet": "light_bvlc_alexnet.onnx", "DenseNet-121": "light_densenet121.onnx",
    "Inception-v1": "light_inception_v1.onnx", "Inception-v2": "light_inception_v2.onnx",
    "ResNet018-v1": "torchvision:resnet18", "ResNet034-v1": "torchvision:resnet34",
    "ResNet050-v1": "light_resnet50.onnx", "ResNet101-v1": "torchvision:resnet101",
    "ResNet152-v1": "torchvision:resnet152", "ResNet018-v2": "timm:resnetv2_18", "ResNet034-v2": "timm:resnetv2_34",
    "ResNet050-v2": "timm:resnetv2_50", "ResNet101-v2": "timm:resnetv2_101", "ResNet152-v2": "timm:resnetv2_152",
    "Shufflenet": "light_shufflenet.onnx", "Squeezenet-v1.1": "torchvision:squeezenet1_1",
    "VGG16": "torchvision:vgg16", "VGG16-BN": "torchvision:vgg16_bn", "VGG19": "light_vgg19.onnx",
    "VGG19-BN": "torchvision:vgg19_bn", "Zfnet512": "light_zfnet512.onnx",
}  # fmt: skip
"""Published name → the name of a model, or a file of the package `onnx`.

MobileNet-v2 is missing: the published one has 437 M multiply-adds, torchvision's has 301 M.
"""


def source(name: str) -> str | Path | None:
    """Return the argument of `xsp.graph.of` for a published model; None if it needs `onnx`, which is not installed."""
    model = MODELS[name]
    if not model.endswith(".onnx"):
        return model
    package = importlib.util.find_spec("onnx")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "backend" / "test" / "data" / "light" / model


def totals(path: Path) -> list[Latency]:
    """Return the complete sequential totals of the models in `MODELS`, with their published names."""
    with path.open(encoding="utf-8") as file:
        return [
            Latency(row["model"], float(row["sequential_ms"]) * 1e6, row["gpu"], int(row["batch"]))
            for row in csv.DictReader(file)
            if int(row["without_figure"]) == 0 and row["model"] in MODELS
        ]


def multiply_adds(path: Path) -> dict[str, float]:
    """Return the published multiply-adds by the models' names as `normalised` normalises them."""
    with path.open(encoding="utf-8") as file:
        return {normalised(row["model"]): _number(row["macs"]) for row in csv.DictReader(file)}


def normalised(name: str) -> str:
    """Return a name in lower case, without punctuation and leading zeros, which the two tables spell differently."""
    alphanumeric = "".join(letter for letter in name.lower() if letter.isalnum())
    return alphanumeric.replace("resnet0", "resnet")


def _number(text: str) -> float:
    return float(text[:-1]) * {"K": 1e3, "M": 1e6, "G": 1e9}[text[-1]]
