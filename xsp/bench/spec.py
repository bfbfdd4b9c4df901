"""What is timed, and what came of it: plain values, without torch and without the table engine."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xsp.graph.blocks import Block

AS_RUN = "as-run"
"""The variant that a framework takes by itself."""


OTHER_NUMBERS = frozenset(["autocast-bfloat16"])
"""Variants that compute in another precision: their times enter no bound, and their errors are their results."""

RUNTIMES = "xsp.runtimes"
"""Entry points of what runs blocks: classes with `prepare`, as `xsp.bench.torchcalls.Torch` has it."""


class CacheState(str, enum.Enum):
    """Where the inputs of a block are when it begins."""

    WARM = "warm"
    """Weights and activations as the call before left them."""

    CHAIN = "chain"
    """As in a step: weights come from a set of copies larger than the caches of the cores, activations are hot."""

    COLD = "cold"
    """The caches hold something else."""


class Status(str, enum.Enum):
    """The outcome of timing a spec. A missing time is None, never 0."""

    OK = "ok"
    MISSING = "missing"
    """Nobody has timed it here."""

    FAILED = "failed"
    """It cannot be run by itself; the reason says why."""

    TIMED_OUT = "timed-out"
    TOO_LARGE = "too-large"
    """It needs more memory than it may take."""

    DIFFERENT = "different"
    """A variant whose results are not those of the block: its time never enters a bound."""

    UNSTABLE = "unstable"
    """Timed, and the interval is wider than asked for when the time was over."""

    QUICK = "quick"
    """Timed, and shorter than the overhead of a call: a figure at the floor."""


TIMED = frozenset([Status.OK, Status.UNSTABLE, Status.QUICK])
"""Statuses whose figures may enter a total. `DIFFERENT` has figures too, of something else."""


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
        """Equal for equal work under equal conditions: 32 hexadecimal digits."""
        text = json.dumps([self.block.work_key, self.variant, self.state.value, self.threads, self.runtime])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def op(self) -> str:
        """The operators of the block; of an overhead, which has none, its name."""
        return self.block.op or self.variant

    def to_plain(self) -> dict[str, Any]:
        """Return the spec as JSON can hold it."""
        return {
            "block": self.block.to_plain(),
            "variant": self.variant,
            "state": self.state.value,
            "threads": self.threads,
            "runtime": self.runtime,
        }

    @classmethod
    def from_plain(cls, found: Any) -> Spec:
        """Return the spec that `to_plain` made JSON of.

        Raises:
            LookupError, TypeError, ValueError: it did not, or somebody changed it.
        """
        return cls(
            Block.from_plain(found["block"]),
            str(found["variant"]),
            CacheState(found["state"]),
            int(found["threads"]),
            str(found["runtime"]),
        )


@dataclass(frozen=True)
class Timing:
    """The timing of a spec. Figures are nanoseconds per run of the block; None if the status has none."""

    key: str
    """Of the spec."""

    work_key: str
    """Of the block."""

    op: str
    """Of the spec: operators, or the name of an overhead."""

    calls: str
    """The block as JSON: enough to time it again."""

    variant: str
    state: CacheState
    threads: int
    runtime: str
    environment: str
    """Hash of what has to be equal for timings to be compared, see `xsp.bench.environment`; empty where missing."""

    status: Status
    reason: str = ""
    """Why there is no figure, or what is to be known of it."""

    samples: int = 0
    """Batches of calls that the figures are of."""

    trimmed_ns: float | None = None
    low_ns: float | None = None
    """Both ends of the 95 % interval of the trimmed mean."""

    high_ns: float | None = None
    least_ns: float | None = None
    host_ns: float | None = None
    """Until the call returns; of a processor the same as the time."""

    device_ns: float | None = None
    """Of a device alone; None for a processor."""

    kernels: tuple[str, ...] = ()
    """Names of the kernels or primitives of one run, where they could be asked for."""

    error_max: float | None = None
    """Largest difference of the variant's results from those in float64, in parts of the largest result."""

    canary_ratio: float | None = None
    """How much slower fixed work was in the same sitting than in its best round; 1.05 and above marks the sitting."""

    taken_ns: int = 0
    """When, since the epoch."""

    xsp: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether the figures may enter a total."""
        return self.status in TIMED and self.trimmed_ns is not None

    @property
    def half_ns(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low_ns is None or self.high_ns is None else (self.high_ns - self.low_ns) / 2


def without_inputs(block: Block) -> str:
    """Return why no tensors can be made for a block; empty where its shapes and types are known."""
    unlike = [each for call in block.calls for each in (*call.inputs, *call.outputs) if each.bytes is None]
    if not unlike:
        return ""
    types = sorted({each.dtype for each in unlike if each.dtype is not None and each.shape is not None})
    return f"there are no inputs of type {types[0]}" if types else "shapes or types of its tensors are not known"


def slowed(ratio: float) -> str:
    """Return what a canary ratio says, to follow "fixed work took".

    On a contended machine a ratio may be in the hundreds, and is true: a call of 40 µs on several threads waits
    milliseconds for the thread whose core another process has.
    """
    much = f"{ratio:,.0f} times as long" if ratio >= 10 else f"{100 * (ratio - 1):.0f} % longer"
    return f"up to {much} in its slowest round"


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
    """Return the spec that a timing is of, as it was stored.

    Raises:
        ValueError: what is stored is no block, or not the one that the key is of.
    """
    try:
        spec = Spec(
            Block.from_plain(json.loads(timing.calls)), timing.variant, timing.state, timing.threads, timing.runtime
        )
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no block ({error})") from error
    if spec.key != timing.key or spec.block.work_key != timing.work_key:
        raise ValueError("its key is not that of its calls: another version of xsp took it, or somebody changed it")
    return spec
