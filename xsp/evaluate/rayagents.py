"""Agents on the machines of a Ray cluster: detached actors, found by their names.

An actor runs each manifest in a subprocess, as `transports.SubprocessAgent` does, and returns the files of the result;
the requesting process puts them in the store. So a result is stored once, or not at all.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from xsp import atomic, inside
from xsp.errors import ManifestError, first_line
from xsp.evaluate import agents, reading, results, transports
from xsp.evaluate.agents import AgentLost, Facts, Options, ProcessLost, Progress
from xsp.evaluate.manifest import Manifest
from xsp.plugins import importing

NAMESPACE = "xsp-evaluate"

MOST_FILE_BYTES = 1 << 30
PATIENCE_S = 10.0
"""Seconds to wait for a sign of life."""

EVALUATIONS = "evaluations"
"""Group of threads of an actor that runs evaluations: one thread, so that others wait in Ray, and the threads for
everything else stay free."""

WAITING = ("waiting for another evaluation", 0, 1)
"""Progress of an evaluation that has not begun."""


class Actor:
    """The actor on the other machine; it runs one evaluation at a time, and answers other calls meanwhile."""

    def __init__(self, name: str, labels: Mapping[str, str], folder: str, trusted: bool) -> None:
        self._agent = transports.SubprocessAgent(name, labels, "ray")
        self._folder, self._trusted = Path(folder), trusted
        self._running = threading.Lock()
        self._progress: dict[str, tuple[str, int, int]] = {}
        """Progress of the evaluation that runs, by its name."""

        self._cancelled: set[str] = set()

    def facts(self) -> dict[str, Any]:
        """Return the agent's facts, with the current time."""
        return {**results.plain_facts(self._agent.facts()), "beat_s": time.time(), "trusts": self._trusted}

    def progress(self, name: str) -> tuple[str, int, int] | None:
        """Return the progress of the named evaluation; None if it waits for another one, or has ended."""
        return self._progress.get(name)

    def running_names(self) -> list[str]:
        """Return the name of the evaluation that runs, if one does."""
        return list(self._progress)

    def cancel(self, name: str) -> None:
        """Make the named evaluation end without a result, within a second."""
        self._cancelled.add(name)

    def evaluate(self, manifest: dict[str, Any], levels: str, bound: bool, name: str) -> dict[str, Any]:
        """Run a manifest, and return the files of its result, or the reason why there is none.

        It waits while another evaluation runs, because each would disturb the latencies of the other.

        Args:
            manifest: in its canonical form.
            levels: levels of the trace to record as well; "" for none.
            bound: whether to compute the bound as well.
            name: name of this evaluation, for `progress` and `cancel`.
        """

        def report(stage: str, done: int, total: int) -> None:
            self._progress[name] = stage, done, total
            if name in self._cancelled:
                raise ManifestError("it was cancelled")

        with self._running, atomic.temporary_folder() as store:
            try:
                report("starting", 0, 1)
                parsed = reading.of_plain(manifest).manifest
                options = Options(Path(store), levels, bound, self._trusted)
                result_dir = self._agent.submit(parsed, self._folder, options, report)
            except ProcessLost as error:
                return {"lost": str(error)}
            except ManifestError as error:
                return {"error": str(error)}
            finally:
                self._progress.pop(name, None)
                self._cancelled.discard(name)
            files = [path for path in result_dir.rglob("*") if inside.is_file(result_dir, path)]
            return {
                "files": {
                    path.relative_to(result_dir).as_posix(): inside.read_bytes(result_dir, path, MOST_FILE_BYTES)
                    for path in files
                }
            }


class RayAgent:
    """An agent of a cluster; calls go to its actor."""

    def __init__(self, handle: Any, facts: Facts) -> None:
        self._handle, self._facts = handle, facts

    def facts(self) -> Facts:
        """Return the facts that it reported, with the time of its last sign of life by this machine's clock."""
        if self._facts.beat_s is not None and time.time() - self._facts.beat_s > PATIENCE_S:
            try:
                _ray().get(self._handle.running_names.remote(), timeout=PATIENCE_S)
            except Exception:
                return self._facts
            self._facts = replace(self._facts, beat_s=time.time())
        return self._facts

    def submit(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> Path:
        """Run a manifest there, and put its result into the store here.

        Raises:
            AgentLost: the agent died, or no longer responds.
            ProcessLost: its process for the manifest was killed.
            ManifestError: it cannot run the manifest, with the reason.
        """
        del folder  # the agent looks up the manifest's files in the folder with which it was started
        ray = _ray()
        try:
            name, state = secrets.token_hex(8), WAITING
            evaluate = self._handle.evaluate.options(concurrency_group=EVALUATIONS)
            task = evaluate.remote(manifest.plain(), options.levels, options.needs_bound, name)
            silent_since = time.monotonic()
            while not ray.wait([task], timeout=0.5)[0]:
                try:
                    state = ray.get(self._handle.progress.remote(name), timeout=PATIENCE_S) or state
                    silent_since = time.monotonic()
                except ray.exceptions.GetTimeoutError:
                    if time.monotonic() - silent_since > agents.DEAD_AFTER_S:
                        ray.kill(self._handle)  # it must not continue with a manifest that another agent takes over
                        raise
                    continue
                try:
                    progress(*state)
                except BaseException:
                    ray.wait([self._handle.cancel.remote(name)], timeout=PATIENCE_S)  # ensures that it has arrived
                    raise
            reply = ray.get(task)
        except ray.exceptions.RayTaskError as error:  # the agent is alive; its code raised an error
            reason = first_line(error.cause)[:200]
            raise ManifestError(
                f"the agent {self._facts.name} failed: {type(error.cause).__name__}: {reason}"
            ) from error
        except ray.exceptions.RayError as error:
            raise AgentLost(f"the agent {self._facts.name} died ({type(error).__name__})") from error
        if "lost" in reply:
            raise ProcessLost(reply["lost"])
        if "error" in reply:
            raise ManifestError(reply["error"])
        return _store_files(reply["files"], manifest, options.store)

    def check(self, manifest: Manifest, folder: Path, options: Options, progress: Progress) -> None:
        """Return None: another machine opens a manifest only to run it."""
        del manifest, folder, options, progress


def _store_files(files: Mapping[str, bytes], manifest: Manifest, store: Path) -> Path:
    """Store the files that an agent returned as a result, and return its path.

    Raises:
        ManifestError: a file would be outside the result.
    """
    with results.new_result(store, manifest.identity) as (staging, paths):
        for name, content in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ManifestError(f"an agent returned a file {name!r}, which is outside its result")
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).write_bytes(content)
    return paths[0]


def connect(address: str) -> None:
    """Connect to a cluster; a second call does nothing.

    Raises:
        ManifestError: Ray is not installed, or there is no cluster.
    """
    ray = _ray()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = first_line(error)
        raise ManifestError(f"no Ray cluster at {address}: {reason}; `ray start --head` starts one") from error


def start(name: str, labels: Mapping[str, str], folder: Path, trusted: bool = False) -> Facts:
    """Start an agent on this machine, which outlives this process, and return its facts.

    Args:
        name: a name that no other agent of the cluster has.
        labels: properties that no program can look up: rack, interconnect.
        folder: base of relative paths in manifests.
        trusted: whether code that manifests name may run.

    Raises:
        ManifestError: an agent of that name exists, or the agent did not start.
    """
    ray = _ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        handle = (
            ray.remote(concurrency_groups={EVALUATIONS: 1})(Actor)
            .options(
                name=name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_concurrency=4, max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(name, dict(labels), str(folder.resolve()), trusted)
        )  # fmt: skip
        return _facts(ray.get(handle.facts.remote(), timeout=120))
    except ValueError as error:
        raise ManifestError(f"there already is an agent {name!r}; give this one another with --name") from error
    except ray.exceptions.RayError as error:
        raise ManifestError(f"the agent {name} did not start ({type(error).__name__}: {error})") from error


def stop(name: str) -> None:
    """End an agent.

    Raises:
        ManifestError: there is no agent of that name.
    """
    ray = _ray()
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError as error:
        raise ManifestError(f"there is no agent {name!r}; `xsp evaluate agents` names them") from error


def connected_agents(names: Sequence[str] | None = None) -> tuple[list[RayAgent], dict[str, str]]:
    """Return the agents of the cluster, and by name the reasons why others do not answer.

    Args:
        names: names of the agents; all if None.

    Raises:
        ManifestError: there is no agent of one of the names.
    """
    ray = _ray()
    existing = sorted(
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
    )
    for name in names or ():
        if name not in existing:
            raise ManifestError(f"there is no agent {name!r}; there are {', '.join(existing) or 'none'}")
    reachable, failures = [], {}
    for name in existing if names is None else names:
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            reachable.append(RayAgent(handle, _facts(ray.get(handle.facts.remote(), timeout=PATIENCE_S))))
        except (ray.exceptions.RayError, ValueError) as error:
            failures[name] = f"it does not answer ({type(error).__name__})"
    return reachable, failures


def _facts(reply: Mapping[str, Any]) -> Facts:
    return Facts(**{**reply, "gpus": tuple(reply["gpus"]), "beat_s": time.time()})


def _ray() -> Any:
    with importing(ManifestError, "Ray is not installed: pip install 'xsp[evaluate,ray]'"):
        import ray
    return ray
