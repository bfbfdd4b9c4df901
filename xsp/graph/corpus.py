"""Graphs and measures of many models: each is captured in a separate process, with a time limit.

The folder contains `measures.jsonl`, with a line for each model that was tried, and a graph for each model that was
captured. A model that is in the file already is not tried again, so an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from xsp import processes
from xsp.errors import GraphError, XspError

FILE = "measures.jsonl"
LIMIT_S = 60.0
"""Seconds for one model; the first model of a process may take twice as long, because it imports its library."""

MODELS_PER_PROCESS = 50

_CODE = processes.call_code("xsp.graph.corpus", "work")

Progress = Callable[[str, int, int], None]


def collect(
    specs: Sequence[str],
    out: Path,
    *,
    batch: int = 1,
    train: bool = False,
    limit_s: float = LIMIT_S,
    progress: Progress = lambda name, done, total: None,
) -> list[dict[str, Any]]:
    """Capture models, and return a row for each, in their order.

    Args:
        specs: names as `xsp.models` reads them.
        out: folder for `measures.jsonl` and the graphs; created if necessary.
        batch: samples in a step.
        train: training steps instead of predictions.
        limit_s: seconds per model.
        progress: callback that is given the name of a model, the number of models done, and the total.

    Returns:
        Rows with `spec`, and either the measures of the graph or `error`, the reason in one line.

    Raises:
        GraphError: the folder cannot be written, or holds models of another batch or mode.
    """
    settings = {"batch": batch, "train": train}
    try:
        out.mkdir(parents=True, exist_ok=True)
        rows_by_spec = {row["spec"]: row for row in rows(out)}
        conflicting = [row for row in rows_by_spec.values() if row.get("asked") != settings]
        if conflicting:
            raise GraphError(f"{out}: has models of other settings ({conflicting[0].get('asked')}); give another --out")
        with (out / FILE).open("a", encoding="utf-8") as file, _Worker(limit_s) as worker:
            # begin a new line after a truncated one
            content = (out / FILE).read_bytes()
            if content and not content.endswith(b"\n"):
                file.write("\n")
            for done, spec in enumerate(specs):
                progress(spec, done, len(specs))
                if spec not in rows_by_spec:
                    rows_by_spec[spec] = {"spec": spec, "asked": settings, **worker.ask(spec, settings, out)}
                    file.write(json.dumps(rows_by_spec[spec]) + "\n")
                    file.flush()
            progress("done", len(specs), len(specs))
    except OSError as error:
        raise GraphError(f"{out}: the corpus cannot be written ({error.strerror or error})") from error
    return [rows_by_spec[spec] for spec in specs]


def rows(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a corpus; a truncated line is left out, so that its model is tried again."""
    path = out / FILE
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("spec"), str):
                yield row


def graph_path(out: Path, spec: str) -> Path:
    """Return the path of a model's graph in a corpus."""
    source, _, name = (
        "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in part)
        for part in spec.partition(":")
    )
    return out / source.lstrip(".") / f"{name}.json"


class _Worker:
    """A process that captures models one after another, and is replaced when it crashes or takes too long."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._process: processes.WorkerProcess | None = None
        self._requests = 0

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, spec: str, settings: dict[str, Any], out: Path) -> dict[str, Any]:
        """Return the measures of a model, or `error`; in both cases with `seconds`.

        Raises:
            GraphError: the graph cannot be written.
        """
        if self._requests >= MODELS_PER_PROCESS:
            self._end()
        if self._process is None:
            self._process, self._requests = processes.WorkerProcess(_CODE), 0
        limit = self.limit_s * (1 if self._requests else 2)
        self._requests += 1
        path = graph_path(out.resolve(), spec)
        path.parent.mkdir(exist_ok=True)
        start = time.monotonic()
        self._process.ask({"spec": spec, "path": str(path), **settings})
        answer = self._process.answer(start + limit)
        if answer:
            result = json.loads(answer)
            if "not_saved" in result:  # no statement about the model, which is tried again
                raise GraphError(result["not_saved"])
            return {"seconds": round(time.monotonic() - start, 3), **result}
        timed_out = time.monotonic() >= start + limit
        code = self._end(patience_s=0.0 if timed_out else 1.0)
        ended = f"ended the process that captured it ({processes.exit_description(code or 0)})"
        reason = f"took more than {limit:.0f} s" if timed_out else ended
        return {"seconds": round(time.monotonic() - start, 3), "error": reason}

    def _end(self, patience_s: float = 0.0) -> int | None:
        process, self._process = self._process, None
        return None if process is None else process.end(patience_s)


def work(answers: int) -> None:
    """Capture the models named on stdin, one per line, and write a line for each to the descriptor `answers`."""
    import warnings

    from xsp.graph.measures import as_json
    from xsp.graph.sources import of

    warnings.simplefilter("ignore")
    with processes.Questions(answers) as questions:
        for request in questions:
            answer: dict[str, Any]
            try:
                graph = of(request["spec"], batch=request["batch"], train=request["train"])
                answer = as_json(graph)
                try:
                    graph.save(request["path"])
                except GraphError as error:
                    answer = {"not_saved": str(error)}
            except XspError as error:
                answer = {"error": str(error)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            questions.answer(answer)
