"""The two agents of one machine: this process, and a subprocess. Both give the same results, bit for bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from xsp import processes
from xsp.errors import ManifestError
from xsp.evaluate import agents, reading, results, running
from xsp.evaluate.agents import Agent, Facts, Options, ProcessLost, Progress
from xsp.evaluate.manifest import Manifest

_CODE = processes.call_code("xsp.evaluate.transports", "work")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Variables with which the libraries of models download nothing, whatever an untrusted manifest names."""

SILENT_S = 1800.0
"""Time without a message from the subprocess after which it is killed, in seconds."""

LISTENING_S = 0.5
"""Time between two progress calls, in which the caller may stop the evaluation, in seconds."""


class InProcessAgent:
    """The agent in this process."""

    def __init__(self, name: str = "local", labels: Mapping[str, str] | None = None) -> None:
        self._facts = agents.local_facts(name, labels)

    def facts(self) -> Facts:
        """Return the facts of this process."""
        return self._facts

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Path:
        """Run a manifest in this process."""
        return running.evaluate(manifest, folder, options, self._facts, _throttled(progress))

    def check(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> list[str]:
        """Do everything that precedes the load, in this process."""
        return running.check(manifest, folder, options, self._facts, _throttled(progress))


class SubprocessAgent:
    """The agent with a subprocess per manifest, started with its variables and threads; it ends with this process."""

    def __init__(
        self, name: str = "process", labels: Mapping[str, str] | None = None, transport: str = "own process"
    ) -> None:  # fmt: skip
        self._name, self._labels, self._transport = name, dict(labels or {}), transport
        self._facts = agents.local_facts(name, labels)

    def facts(self) -> Facts:
        """Return the facts of such a subprocess."""
        return self._facts

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Path:
        """Run a manifest in a new process.

        The subprocess writes into a folder of its own, and this process publishes the result after the message that it
        is complete. So a subprocess that is killed at any time leaves no result.

        Raises:
            ProcessLost: the process was killed, by the system for lack of memory or by another process.
            ManifestError: it cannot be run, with the reason.
        """
        if not options.trusted and (reasons := agents.trust_objections(manifest)):
            raise ManifestError(f"{manifest.title} cannot be evaluated by {self._name}: " + "; ".join(reasons))
        with results.staging(options.store, manifest.identity) as staging:
            inner_options = replace(options, store=staging.resolve())
            answer = self._run_subprocess(manifest, folder, inner_options, progress)
            return results.publish(options.store, manifest.identity, Path(answer["result"]))

    def check(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> list[str]:
        """Do everything that precedes the load, in a new process.

        Raises:
            ProcessLost, ManifestError: as for `submit`.
        """
        notes: list[str] = self._run_subprocess(manifest, folder, options, progress, checks_only=True)["notes"]
        return notes

    def _run_subprocess(
        self, manifest: Manifest, folder: Path, options: Options, progress: Progress, checks_only: bool = False
    ) -> dict[str, Any]:
        """Return the last message of a process that runs or checks a manifest."""
        threads = manifest.software.threads
        thread_variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        try:
            process = processes.WorkerProcess(
                _CODE, str(os.getpid()),
                env={
                    **processes.environment(), **thread_variables, **manifest.software.environment,
                    **({} if options.trusted else OFFLINE),
                },
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise ManifestError(f"a separate process cannot be started ({error})") from error
        try:
            process.ask({
                "manifest": manifest.plain(), "folder": str(folder.resolve()), "name": self._name,
                "labels": self._labels, "transport": self._transport, "checks_only": checks_only,
                "options": {**asdict(options), "store": str(options.store)},
            })  # fmt: skip
            message: dict[str, Any] = {"progress": ["starting", 0, 1]}
            while line := _next_line(process, progress, message["progress"]):
                message = json.loads(line)
                if "result" in message or "notes" in message:
                    return message
                if "error" in message:
                    raise ManifestError(message["error"])
                progress(*message["progress"])
            is_silent = not process.has_ended()
        finally:
            code = process.end(patience_s=2.0)
        if is_silent:
            raise ManifestError(f"the process that evaluated {manifest.title} did not report for {SILENT_S:.0f} s")
        if code < 0:
            raise ProcessLost(
                f"the process that evaluated {manifest.title} was killed ({processes.exit_description(code)})"
            )
        raise ManifestError(
            f"the process that evaluated {manifest.title} ended on its own ({processes.exit_description(code)})"
        )


def _next_line(process: processes.WorkerProcess, progress: Progress, last_progress: Sequence[Any]) -> bytes:
    """Return the next line of a subprocess; empty if it ended or is silent.

    Args:
        process: the subprocess that evaluates.
        progress: also called while it is silent: an exception from it ends the wait.
        last_progress: the last reported progress.
    """
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        has_ended = process.has_ended()
        line = process.answer(time.monotonic() + LISTENING_S)
        if line or has_ended:
            return line
        progress(*last_progress)
    return b""


def _throttled(progress: Progress) -> Progress:
    """Return a callback for each request, which forwards the last call, and others at most every half second.

    Displaying or sending the progress of each request would disturb the requests: a progress bar in a terminal takes up
    to a millisecond.
    """
    last_time = 0.0

    def on_progress(stage: str, done: int, total: int) -> None:
        nonlocal last_time
        now = time.monotonic()
        if done == total or now - last_time > LISTENING_S:
            last_time = now
            progress(stage, done, total)

    return on_progress


def work(parent: int, answers: int) -> None:
    """Run the manifest on stdin: the subprocess side of `SubprocessAgent`.

    Args:
        parent: process ID of the requesting process; this one ends with it.
        answers: descriptor for lines of JSON.
    """
    processes.end_with_parent(parent)
    with processes.Questions(answers) as questions:
        request = next(iter(questions))
        progress = _throttled(lambda stage, done, total: questions.answer({"progress": [stage, done, total]}))
        try:
            manifest = reading.of_plain(request["manifest"]).manifest
            options = Options(**{**request["options"], "store": Path(request["options"]["store"])})
            facts = agents.local_facts(request["name"], request["labels"])
            folder = Path(request["folder"])
            answer: dict[str, Any]
            if request["checks_only"]:
                answer = {"notes": running.check(manifest, folder, options, facts, progress)}
            else:
                path = running.evaluate(manifest, folder, options, facts, progress, request["transport"])
                answer = {"result": str(path)}
        except Exception as error:
            reason = str(error) if isinstance(error, ManifestError) else f"{type(error).__name__}: {error}"
            questions.answer({"error": reason})
        else:
            questions.answer(answer)


def local_agents(names: str, labels: Mapping[str, str] | None = None) -> list[Agent]:
    """Return the requested agents: `local`, `process`, a list of them with commas, or `all`.

    Raises:
        ManifestError: there is no such agent.
    """
    classes: dict[str, type[InProcessAgent] | type[SubprocessAgent]] = {
        "local": InProcessAgent,
        "process": SubprocessAgent,
    }
    requested_names = list(classes) if names == "all" else [name.strip() for name in names.split(",")]
    for name in requested_names:
        if name not in classes:
            raise ManifestError(f"there is no agent {name!r}; there are {', '.join(classes)}, and all")
    return [classes[name](name, labels) for name in requested_names]
