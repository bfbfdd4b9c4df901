"""The form of `result.json`: its fields with their types. A result is checked once, when it is read.

Another version of xsp, or another program, may have written it. Unknown fields are kept; a field of another type, or a
missing one, makes the result damaged, so that a leaderboard of all results, for example, can rely on the types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xsp.errors import ManifestError
from xsp.evaluate import reading

MAX_DEPTH = 40
"""Maximum depth of nested values, as in manifests."""

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=1 << 20)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Agent(_Form):
    name: Text
    host: Text
    python: Text
    cpu: Text
    cores: Count
    gpus: list[Text]
    packages: dict[Text, Text]
    labels: dict[Text, Text] = {}


class _Environment(_Form):
    hash: Text
    equal: dict[Text, Any]
    noted: dict[Text, Any] = {}


class _Samples(_Form):
    count: Count
    checksum: Text


class _Outputs(_Form):
    digest: Text
    samples: Count = 0


class _Accuracy(_Form):
    error: Text | None = None
    samples: Count = 0
    classes: Count = 0
    top1: Share | None = None
    top5: Share | None = None
    top1_interval: tuple[Share, Share] | None = Field(None, strict=False)
    top5_interval: tuple[Share, Share] | None = Field(None, strict=False)

    @model_validator(mode="after")
    def _has_intervals(self) -> _Accuracy:
        required = {"samples", "classes", "top1", "top5", "top1_interval", "top5_interval"}
        if self.error is None and not required <= self.model_fields_set:
            raise ValueError(f"{', '.join(sorted(required - self.model_fields_set))} missing")
        if (self.top1 is None) != (self.top1_interval is None) or (self.top5 is None) != (self.top5_interval is None):
            raise ValueError("a share without its interval")
        return self


Ends = Annotated[list[float | None], Field(min_length=2, max_length=2)]


class _Generation(_Form):
    prompt_tokens: Count
    output_tokens: Count
    output_tokens_per_s: float | None
    ttft_intervals_ms: dict[Text, Ends]
    itl_intervals_ms: dict[Text, Ends]
    tpot_intervals_ms: dict[Text, Ends]
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    goodput_per_s: float | None = None
    goodput_share: Share | None = None
    goodput_share_interval: tuple[Share, Share] | None = Field(None, strict=False)


class _Part(_Form):
    batch: Annotated[int, Field(ge=1, lt=1 << 31)]
    requests: Count
    scheduled: Count
    open_loop: bool
    late: bool
    stopped: Text | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    trimmed_mean_ms: float | None
    inputs_per_s: float | None
    utilisation: float | None = None
    processor_ms: float | None = None
    joules_per_input: float | None = None
    intervals_ms: dict[Text, list[float | None]] = {}
    rate_low: float | None = None
    rate_high: float | None = None
    rate_estimate: float | None = None
    probes: list[dict[Text, Any]] = []
    generation: _Generation | None = None

    @model_validator(mode="after")
    def _has_whole_search(self) -> _Part:
        search = {"rate_low", "rate_high", "rate_estimate", "probes"}
        if search & self.model_fields_set and not search <= self.model_fields_set:
            raise ValueError("an incomplete search for the highest rate")
        return self


class _Content(_Form):
    format: Count
    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{12,128}$")]
    manifest: dict[Text, Any]
    name: Text
    kind: Text
    started: Text
    xsp: Text
    agent: _Agent
    environment: _Environment
    outputs: _Outputs
    samples: _Samples
    parts: Annotated[list[_Part], Field(min_length=1, max_length=10_000)]
    accuracy: _Accuracy | None = None
    threads: int | None = None
    simulated: bool = False
    open_ms: float | None = None
    notes: list[Text] = []


def check(content: Any) -> Mapping[str, Any]:
    """Return the content of a `result.json`, if it has the form of one.

    Raises:
        ValueError: it does not; the message names fields.
    """
    _check_values(content)
    try:
        form = _Content.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors()[:3]]
        raise ValueError("; ".join(problems)) from error
    if len({part.batch for part in form.parts}) < len(form.parts):
        raise ValueError("parts: a batch size occurs twice")
    try:
        reading.of_plain(content["manifest"])
    except ManifestError as error:
        raise ValueError(f"manifest: {error}") from error
    result: Mapping[str, Any] = content
    return result


def _check_values(content: Any) -> None:
    """Raise ValueError for values that cannot be written again: too deep, not finite, not Unicode."""
    pending = [(content, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(value, dict):
            pending += [(element, depth + 1) for pair in value.items() for element in pair]
        elif isinstance(value, list):
            pending += [(element, depth + 1) for element in value]
        elif isinstance(value, str):
            value.encode()  # a UnicodeEncodeError, for half of a surrogate pair, is a ValueError
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number that is not finite")
