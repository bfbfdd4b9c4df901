"""Which manifests are accepted from a network: models by name with weights from a seed, on synthetic data.

Anyone who can reach the server can send any manifest. So a manifest may not run code, read a file, set a variable of a
process, or request more memory than an evaluation needs. Refused manifests can be run from the command line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xsp.errors import ManifestError
from xsp.evaluate import agents, dialects, reading, yamltext
from xsp.evaluate.generation.prompts import longest
from xsp.evaluate.manifest import Dataset, Manifest, Step
from xsp.evaluate.pipeline import MOST_PIXELS as MOST_IMAGE_PIXELS
from xsp.evaluate.reading import LoadedManifest
from xsp.modelname import LIBRARIES

DATASETS = ("synthetic", "synthetic:images", "synthetic:classes", "synthetic:text")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,199}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,99}")
_VALUE = re.compile(r"-?\d{1,18}(\.\d{1,18})?|[a-z][a-z0-9_]{0,39}", re.ASCII)
_FOREIGN = re.compile(r"pretrained|backbone|checkpoint|(?<!drop_)path|file|url|repo|revision|cache_dir|auto_map")
"""Options that may name weights, or something else beside the architecture."""

MOST_REQUESTS = 100_000
MOST_BATCH = 1_024
MOST_SAMPLES = 10_000
MOST_PIXELS = 4_096 * 4_096
MOST_SIDE = 4_096
MOST_SEQUENCE = 8_192
MOST_DIGITS = 18
MOST_VALUES = 1 << 30
"""Maximum number of values of all samples, and of a batch: 4 GiB of floats."""


def read(text: str) -> LoadedManifest:
    """Return the manifest in a text, of any dialect; sections cannot be file names.

    Raises:
        ManifestError: it is not a manifest.
    """
    parsed = yamltext.read(text, "manifest")
    if not isinstance(parsed.content, dict):
        raise ManifestError("manifest:1: a manifest must be a mapping of fields")
    dialect = dialects.detect(parsed.content)
    return reading.of_plain(dialects.translate(dict(parsed.content), dialect), text=parsed, dialect=dialect)


def of_json(content: Any) -> LoadedManifest:
    """Return the manifest in plain data, within the limits of one in YAML.

    Raises:
        ManifestError: it is not a manifest.
    """
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ManifestError("the manifest is nested too deeply, or has numbers that are not finite") from error
    return read(text)


def objections(manifest: Manifest) -> list[str]:
    """Return the reasons, as sentences, not to accept a manifest from a network; empty if it is accepted."""
    return [*_source_objections(manifest), *_size_objections(manifest)]


def _source_objections(manifest: Manifest) -> Iterator[str]:
    model, source = manifest.model, manifest.model.parsed_source
    yield from agents.trust_objections(manifest)
    is_file = source.file is not None or source.is_program_in_library
    is_name = source.source in LIBRARIES and not is_file and _NAME.fullmatch(source.name)
    if not model.command and not model.endpoint and not is_name:
        names = ", ".join(f"{library}:NAME" for library in LIBRARIES)
        yield f"model.source: here it must be one of {names}; no file is read"
    for name, value in source.options:
        if not _OPTION.fullmatch(name) or _FOREIGN.search(name) or not _VALUE.fullmatch(value):
            yield f"model.source: the option {name[:80]!r} is not a number, a switch or a word of the architecture"
    if model.files:
        yield "model.files: no file is read"
    if manifest.dataset.source not in DATASETS:
        yield f"dataset.source: here it must be one of {', '.join(DATASETS)}; no file is read"


def _size_objections(manifest: Manifest) -> Iterator[str]:
    model, data, scenario = manifest.model, manifest.dataset, manifest.scenario
    largest = max([data.height * data.width * 3, *(math.prod(map(abs, spec.shape)) for spec in model.inputs)])
    largest_resized = max((_resized(step, data) for spec in model.inputs for step in spec.steps), default=0)
    inputs_per_request = max(*scenario.sizes, scenario.streams)
    lengths = [] if scenario.generation is None else [
        (f"scenario.generation.{name}", longest(part), MOST_SEQUENCE)
        for name, part in (("prompt", scenario.generation.prompt), ("output", scenario.generation.output))
    ]  # fmt: skip
    for subject, value, limit in (
        *lengths,
        ("dataset.samples: their values", data.samples * largest, MOST_VALUES),
        ("scenario: the values of a batch", inputs_per_request * max(largest, largest_resized), MOST_VALUES),
        ("model.sequence", model.sequence, MOST_SEQUENCE),
        ("dataset.samples", data.samples, MOST_SAMPLES),
        ("dataset.classes", data.classes, MOST_SAMPLES),
        ("dataset.height and width", data.height * data.width, MOST_PIXELS),
        ("scenario: requests and warmup", scenario.requests + scenario.warmup, MOST_REQUESTS),
        ("scenario: a batch", max(scenario.sizes), MOST_BATCH),
        ("scenario.streams", scenario.streams, MOST_BATCH),
        ("scenario.generation.slots", scenario.generation.slots if scenario.generation else 1, MOST_BATCH),
        *(("a shape of model.inputs", math.prod(map(abs, spec.shape)), MOST_PIXELS) for spec in model.inputs),
        *(
            ("a step", max(map(abs, _numbers(step.options)), default=0), MOST_SIDE)
            for spec in [*model.inputs, *model.outputs]
            for step in spec.steps
        ),
    ):
        if value > limit:
            amount = f"{value:,}" if value < 10**MOST_DIGITS else f"a number of more than {MOST_DIGITS} digits"
            yield f"{subject}: {amount} is above the limit, {limit:,}"


def _resized(step: Step, data: Dataset) -> int:
    """Return an upper bound of the number of values of an image after a step."""
    size = step.options.get("size", step.options.get("max_dimension"))
    sides = [min(abs(side), MOST_IMAGE_PIXELS) for side in _numbers(size)][:2] if step.op == "resize" else []
    if len(sides) == 1:  # the shorter side, or the longer one
        sides.append(sides[0] * max(data.height, data.width) / min(data.height, data.width))
    return 3 * math.ceil(min(math.prod(sides), MOST_IMAGE_PIXELS)) if sides else 0


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for element in value.values():
            yield from _numbers(element)
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, (int, float)):
        yield value
