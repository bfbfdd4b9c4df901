"""The times of generated tokens, and their statistics, as benchmarks of language-model servers define them.

- Time to the first token (TTFT): from when a request was due, so it includes waiting in a queue.
- Time between tokens (inter-token latency, ITL): each gap between successive tokens of a request, of all requests.
- Time per output token (TPOT): a request's time after its first token ÷ its further tokens.
- Goodput: requests a second that keep every given limit on TTFT, TPOT and latency.

Intervals are those of `xsp.evaluate.load.latencies`: values are in the order of time, so that what a step of the model
delays for all requests together does not count as independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xsp.evaluate import labelled
from xsp.evaluate.load import Requests, latencies
from xsp.evaluate.load.requests import Times
from xsp.evaluate.load.schedules import SECOND
from xsp.evaluate.manifest import Scenario

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Generated:
    """Requests that generated text; times are nanoseconds of one monotonic clock."""

    requests: Requests
    prompt_counts: Times
    """Tokens of each request's prompt."""

    token_ns: tuple[Times, ...]
    """When each request's tokens arrived; a server can send several together."""

    output_counts: Times
    """Tokens that each request generated."""

    @property
    def ttft_ns(self) -> Times:
        """Time of each request from due to its first token, in the order of the first tokens."""
        first_ns = np.array([times[0] for times in self.token_ns], np.int64)
        return np.asarray((first_ns - self.requests.due_ns)[np.argsort(first_ns, kind="stable")])

    @property
    def itl_ns(self) -> Times:
        """Time between successive arrivals of each request, in the order of time."""
        ends = np.concatenate([times[1:] for times in self.token_ns])
        gaps = np.concatenate([np.diff(times) for times in self.token_ns])
        return np.asarray(gaps[np.argsort(ends, kind="stable")])

    @property
    def tpot_ns(self) -> Times:
        """Mean time per token after the first, of each request with more than one, in the order of their ends."""
        order = np.argsort(self.requests.end_ns, kind="stable")
        return self._tpot_ns[order][self.output_counts[order] > 1]

    @property
    def _tpot_ns(self) -> Times:
        """The same for all requests in their order; 0 of a request with one token."""
        first_ns = np.array([times[0] for times in self.token_ns], np.int64)
        return np.asarray((self.requests.end_ns - first_ns) // np.maximum(self.output_counts - 1, 1))

    def keeps(self, scenario: Scenario) -> Any:
        """Return of each request whether it keeps the scenario's limits; a limit that is not given is kept."""
        generation, requests = scenario.generation, self.requests
        assert generation is not None
        first_ns = np.array([times[0] for times in self.token_ns], np.int64)
        kept = np.ones(len(requests), bool)
        for limit_ms, times in (
            (generation.ttft_ms, first_ns - requests.due_ns), (generation.tpot_ms, self._tpot_ns),
            (scenario.latency_ms, requests.latency_ns),
        ):  # fmt: skip
            if limit_ms is not None:
                kept &= times <= 1e6 * limit_ms
        return kept


def figures(generated: Generated, scenario: Scenario) -> dict[str, Any]:
    """Return the statistics of generated text as plain data: times in milliseconds, rates per second.

    Args:
        generated: at least one request.
        scenario: the load, with the limits of goodput; without a limit there is no goodput.
    """
    requests, generation = generated.requests, scenario.generation
    assert generation is not None
    seconds = int(requests.end_ns.max() - requests.due_ns.min()) / SECOND
    result: dict[str, Any] = {
        "prompt_tokens": int(generated.prompt_counts.sum()),
        "output_tokens": int(generated.output_counts.sum()),
    }
    for name, times in (("ttft", generated.ttft_ns), ("itl", generated.itl_ns), ("tpot", generated.tpot_ns)):
        percentiles = (
            {key: latencies.of_percentile(times, share) for key, share in SHARES.items()} if len(times) else {}
        )
        result |= {f"{name}_{key}_ms": found.value_ns / 1e6 for key, found in percentiles.items()}
        result[f"{name}_mean_ms"] = float(times.mean()) / 1e6 if len(times) else None
        result[f"{name}_intervals_ms"] = {
            key: [None if end is None else end / 1e6 for end in (found.low_ns, found.high_ns)]
            for key, found in percentiles.items()
        }
    rates = {"prompt_tokens": result["prompt_tokens"], "output_tokens": result["output_tokens"]}
    result |= {f"{name}_per_s": count / seconds if seconds else None for name, count in rates.items()}
    if any((generation.ttft_ms, generation.tpot_ms, scenario.latency_ms)):
        kept = int(generated.keeps(scenario).sum())
        result["goodput_per_s"] = kept / seconds if seconds else None
        result["goodput_share"] = kept / len(requests)
        result["goodput_share_interval"] = labelled.interval(kept / len(requests), len(requests))
    return result
