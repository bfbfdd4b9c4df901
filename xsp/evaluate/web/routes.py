"""Routes of the REST interface and of the pages."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from xsp.errors import ManifestError, UsageError, XspError
from xsp.evaluate import manifest, pipeline, results, standings, tables, yamltext
from xsp.evaluate.agents import Agent, Options, match_agents
from xsp.evaluate.reading import LoadedManifest
from xsp.evaluate.results import Result
from xsp.evaluate.web import policy, shelf
from xsp.evaluate.web.modelsize import ModelSizes
from xsp.evaluate.web.queue import ENDED_STATES, Queue, QueuedEvaluation
from xsp.evaluate.web.shelf import Shelf
from xsp.levels import parse_levels

MOST_COMPARED = 16
MOST_ROWS = 1_000
MOST_REQUESTS = 10_000
MOST_WATCHERS = 16
"""Maximum number of concurrent progress streams."""

MOST_REPORTS = 4
"""Number of cached trace pages."""

POLL_S = 0.1
KEEP_ALIVE_S = 10.0

REPORT_ASSETS = ("echarts.min.js", "words.js", "charts.js", "sections.js", "report.css")
"""Assets shared with the report of a run."""

EVALUATE_ASSETS = ("web.js", "form.js", "results.js", "web.css")

NOT_OPENED = "the model was not opened: an evaluation or another check runs, or its agent is on another machine"

PAGES = ("/", "/new", "/jobs", "/jobs/{name}", "/evaluations/{name}", "/compare")

_EXTRA_FILES = {"bound": results.BOUND, "advice": results.ADVICE}

_MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

Name = Annotated[str, Field(min_length=1, max_length=64)]


class EvaluationRequest(BaseModel):
    """A requested evaluation: a manifest as plain data or as YAML, with options."""

    manifest: dict[str, Any] | None = None
    yaml: str | None = None
    trace: str = ""
    """Levels, `M`, `M/L` or `M/L/G`; none if empty."""

    bound: bool = False
    agent: str = ""
    """Name of the agent; the first that satisfies the manifest, if empty."""

    opens: bool = True
    """Whether a check does what precedes the load, which takes seconds; without it, only fields are checked."""


def result_routes(cache: Shelf) -> APIRouter:
    """Return the routes of results: lists, their content, reports of traces."""
    router = APIRouter()
    reports = _Reports()

    @router.get("/api/evaluations", tags=["results"], summary="Results, newest first")
    def evaluations(
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
        task: Annotated[str | None, Query(max_length=200)] = None,
        text: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        stored, damaged = cache.all_results()
        rows = [shelf.summary(result) for result in reversed(stored)]
        needle = text.lower()
        matches = [
            row
            for row in rows
            if (task is None or row["task"] == task)
            and (
                not needle or any(needle in str(row[column]).lower() for column in ("result", "name", "model", "kind"))
            )
        ]
        tasks = sorted({str(row["task"]) for row in rows if row["task"]})
        page = matches[offset : offset + limit]
        return json_response(
            {"total": len(matches), "offset": offset, "evaluations": page, "tasks": tasks, "damaged": damaged}
        )

    @router.get("/api/evaluations/{name}", tags=["results"], summary="One result")
    def evaluation(name: Name) -> Response:
        result = _find_result(cache, name)
        extras = {name: result.has(file) for name, file in _EXTRA_FILES.items()}
        notes = [without_paths(note, cache.store) for note in result.content.get("notes", ())]
        derived = {"notes": notes, "result": result.name, "trace": result.run is not None, **extras}
        return json_response({**result.content, **derived})

    @router.get(
        "/api/evaluations/{name}/requests", tags=["results"], summary="Requests of a batch size, and percentiles"
    )
    def requests(
        name: Name,
        batch: Annotated[int | None, Query(ge=1)] = None,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_REQUESTS)] = MOST_REQUESTS,
    ) -> Response:
        result = _find_result(cache, name)
        sizes = [part["batch"] for part in result.parts]
        if batch is not None and batch not in sizes:
            raise HTTPException(404, f"there is no batch size {batch}; there are {', '.join(map(str, sizes))}")
        return json_response({"batch": batch or sizes[0], **shelf.requests(result, batch or sizes[0], offset, limit)})

    @router.get("/api/evaluations/{name}/manifest", tags=["results"], summary="Its manifest, as YAML")
    def manifest_of(name: Name) -> Response:
        return PlainTextResponse(yamltext.write(dict(_find_result(cache, name).manifest)))

    @router.get("/api/evaluations/{name}/{what}", tags=["results"], summary="Its bound, or the advice of its trace")
    def beside(name: Name, what: Literal["bound", "advice"]) -> Response:
        content = _find_result(cache, name).read_json(_EXTRA_FILES[what])
        if content is None:
            raise HTTPException(404, f"it has no {what}: none was requested, or its notes say why")
        return json_response(content)

    @router.get("/evaluations/{name}/report", include_in_schema=False)
    def report(name: Name) -> Response:
        result = _find_result(cache, name)
        if result.run is None:
            raise HTTPException(404, "no trace was requested")
        # The page has its own policy, which allows its scripts by their hashes.
        return HTMLResponse(
            reports.page(result.name, result.run), headers={"content-security-policy": "frame-ancestors 'none'"}
        )

    return router


def comparison_routes(cache: Shelf) -> APIRouter:
    """Return the routes that hold results against each other: comparisons, and the leaderboard."""
    router = APIRouter()

    @router.get("/api/compare", tags=["results"], summary="Results, each compared with the first")
    def compare(name: Annotated[list[Name], Query(min_length=2, max_length=MOST_COMPARED)]) -> Response:
        comparisons = standings.compare([_find_result(cache, result_name) for result_name in name])
        entries = [tables.comparison_json(comparison) for comparison in comparisons]
        for entry in entries:
            if "error" in (entry["by_layer"] or {}):
                entry["by_layer"]["error"] = without_paths(entry["by_layer"]["error"], cache.store)
        return json_response(entries)

    @router.get("/api/leaderboard", tags=["results"], summary="Results in order, the best first")
    def leaderboard(
        task: Annotated[str | None, Query(max_length=200)] = None,
        by: Literal["inputs_per_s", "p50_ms", "p90_ms", "p99_ms", "rate", "top1"] = "inputs_per_s",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
    ) -> Response:
        stored, damaged = cache.all_results()
        rows = standings.leaderboard(stored, task, by)
        page = rows[offset : offset + limit]
        entries = [{**tables.standing_json(row), "ordered": tables.order_cell(row, by)} for row in page]
        return json_response({
            "total": len(rows), "offset": offset, "column": tables.ORDER_HEADINGS[by], "rows": entries,
            "damaged": damaged,
        })  # fmt: skip

    return router


def _find_result(cache: Shelf, name: str) -> Result:
    result = cache.result(name)
    if isinstance(result, Result):
        return result
    raise HTTPException(404, "there is no such evaluation" if result is None else without_paths(result, cache.store))


def job_routes(store: Path, agents: Sequence[Agent], queue: Queue, sizes: ModelSizes) -> APIRouter:
    """Return the routes of evaluations to run: agents, requests, and progress."""
    router = APIRouter(tags=["evaluations"])
    watcher_count = 0

    def state_of(job: QueuedEvaluation) -> dict[str, Any]:
        state = job.plain()
        return {**state, "error": None if state["error"] is None else without_paths(state["error"], store)}

    def find_job(name: str) -> QueuedEvaluation:
        job = queue.job(name)
        if job is None:
            raise HTTPException(404, "no such evaluation was requested, or it ended long ago")
        return job

    @router.get("/api/agents", summary="Agents that run evaluations")
    def agents_of() -> Response:
        return json_response(
            [{**results.plain_facts(facts), "alive": facts.is_alive} for facts in (agent.facts() for agent in agents)]
        )

    @router.get("/api/schema", summary="JSON Schema of a manifest")
    def schema() -> Response:
        return json_response(manifest.schema())

    @router.post("/api/check", summary="Errors in a manifest, and agents that can run it")
    def check(request: EvaluationRequest) -> Response:
        loaded = _read(request)
        suitable, reasons = match_agents(loaded.manifest, agents)
        refused, notes, is_opened = _objections(loaded, sizes), list(loaded.notes), False
        if request.opens and suitable and not refused:
            try:
                found = queue.check(loaded.manifest, suitable[0], Options(store, trusted=False))
            except XspError as error:
                refused, is_opened = [without_paths(str(error), store)], True
            else:
                is_opened = found is not None
                notes += [NOT_OPENED] if found is None else [without_paths(note, store) for note in found]
        return json_response({
            "identity": loaded.manifest.identity, "name": loaded.manifest.title, "notes": notes, "refused": refused,
            "opened": is_opened, "agents": [agent.facts().name for agent in suitable], "reasons": reasons,
            "yaml": yamltext.write(loaded.manifest.plain()),
        })  # fmt: skip

    @router.post("/api/jobs", status_code=202, summary="Request an evaluation")
    def ask(request: EvaluationRequest) -> Response:
        loaded = _read(request)
        errors = _objections(loaded, sizes)
        if errors:
            raise ManifestError("; ".join(errors))
        if request.trace:
            parse_levels(request.trace)
        options = Options(store, request.trace, request.bound, trusted=False)
        job = queue.add(loaded.manifest, _suitable_agent(request, loaded, agents), options)
        return json_response(state_of(job), 202, {"location": f"/api/jobs/{job.id}"})

    @router.get("/api/jobs", summary="Requested evaluations, newest first")
    def jobs() -> Response:
        return json_response([state_of(job) for job in reversed(queue.jobs())])

    @router.get("/api/jobs/{job}", summary="Progress of an evaluation")
    def job_of(job: Name) -> Response:
        return json_response(state_of(find_job(job)))

    @router.delete("/api/jobs/{job}", summary="Cancel an evaluation")
    def cancel(job: Name) -> Response:
        queue.cancel(find_job(job))
        return json_response(state_of(find_job(job)))

    @router.get("/api/jobs/{job}/events", summary="Its progress, as server-sent events")
    async def events(job: Name) -> Response:
        watched_job = find_job(job)
        if watcher_count >= MOST_WATCHERS:
            raise HTTPException(503, "too many clients watch already; poll /api/jobs/ID instead")

        async def stream_states() -> AsyncIterator[str]:
            nonlocal watcher_count
            watcher_count += 1
            try:
                previous, idle_s = None, 0.0
                while True:
                    snapshot = state_of(watched_job)
                    idle_s += POLL_S
                    if snapshot != previous:
                        previous, idle_s = snapshot, 0.0
                        yield f"data: {json.dumps(snapshot)}\n\n"
                    elif idle_s > KEEP_ALIVE_S:
                        idle_s = 0.0
                        yield ": still there\n\n"
                    if snapshot["state"] in ENDED_STATES:
                        return
                    await asyncio.sleep(POLL_S)
            finally:
                watcher_count -= 1

        return StreamingResponse(stream_states(), media_type="text/event-stream")

    return router


def _suitable_agent(request: EvaluationRequest, loaded: LoadedManifest, agents: Sequence[Agent]) -> Agent:
    suitable, reasons = match_agents(loaded.manifest, agents)
    if request.agent:
        names = [agent.facts().name for agent in agents]
        if request.agent not in names:
            raise ManifestError(f"there is no agent {request.agent!r}; there are {', '.join(names)}")
        suitable = [agent for agent in suitable if agent.facts().name == request.agent]
        reasons = {name: misses for name, misses in reasons.items() if name == request.agent}
    if not suitable:
        details = "; ".join(f"{name}: {', '.join(misses)}" for name, misses in reasons.items())
        subject = f"agent {request.agent} does not satisfy" if request.agent else "no agent satisfies"
        raise ManifestError(f"{subject} the manifest ({details})")
    return suitable[0]


def page_routes() -> APIRouter:
    """Return the routes of the pages and of their assets."""
    router = APIRouter()
    packages = {**dict.fromkeys(REPORT_ASSETS, "xsp.report"), **dict.fromkeys(EVALUATE_ASSETS, "xsp.evaluate.web")}

    @router.get("/assets/{name}", include_in_schema=False)
    def asset(name: Name) -> Response:
        if name not in packages:
            raise HTTPException(404, "there is no such file")
        return Response(_asset(packages[name], name), media_type=_MEDIA_TYPES[Path(name).suffix])

    def page() -> Response:
        return HTMLResponse(_asset("xsp.evaluate.web", "page.html"))

    for path in PAGES:
        router.get(path, include_in_schema=False, response_class=HTMLResponse)(page)
    return router


class _Reports:
    """Pages of traces, rendered one at a time, because each takes seconds and much memory."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, name: str, run: Path) -> str:
        from xsp.report import html, loop

        with self._lock:
            if name not in self._pages:
                trace, *other_traces = loop.load(run)
                self._pages[name] = html.render(trace, other_traces)
            self._pages.move_to_end(name)
            if len(self._pages) > MOST_REPORTS:
                self._pages.popitem(last=False)
            return self._pages[name]


def _read(request: EvaluationRequest) -> LoadedManifest:
    if (request.manifest is None) == (request.yaml is None):
        raise UsageError("send a manifest, either as `manifest` or as `yaml`")
    return policy.read(request.yaml) if request.yaml is not None else policy.of_json(request.manifest)


def _objections(loaded: LoadedManifest, sizes: ModelSizes) -> list[str]:
    reasons = [*policy.objections(loaded.manifest), *pipeline.problems(loaded.manifest)]
    if reasons:
        return reasons
    size_reason = sizes.objection(loaded.manifest.model, loaded.manifest.scenario.generation is not None)
    return [] if size_reason is None else [size_reason]


def _asset(package: str, name: str) -> bytes:
    return (files(package) / "assets" / name).read_bytes()


_PATH = re.compile(r"(?<![\w./~-])(?:(?<!:)|(?!//))(?:file:)?~?/+(?:[^\s'\"():,;\[\]{}<>]*/)?([^\s'\"():,;\[\]{}<>/]*)")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return JSON without validation, which for a thousand rows would take longer than reading them."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    try:
        text = encoder.encode(content)
    except ValueError:  # some numbers are not finite, which is rare
        text = encoder.encode(json.loads(json.dumps(content, default=str), parse_constant=lambda _: None))
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")


def without_paths(text: str, store: Path) -> str:
    """Return a message in which each absolute path is replaced by its last part: clients learn no directories.

    Args:
        text: the message.
        store: folder of results.
    """
    folders = {store, store.resolve(), Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    for folder in sorted(map(str, folders), key=len, reverse=True):  # their names may contain spaces
        if len(folder) > 1 and os.path.isabs(folder):
            text = text.replace(f"{folder}{os.sep}", "").replace(folder, "")
    return _PATH.sub(r"\1", text)
