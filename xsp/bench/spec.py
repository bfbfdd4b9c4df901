"""Specs, which describe what is timed, and their timings: plain values, without torch and without the table engine."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xsp.cached import hash_of
from xsp.graph.blocks import Block

AS_RUN = "as-run"
"""The variant that a framework takes by default."""


OTHER_PRECISION = frozenset(["autocast-bfloat16", "tf32"])
"""Variants that compute in another precision: their times enter no bound, and their errors are their results."""

SLOWED = "slowed: "
"""Beginning of the part of a timing's reason that its device gave: lowered clocks, for example."""

RUNTIMES = "xsp.runtimes"
"""Entry points of runtimes, which run blocks: classes with a method `prepare`, like `xsp.bench.torchcalls.Torch`."""


class CacheState(str, enum.Enum):
    """The location of a block's inputs when the block begins."""

    WARM = "warm"
    """The previous call of the block left weights and activations in the caches."""

    CHAIN = "chain"
    """As in a step: weights come from a set of copies larger than the caches of the cores, activations are cached."""

    COLD = "cold"
    """The caches hold other data."""


class Status(str, enum.Enum):
    """The outcome of timing a spec. A missing time is None, never 0."""

    OK = "ok"
    MISSING = "missing"
    """It has not been timed in this environment."""

    FAILED = "failed"
    """It cannot be run on its own; `Timing.reason` explains why."""

    TIMED_OUT = "timed-out"
    TOO_LARGE = "too-large"
    """It needs more memory than it may take."""

    DIFFERENT = "different"
    """A variant whose results differ from the block's: its time never enters a bound."""

    UNSTABLE = "unstable"
    """Timed, but the interval was still wider than requested when the time was over."""

    QUICK = "quick"
    """Timed, but no longer than the overhead of a call: the figure is at the floor."""


TIMED = frozenset([Status.OK, Status.UNSTABLE, Status.QUICK])
"""Statuses whose figures may enter a total. `DIFFERENT` may have figures too, but of other results."""


@dataclass(frozen=True)
class Spec:
    """A block, and the conditions under which it is timed."""

    block: Block
    variant: str = AS_RUN
    state: CacheState = CacheState.CHAIN
    threads: int = 1
    runtime: str = "torch"

    @cached_property
    def key(self) -> str:
        """Key, equal for equal work under equal conditions: 32 hexadecimal digits."""
        text = json.dumps([self.block.work_key, self.variant, self.state.value, self.threads, self.runtime])
        return hash_of(text)

    @property
    def op(self) -> str:
        """The operators of the block; for an overhead, which has none, its name."""
        return self.block.op or self.variant

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as plain values for JSON."""
        return {
            "block": self.block.to_plain(),
            "variant": self.variant,
            "state": self.state.value,
            "threads": self.threads,
            "runtime": self.runtime,
        }

    @classmethod
    def from_plain(cls, document: Any) -> Spec:
        """Return the spec from the output of `to_plain`.

        Raises:
            LookupError, TypeError, ValueError: `document` is not such output, or was changed.
        """
        return cls(
            Block.from_plain(document["block"]),
            str(document["variant"]),
            CacheState(document["state"]),
            int(document["threads"]),
            str(document["runtime"]),
        )


@dataclass(frozen=True)
class Loss:
    """A device that could no longer be used while timings were taken: the later ones are missing."""

    device: str
    """Its identifier."""

    reason: str

    def __str__(self) -> str:
        return f"{self.device} was lost: {self.reason}"


@dataclass(frozen=True)
class Timing:
    """The timing of a spec. Figures are nanoseconds per run of the block; None if the status has none."""

    key: str
    """Key of the spec."""

    work_key: str
    """Key of the work of the block."""

    op: str
    """Operators of the spec, or the name of an overhead."""

    calls: str
    """The block as JSON: enough to time it again."""

    variant: str
    state: CacheState
    threads: int
    runtime: str
    environment: str
    """Hash of the properties that comparable timings share, see `xsp.bench.environment`; empty if missing."""

    status: Status
    reason: str = ""
    """Why there is no figure, or a note on the figure."""

    samples: int = 0
    """Number of batches of calls from which the figures are computed."""

    trimmed_ns: float | None = None
    low_ns: float | None = None
    """Lower end of the 95 % interval of the trimmed mean; `high_ns` is the upper end."""

    high_ns: float | None = None
    least_ns: float | None = None
    host_ns: float | None = None
    """Time until the call returns; on a processor equal to `trimmed_ns`."""

    device_ns: float | None = None
    """Time on the device alone; None for a processor."""

    kernels: tuple[str, ...] = ()
    """Names of the kernels or primitives of one run, if they could be queried."""

    error_max: float | None = None
    """Largest difference of the variant's results from those in float64, relative to the largest result."""

    canary_ratio: float | None = None
    """Slowest over fastest round of fixed work in the sitting; 1.05 and above marks the sitting as disturbed."""

    taken_ns: int = 0
    """Time of measurement, in nanoseconds since the epoch."""

    xsp: str = ""

    cold_ns: float | None = None
    """Time on the device after its caches held other data, in another state than `cold`; None for a processor."""

    workspace_bytes: int | None = None
    """Memory beside inputs and outputs that a run holds at most, if the device knows it."""

    joules: float | None = None
    """Energy that the device uses per run while runs follow each other, of whole steps and with a counter."""

    @property
    def is_timed(self) -> bool:
        """Whether the figures may enter a total."""
        return self.status in TIMED and self.trimmed_ns is not None

    @property
    def half_ns(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low_ns is None or self.high_ns is None else (self.high_ns - self.low_ns) / 2


def missing_input_reason(block: Block) -> str:
    """Return the reason why no tensors can be made for a block; empty if its shapes and types are known."""
    tensors = [tensor for call in block.calls for tensor in (*call.inputs, *call.outputs) if tensor.bytes is None]
    if not tensors:
        return ""
    types = sorted({tensor.dtype for tensor in tensors if tensor.dtype is not None and tensor.shape is not None})
    return f"no inputs can be generated of type {types[0]}" if types else "shapes or types of its tensors are not known"


def slowdown_text(ratio: float) -> str:
    """Return a canary ratio in words, to follow "fixed work took".

    On a contended machine a ratio may be in the hundreds and still be correct: a call of 40 µs on several threads waits
    milliseconds for the thread whose core is taken by another process.
    """
    amount = f"{ratio:,.0f} times as long" if ratio >= 10 else f"{100 * (ratio - 1):.0f} % longer"
    return f"up to {amount} in its slowest round"


def slowed(timings: Iterable[Timing]) -> list[str]:
    """Return what slowed the device of some timings while they were taken, as it said, with the number of timings."""
    considered = list(timings)
    parts = Counter(
        part.removeprefix(SLOWED)
        for timing in considered
        for part in dict.fromkeys(timing.reason.split("; "))
        if part.startswith(SLOWED)
    )
    return [f"{part} while {count} of {len(considered)} were taken" for part, count in parts.most_common()]


def untimed(spec: Spec, status: Status = Status.MISSING, reason: str = "", environment: str = "") -> Timing:
    """Return the timing of a spec that has no figures."""
    return Timing(
        key=spec.key,
        work_key=spec.block.work_key,
        op=spec.op,
        calls=json.dumps(spec.block.to_plain(), separators=(",", ":")),
        variant=spec.variant,
        state=spec.state,
        threads=spec.threads,
        runtime=spec.runtime,
        environment=environment,
        status=status,
        reason=reason,
    )


def spec_of(timing: Timing) -> Spec:
    """Return the spec of a stored timing.

    Raises:
        ValueError: the stored calls are no block, or do not match the key.
    """
    try:
        spec = Spec(
            Block.from_plain(json.loads(timing.calls)), timing.variant, timing.state, timing.threads, timing.runtime
        )
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its block is damaged ({error})") from error
    if spec.key != timing.key or spec.block.work_key != timing.work_key:
        raise ValueError("its key does not match its calls: another version of xsp took it, or it was changed")
    return spec
