"""Samples: generated from a seed with known statistics, or the images of a folder. Nothing is downloaded.

Sample number i depends only on the seed and on i, so any part of a data set can be generated anywhere.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsp.errors import ManifestError
from xsp.evaluate.manifest import Dataset
from xsp.evaluate.pipeline import Array
from xsp.scrub import plain

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

MOST_FILE_BYTES = 64 << 20

QUALITY = 90
"""JPEG quality of synthetic images, typical of cameras."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a model, for one sample."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int | None = None
    """Exclusive upper bound of integers; None if a sample's integers cannot be drawn, and `fixed` is used for all."""

    fixed: Array | None = None


@dataclass(frozen=True)
class Samples:
    """A data set: `samples[i]` is the bytes of a file, text, or arrays by input name."""

    count: int
    needs_steps: bool
    """Whether samples need steps to become inputs of the model."""

    make: Callable[[int], Any]
    checksum: str = ""
    """SHA-256 of the files of a folder."""

    labels: tuple[int, ...] = ()
    """The class of each sample, if known."""

    classes: tuple[str, ...] = ()
    """Names of the classes."""

    names: tuple[str, ...] = ()
    """The file of each sample, relative to the folder; empty for samples that are made."""

    notes: tuple[str, ...] = ()
    """What the manifest asks for and the data set does not have, as sentences."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.make(number % self.count)

    def name(self, number: int) -> str:
        """Return the name of a sample: its file, or its number."""
        return plain(self.names[number % self.count]) if self.names else f"sample {number % self.count}"


def of(dataset: Dataset, inputs: Mapping[str, InputSpec], folder: Path, may_leave_folder: bool) -> Samples:
    """Return the data set that a manifest names.

    Args:
        dataset: the manifest's section.
        inputs: inputs of the model, for samples that need no steps.
        folder: base of relative paths.
        may_leave_folder: whether a path may lead out of the folder; False for a manifest from a network.

    Raises:
        ManifestError: there is no such data set.
    """
    kind, _, path = dataset.source.partition(":")
    if kind == "folder":
        return _from_folder(dataset, path, folder, may_leave_folder)
    if dataset.source == "synthetic":
        return Samples(dataset.samples, False, lambda number: _tensors(dataset, inputs, number))
    if dataset.source == "synthetic:images":
        return Samples(dataset.samples, True, lambda number: image(dataset, number))
    if dataset.source == "synthetic:classes":
        labels = tuple(number % dataset.classes for number in range(dataset.samples))
        names = tuple(map(str, range(dataset.classes)))
        return Samples(len(labels), True, lambda number: of_class(dataset, labels[number], number), "", labels, names)
    if dataset.source == "synthetic:text":
        return Samples(dataset.samples, True, lambda number: text(dataset.seed, number))
    raise ManifestError(
        f"dataset.source: there is no {dataset.source!r}; there are synthetic, synthetic:images, "
        "synthetic:classes, synthetic:text and folder:path"
    )


def image(dataset: Dataset, number: int) -> bytes:
    """Return a JPEG file of smooth noise (with a spectrum that falls off like that of photographs), in colour.

    Its channels have the data set's mean and standard deviation, as values from 0 to 1, before they are rounded and
    clipped to that range.
    """
    return _jpeg(noise(dataset, number))


def of_class(dataset: Dataset, class_number: int, number: int) -> bytes:
    """Return a JPEG file that blends noise of its own and noise that all images of its class share, in equal parts."""
    return _jpeg(0.5 * noise(dataset, 1_000_000 + class_number) + 0.5 * noise(dataset, number))


def _jpeg(pixels: Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((pixels * 255).round().astype(np.uint8)).save(file, "JPEG", quality=QUALITY, subsampling=2)
    return file.getvalue()


def noise(dataset: Dataset, number: int) -> Array:
    """Return the pixels of a noise image: HWC, from 0 to 1."""
    rng = np.random.default_rng([dataset.seed, number])
    height, width = dataset.height, dataset.width
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falloff = 1 / np.maximum(np.hypot(rows, columns), 1 / max(height, width))
    pixels = np.empty((height, width, 3))
    for channel in range(3):
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) * falloff
        plane = np.fft.irfft2(spectrum, (height, width))
        plane = (plane - plane.mean()) / (plane.std() or 1.0)
        pixels[..., channel] = plane * _channel_value(dataset.std, channel) + _channel_value(dataset.mean, channel)
    return np.asarray(pixels.clip(0, 1))


def text(seed: int, number: int) -> str:
    """Return 16 to 128 words with Zipf-distributed frequencies."""
    rng = np.random.default_rng([seed, number])
    return " ".join(f"w{word}" for word in rng.zipf(1.3, int(rng.integers(16, 129))) % 30_000)


def _tensors(dataset: Dataset, inputs: Mapping[str, InputSpec], number: int) -> dict[str, Array]:
    rng = np.random.default_rng([dataset.seed, number])
    return {name: _tensor(rng, spec) for name, spec in inputs.items()}


def _tensor(rng: np.random.Generator, spec: InputSpec) -> Array:
    if spec.fixed is not None:
        return spec.fixed
    if spec.high is not None:
        return rng.integers(0, max(1, spec.high), spec.shape).astype(spec.dtype)
    return rng.standard_normal(spec.shape).astype(spec.dtype)


def _channel_value(values: list[float], channel: int) -> float:
    return values[channel % len(values)]


def _from_folder(dataset: Dataset, path: str, folder: Path, may_leave_folder: bool) -> Samples:
    root = (folder / path).expanduser().resolve()
    if not may_leave_folder and not root.is_relative_to(folder.resolve()):
        raise ManifestError(f"dataset.source: {path!r} leads out of the folder of the manifest")
    if not root.is_dir():
        raise ManifestError(f"dataset.source: there is no folder {path!r}")
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in IMAGES and file.is_file())
    if not files:
        raise ManifestError(f"dataset.source: no image in {path!r}; images end in {', '.join(IMAGES)}")
    class_numbers = _class_numbers(files, root)
    if class_numbers:
        files = _interleaved(files)
    shortage = () if len(files) >= dataset.samples else (
        f"dataset.samples: {dataset.samples:,} are asked for, and {path!r} has {len(files):,} images: there are "
        f"{len(files):,} samples, which requests use in turn",
    )  # fmt: skip
    files = files[: dataset.samples]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode("utf-8", "surrogateescape") + b"\0")
        digest.update(hashlib.sha256(_file_bytes(file)).digest())
    checksum = f"sha256:{digest.hexdigest()}"
    if dataset.checksum and dataset.checksum != checksum:
        raise ManifestError(f"dataset.checksum: the folder has {checksum}, which differs from the manifest")
    return Samples(
        len(files), True, lambda number: _file_bytes(files[number]), checksum,
        tuple(class_numbers[file.parent.name] for file in files) if class_numbers else (),
        tuple(sorted(class_numbers, key=class_numbers.__getitem__)),
        tuple(str(file.relative_to(root)) for file in files), shortage,
    )  # fmt: skip


def _class_numbers(files: Sequence[Path], root: Path) -> dict[str, int]:
    """Return the class of each folder, or an empty mapping if an image is not in a folder directly under the root.

    If all folder names are whole numbers, these are the classes; else classes are counted from 0 in the order of the
    names, as `torchvision.datasets.ImageFolder` does. A single folder, or images elsewhere, define no classes.
    """
    if any(file.parent.parent != root for file in files):
        return {}
    names = sorted({file.parent.name for file in files})
    if len(names) < 2:
        return {}
    is_numbered = all(name.isascii() and name.isdecimal() for name in names)
    classes = {name: int(name) if is_numbered else number for number, name in enumerate(names)}
    return classes if len(set(classes.values())) == len(classes) else {}


def _interleaved(files: Sequence[Path]) -> list[Path]:
    """Return the files in turn, one per folder, so that the first few cover all classes."""
    counts: dict[Path, int] = {}
    keys = {}
    for file in files:
        counts[file.parent] = counts.get(file.parent, 0) + 1
        keys[file] = counts[file.parent], file
    return sorted(files, key=keys.__getitem__)


def _file_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ManifestError(f"{path.name}: larger than {MOST_FILE_BYTES >> 20} MiB, the limit for an image")
        return path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path.name}: cannot be read ({error.strerror})") from error
