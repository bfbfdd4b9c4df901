"""MLPerf's LoadGen as the driver of a schedule: the extra `loadgen`.

LoadGen draws its own arrivals, decides on the number of requests, and reports its own latencies. The result has its
figures and our times around the model. It does not report when it meant to issue a request, so here a request is due
when LoadGen issued it, and the lateness is unknown.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsp import atomic
from xsp.errors import UsageError
from xsp.evaluate.load.driving import Serve
from xsp.evaluate.load.requests import Requests
from xsp.plugins import importing

SCENARIOS = {"online": "SingleStream", "multi-stream": "MultiStream", "server": "Server", "offline": "Offline"}


@dataclass(frozen=True)
class LoadGenResult:
    """The result of a LoadGen test."""

    requests: Requests
    """Requests, timed by our clock around the model."""

    figures: dict[str, float]
    """Figures of LoadGen's summary, by its names; latencies in nanoseconds."""

    is_valid: bool
    """Whether LoadGen reports its result as valid; short tests are not valid."""


def drive_loadgen(
    kind: str,
    serve: Serve,
    requests: int,
    rate: float | None = None,
    *,
    streams: int = 1,
    latency_ns: int | None = None,
    share: float = 0.99,
    seed: int = 0,
    seconds: float = 0.0,
) -> LoadGenResult:
    """Let LoadGen send requests to a function.

    Args:
        kind: one of `SCENARIOS`.
        serve: as in `xsp.evaluate.load.drive`; called on one thread.
        requests: minimum number; in an offline test, number of inputs.
        rate: requests per second that a server test issues.
        streams: inputs of a multi-stream request.
        latency_ns: the limit of a server test.
        share: the percentile to which the limit applies, as a share.
        seed: seed of arrivals and of samples.
        seconds: minimum duration.

    Raises:
        UsageError: LoadGen is not installed, or does not have the scenario.
        Whatever `serve` raises.
    """
    loadgen = _library()
    if kind not in SCENARIOS:
        raise UsageError(f"LoadGen has no scenario {kind!r}: it has {', '.join(SCENARIOS)}")
    if kind == "server" and not (rate and latency_ns):
        raise UsageError("LoadGen's server scenario needs a rate and a latency limit")
    test = _Test(loadgen, serve)
    with atomic.temporary_folder() as folder:
        settings = _settings(loadgen, kind, requests, rate, streams, latency_ns, share, seed, seconds)
        test.run(settings, _logs(loadgen, folder))
        text = Path(folder, "mlperf_log_summary.txt").read_text(encoding="utf-8", errors="replace")
    if test.error is not None:
        raise test.error
    return LoadGenResult(test.requests(), summary(text), "Result is : VALID" in text)


def summary(text: str) -> dict[str, float]:
    """Return the figures of LoadGen's summary: lines of a name, a colon or an equals sign, and a number."""
    pairs = re.findall(r"^\s*([^:=\n]+?)\s*[:=]\s*(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*$", text, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def install_hint() -> str | None:
    """Return what to install if LoadGen is missing, else None."""
    try:
        _library()
    except UsageError as error:
        return str(error)
    return None


def _library() -> Any:
    with importing(UsageError, "LoadGen is not installed ({error}): pip install 'xsp[loadgen]'"):
        import mlperf_loadgen
    return mlperf_loadgen


def _settings(
    loadgen: Any, kind: str, requests: int, rate: float | None, streams: int, latency_ns: int | None, share: float,
    seed: int, seconds: float,
) -> Any:  # fmt: skip
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, SCENARIOS[kind])
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_query_count = requests
    settings.min_duration_ms = math.ceil(1000 * seconds)
    settings.qsl_rng_seed = settings.sample_index_rng_seed = settings.schedule_rng_seed = seed
    if kind == "multi-stream":
        settings.multi_stream_samples_per_query = streams
    elif kind == "server":
        settings.server_target_qps = rate
        settings.server_target_latency_ns = latency_ns
        settings.server_target_latency_percentile = share
    elif kind == "offline":
        settings.offline_expected_qps = requests / max(seconds, 1.0)
    return settings


def _logs(loadgen: Any, folder: str) -> Any:
    output = loadgen.LogOutputSettings()
    output.outdir = folder
    output.copy_summary_to_stdout = False
    settings = loadgen.LogSettings()
    settings.log_output = output
    settings.enable_trace = False
    return settings


class _Test:
    """A running test: LoadGen issues requests on its thread, one of our threads serves them."""

    def __init__(self, loadgen: Any, serve: Serve) -> None:
        self._loadgen, self._serve = loadgen, serve
        self._waiting: queue.SimpleQueue[tuple[int, list[int]] | None] = queue.SimpleQueue()
        self._times: list[tuple[int, int, int, int]] = []
        self.error: BaseException | None = None

    def run(self, settings: Any, logs: Any) -> None:
        """Run the test to its end."""
        server = threading.Thread(target=self._work, daemon=True)
        server.start()
        library = self._loadgen.ConstructQSL(1024, 1024, lambda samples: None, lambda samples: None)
        system = self._loadgen.ConstructSUT(self._issue, lambda: None)
        try:
            self._loadgen.StartTestWithLogSettings(system, library, settings, logs)
        finally:
            self._waiting.put(None)
            server.join()
            with contextlib.suppress(Exception):
                self._loadgen.DestroyQSL(library)
                self._loadgen.DestroySUT(system)

    def _issue(self, samples: Sequence[Any]) -> None:
        self._waiting.put((time.perf_counter_ns(), [sample.id for sample in samples]))

    def _work(self) -> None:
        while (query := self._waiting.get()) is not None:
            issued, samples = query
            start = time.perf_counter_ns()
            try:
                if self.error is None:  # after an error, all further queries are answered at once, so LoadGen ends
                    self._serve(len(self._times), len(samples))
            except BaseException as error:
                self.error = error
            end = time.perf_counter_ns()
            self._loadgen.QuerySamplesComplete([self._loadgen.QuerySampleResponse(sample, 0, 0) for sample in samples])
            self._times.append((issued, start, end, len(samples)))

    def requests(self) -> Requests:
        """Return the requests that ended."""
        table = np.array(self._times, np.int64).reshape(-1, 4)
        issued, start, end, batch = (np.ascontiguousarray(column) for column in table.T)
        return Requests(issued, issued, start, end, batch, is_open_loop=False)
