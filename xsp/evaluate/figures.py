"""Figures of a result as plain data: latencies in milliseconds, rates per second."""

from __future__ import annotations

from typing import Any

import numpy as np

from xsp.evaluate.load import Requests, latencies, search
from xsp.evaluate.manifest import Scenario


def of_part(
    scenario: Scenario, batch: int, requests: Requests, search_result: search.SearchResult | None
) -> dict[str, Any]:
    """Return the figures of a batch size.

    Args:
        scenario: the load.
        batch: inputs per request.
        requests: its requests.
        search_result: the search for the highest rate, if the scenario is one.
    """
    summary = latencies.summarise(requests, poisson=scenario.kind in ("poisson", "server", "max-rate"))
    percentiles = {f"p{100 * percentile.share:g}": percentile for percentile in summary.percentiles}
    interval = summary.trimmed_mean_interval_ns
    return {
        "batch": batch,
        "requests": summary.requests,
        "scheduled": requests.schedule_length,
        "inputs": summary.inputs,
        "open_loop": requests.is_open_loop,
        "stopped": summary.stop_reason,
        **{f"{name}_ms": percentile.value_ns / 1e6 for name, percentile in percentiles.items()},
        "intervals_ms": {
            name: [None if end is None else end / 1e6 for end in (percentile.low_ns, percentile.high_ns)]
            for name, percentile in percentiles.items()
        },
        "trimmed_mean_ms": summary.trimmed_mean_ns / 1e6,
        "trimmed_mean_interval_ms": None if interval is None else [end / 1e6 for end in interval.ends],
        "service_ms": summary.service_ns / 1e6,
        "inputs_per_s": summary.inputs_per_second,
        "utilisation": summary.utilisation,
        "late": summary.is_late,
        "little_ratio": None if summary.little is None else _finite(summary.little.ratio),
        "waiting_ms": summary.waiting_ns / 1e6,
        "expected_waiting_ms": None if summary.expected_waiting_ns is None else summary.expected_waiting_ns / 1e6,
        **({} if search_result is None else _search_figures(search_result)),
    }


def _search_figures(result: search.SearchResult) -> dict[str, Any]:
    """Return the highest rate: the interval, and each probed rate."""
    return {
        "rate_low": result.low,
        "rate_high": result.high,
        "rate_estimate": result.estimate,
        "rate_ended": result.end_reason,
        "probes": [
            {
                "rate": probe.rate, "held": probe.status.value, "runs": probe.runs, "requests": probe.requests,
                "percentile_ms": None if probe.value_ns is None else probe.value_ns / 1e6,
                "interval_ms": [None if end is None else end / 1e6 for end in (probe.low_ns, probe.high_ns)],
                "why": probe.reason,
            }
            for probe in result.probes
        ],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
