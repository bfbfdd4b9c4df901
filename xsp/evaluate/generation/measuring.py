"""A manifest's load of generated text, on its model in this process or on its endpoint.

Order: open, generate for the first prompts alone (also the warm-up), requests by the schedule. So the kept outputs do
not depend on the load.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xsp import causal, models, table
from xsp.device.contract import Device
from xsp.errors import ManifestError, ModelError, PhaseError, XspError, first_line
from xsp.evaluate import hardware, predictors
from xsp.evaluate.agents import Options, Progress
from xsp.evaluate.generation import driving, endpoint, prompts
from xsp.evaluate.generation.batching import CausalSequences, Sequences
from xsp.evaluate.generation.endpoint import Endpoint
from xsp.evaluate.generation.prompts import Prompts
from xsp.evaluate.generation.timing import Generated
from xsp.evaluate.load import Schedule
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array
from xsp.plugins import importing

MOST_OUTPUTS = 4
"""Number of requests whose generated text is kept."""

TOKENS = "tokens.parquet"


@dataclass(frozen=True)
class Generator:
    """An open model or endpoint."""

    load: Callable[[Schedule, Progress], Generated]
    """Applies a schedule to it."""

    alone: Callable[[int], dict[str, Array]]
    """Returns what it generates for the first prompts, one at a time: token numbers, or an endpoint's text."""

    first: Callable[[], object]
    """Generates for the longest request and, if several run together, for one beside it."""

    prompts: Prompts
    notes: tuple[str, ...]
    open_ns: int


@contextlib.contextmanager
def opened(manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Iterator[Generator]:
    """Draw the prompts, and open the model or the endpoint; it is closed with the block.

    Raises:
        ManifestError: it cannot be opened, or generates no text.
    """
    scenario = manifest.scenario
    assert scenario.generation is not None
    count = len(scenario.times_s) if scenario.kind == "replay" else scenario.requests
    drawn = prompts.draw(scenario.generation, count, scenario.seed)
    begin = time.perf_counter_ns()
    progress("opening", 0, 1)
    if manifest.model.endpoint:
        server = Endpoint(manifest.model.endpoint, manifest.model.name)
        with contextlib.closing(server):
            yield _of_endpoint(manifest, server, drawn, begin)
        return
    with predictors.threads(manifest.software.threads):
        predictors.check_files(manifest, folder, options.trusted)
        yield _of_model(manifest, folder, options, drawn, begin)


def _of_endpoint(manifest: Manifest, server: Endpoint, drawn: Prompts, begin: int) -> Generator:
    users = manifest.scenario.streams

    def load(schedule: Schedule, progress: Progress) -> Generated:
        return endpoint.drive_endpoint(schedule, drawn, server, users=users, progress=_labelled(progress, manifest))

    def alone(count: int) -> dict[str, Array]:
        return {f"output0-{number:04d}": np.array([text]) for number, text in
                enumerate(endpoint.texts(server, drawn, count))}  # fmt: skip

    return Generator(load, alone, lambda: alone(1), drawn, (), time.perf_counter_ns() - begin)


def _of_model(manifest: Manifest, folder: Path, options: Options, drawn: Prompts, begin: int) -> Generator:
    scenario = manifest.scenario
    assert scenario.generation is not None
    slots = scenario.generation.slots
    device = hardware.usable(manifest.hardware)
    with hardware.opening(device):
        sequences, notes = _build(manifest, folder, options, drawn, device)

    def load(schedule: Schedule, progress: Progress) -> Generated:
        with _named_errors(device):
            return driving.drive_together(
                schedule, drawn, sequences, slots=slots, users=scenario.streams, progress=_labelled(progress, manifest)
            )

    def generate(number: int) -> list[int]:
        tokens = [sequences.begin(number, drawn.tokens[number])]
        while len(tokens) < drawn.output_counts[number]:
            tokens.append(sequences.step()[number])
        sequences.end([number])
        return tokens

    def alone(count: int) -> dict[str, Array]:
        with _named_errors(device):
            return {
                f"output0-{number:04d}": np.array(generate(number), np.int64)
                for number in range(min(count, len(drawn)))
            }

    def first() -> None:
        longest = int((drawn.counts + drawn.output_counts).argmax())
        with _named_errors(device):
            generate(longest)
            if slots > 1 and len(drawn) > 1:
                both = longest, (longest + 1) % len(drawn)
                for number in both:
                    sequences.begin(number, drawn.tokens[number])
                sequences.step()
                sequences.end(both)

    return Generator(load, alone, first, drawn, notes, time.perf_counter_ns() - begin)


def _build(
    manifest: Manifest, folder: Path, options: Options, drawn: Prompts, on: Device
) -> tuple[Sequences, tuple[str, ...]]:
    """Return the manifest's language model on its device, with notes on it."""
    predictors.of(manifest, options.trusted)  # refuses what is not trusted
    with importing(ManifestError, "PyTorch is not installed: pip install 'xsp[models]'"):
        import torch
    model, notes = manifest.model, hardware.processor_note(manifest.hardware)
    device = on.torch_name
    source, settings = predictors.source_of(manifest, folder, device)
    try:
        built = models.build(source, replace(settings, prefill=drawn.most_tokens))
    except PhaseError as error:  # its message names options of the command line, which a manifest does not have
        least = ".".join(map(str, causal.MIN_VERSION))
        raise ManifestError(
            f"model.source: {source} is not a causal language model of transformers (from {least}) with a cache of "
            "tokens"
        ) from error
    except ModelError as error:
        raise ManifestError(f"model.source: {error}") from error
    if not isinstance(built, models.ModelCall):
        raise ManifestError(f"model.source: {source} is a function that runs a step, not a model")
    module = built.model.eval()
    if not model.parsed_source.is_python:
        names = predictors.draw_zero_weights(torch, module, model.seed)
        notes += [predictors.drawn_note(names)] if names else []
    vocabulary = module.get_input_embeddings().num_embeddings
    most = max(int(tokens.max()) for tokens in drawn.tokens)
    if most >= vocabulary:
        raise ManifestError(
            f"scenario.generation.vocabulary: the model has {vocabulary:,} tokens; a prompt has {most:,}"
        )
    return CausalSequences(module.to(device, getattr(torch, model.precision)), device), tuple(notes)


@contextlib.contextmanager
def _named_errors(device: Device) -> Iterator[None]:
    """Turn what a model raises on a device into an error of the manifest, with what to do if it is the device's."""
    try:
        yield
    except XspError:
        raise
    except Exception as error:
        remedy = hardware.remedy(device, error, "fewer slots, or shorter prompts and outputs")
        reason = f"raises {type(error).__name__} when it generates ({first_line(error)})"
        raise ManifestError(f"model: {reason}{remedy}") from error


def _labelled(progress: Progress, manifest: Manifest) -> Callable[[int, int], object]:
    return lambda done, of: progress(manifest.title, done, of)


def write_tokens(path: Path, generated: Generated) -> None:
    """Write a row for each arrival of tokens: the request's number, the arrival's number, and its time."""
    counts = [len(times) for times in generated.token_ns]
    con = table.connect()
    try:
        con.register("tokens", {
            "request": np.repeat(np.arange(len(counts)), counts),
            "number": np.concatenate([np.arange(count) for count in counts]),
            "ns": np.concatenate(generated.token_ns),
        })  # fmt: skip
        con.execute(f"COPY (SELECT * FROM tokens) TO {table.path_literal(path)} (FORMAT parquet)")
    finally:
        con.close()
