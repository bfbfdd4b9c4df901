"""Optional parts of a result besides the figures: a trace with advice on it, and a bound.

They are written after the requests, so no latency includes recording. If one fails, the result gets a note.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsp.errors import ManifestError, XspError
from xsp.evaluate import predictors, results
from xsp.evaluate.agents import Options, Progress
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.predictors import Batch, Predictor

if TYPE_CHECKING:
    from xsp.bound import Bound

TRACED_STEPS = 12

MOST_ADVICE = 10


def write(
    result_dir: Path, manifest: Manifest, folder: Path, predictor: Predictor, handle: Any, batch: Batch,
    options: Options, progress: Progress,
) -> list[str]:  # fmt: skip
    """Write a trace, advice and a bound to the folder of a result, and return notes on parts that are missing.

    Args:
        result_dir: folder of the result.
        manifest: manifest of the result.
        folder: base of relative paths in the manifest.
        predictor: predictor of the manifest.
        handle: its open model.
        batch: input of the model.
        options: whether a trace and a bound are requested.
        progress: see `Progress`.
    """
    notes = []
    if options.levels:
        try:
            _trace(result_dir, manifest, predictor, handle, batch, options.levels, progress)
        except XspError as error:
            notes.append(f"no trace: {error}")
        else:
            notes += _advice(result_dir)
    if options.needs_bound:
        progress("bound", 0, 1)
        try:
            notes += _bound(result_dir, manifest, folder, handle, batch)
        except XspError as error:
            notes.append(f"no bound: {error}")
    return notes


def _trace(
    result_dir: Path,
    manifest: Manifest,
    predictor: Predictor,
    handle: Any,
    batch: Batch,
    levels: str,
    progress: Progress,
) -> None:
    from xsp.record.session import profile
    from xsp.record.settings import Settings

    size = len(next(iter(batch.values())))
    session = profile.of(
        Settings(
            name=manifest.title, levels=levels, out=result_dir / results.RUN, batch_size=size, seed=manifest.model.seed,
            spread=False, needs_run=True,
        )
    )  # fmt: skip
    total = session.schedule.steps_for(TRACED_STEPS)
    with session:
        for number in range(total):
            progress("trace", number, total)
            with session.step():
                predictors.answer(predictor, handle, batch)


def _advice(result_dir: Path) -> list[str]:
    """Write the advice that follows from the trace alone, best first."""
    from xsp import advise
    from xsp.ingest.load import load

    try:
        report = advise.of(load(result_dir / results.RUN), max_needs=advise.Needs.TRACE)
    except XspError as error:
        return [f"no advice: {error}"]
    entries = [
        {
            "question": advice.question, "what": advice.what, "do": advice.do, "at_most": advice.at_most,
            "gain_ms": [advice.gain.low, advice.gain.value, advice.gain.high],
            "of_step_percent": advice.of_step_percent, "changes_numbers": advice.changes_numbers,
        }
        for advice in report.advice[:MOST_ADVICE]
    ]  # fmt: skip
    content = {"advice": entries, "asked": report.answered, "unanswered": dict(report.unanswered)}
    (result_dir / results.ADVICE).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return []


def _bound(result_dir: Path, manifest: Manifest, folder: Path, handle: Any, batch: Batch) -> list[str]:
    """Write the bound of a batch, compared with the trace if there is one, and return notes on it."""
    from xsp.bound import text
    from xsp.bound.ladder import Rung

    model, notes, trace = manifest.model, [], result_dir / results.RUN
    if model.command:
        raise ManifestError("a command has no graph")
    try:
        bound = _bound_of(manifest, folder, handle, batch, trace if trace.is_dir() else None)
    except XspError as error:
        if not trace.is_dir():
            raise
        bound = _bound_of(manifest, folder, handle, batch, None)
        notes.append(f"the bound is not compared with the trace: {error}")
    if bound.ratio is None:
        missing_rung = Rung.BEST if bound.rungs[Rung.BEST.value].sequential is None else Rung.MEASURED
        reason = bound.absent.get(missing_rung.value) or (
            "there is no trace: --trace M/L/G" if missing_rung is Rung.MEASURED else ""
        )
        notes.append(f"the bound has no ratio of best to measured, because {missing_rung.value} is missing: {reason}")
    (result_dir / results.BOUND).write_text(
        json.dumps(text.as_json(bound), indent=1, allow_nan=False), encoding="utf-8"
    )
    return notes


def _bound_of(manifest: Manifest, folder: Path, handle: Any, batch: Batch, trace: Path | None) -> Bound:
    from xsp.bound import sources

    threads, size = manifest.software.threads, len(next(iter(batch.values())))
    source = manifest.model.parsed_source
    if source.is_program:
        options: dict[str, Any] = {"batch": size} if source.source.endswith(".onnx") else {}
        return sources.of(folder / source.source, threads=threads, trace=trace, **options)
    # the module with its arguments instead of its name, so that shape, length and type are those of the requests
    args, kwargs = predictors.arguments(handle, batch)
    return sources.of(handle.module, *args, threads=threads, trace=trace, batch=size, kwargs=kwargs)
