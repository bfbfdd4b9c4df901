"""Specs that a graph consists of, the order in which they are worth timing, and how a time budget is spent on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from xsp import plugins
from xsp.bench.environment import Environment
from xsp.bench.spec import AS_RUN, RUNTIMES, CacheState, Loss, Spec, Status, Timing, missing_input_reason, untimed
from xsp.bench.timings import Timings
from xsp.bench.turns import TurnLimits, Turns
from xsp.device.contract import Device
from xsp.device.processor import Processor
from xsp.errors import BenchError, DeviceError, nearest
from xsp.graph import work
from xsp.graph.blocks import LASTING, WEIGHT_BYTES, Block, block, windows
from xsp.graph.node import Graph, Node, NodeKind, Source
from xsp.processes import cores
from xsp.texts import counted, cut
from xsp.version import __version__

if TYPE_CHECKING:
    from xsp.bench.variants import Variant

Progress = Callable[[str, int, int], None]
"""Callback with the name of what is timed, the number of finished specs, and the total."""

SITTING_SIZE = 16
"""Most specs that take turns in one sitting."""

SECONDS_PER_SPEC = 0.4
"""Approximate seconds to time a spec; if less time is left than a full sitting takes, fewer specs take turns."""

MOST_NAMES = 5
"""Most operators that are named of blocks that were not timed, with at most `MOST_LETTERS` of each name."""

MOST_LETTERS = 40
MIN_SECONDS = 1.0
"""Least seconds for timing, however long the worker process took to start."""

ONNX_RUNTIME = "onnxruntime"
"""Name of a runtime, and of the library that it needs."""

OVERHEADS = ("overhead/module_call", "overhead/op_call")

ROUGH_FLOPS, ROUGH_BYTES, ROUGH_CALL_S = 50e9, 10e9, 5e-6
"""Rough rates and call overhead of a core, only good enough to decide what is timed first, and not used elsewhere."""

MAX_OP_LENGTH = 40

PRIVATE_BYTES = 1 << 20
"""Bytes of the caches that belong to one core, if the system does not report them."""

MOST_STATE = 2
"""Bytes of optimizer state per byte of weights if a trace does not report it: Adam's, the most of the common ones."""


def specs(
    graph: Graph,
    *,
    granularity: int = 1,
    stride: int | None = None,
    state: CacheState | str = CacheState.CHAIN,
    threads: int | None = None,
    variants: Sequence[str] = (AS_RUN,),
    runtime: str = "torch",
    environment: Environment | None = None,
) -> list[tuple[Spec, int]]:
    """Return the distinct specs of a graph in the order of first appearance, each with the number of its occurrences.

    Args:
        graph: the graph; if only the order of its calls is known, each call is a separate block.
        granularity: computing calls per block.
        stride: computing calls from the start of one block to the next; default: the granularity.
        state: state of the caches. `chain` becomes `warm` if the weights of the whole graph fit into the cores' private
            caches, where a step finds them.
        threads: number of threads; default: as many as the process may use, on an accelerator 1.
        variants: names, see `xsp.bench.variants`; each applies to the blocks that it can change.
        runtime: name in the entry points `xsp.runtimes`.
        environment: that of the timings, if they are of another device than the processor.

    Raises:
        GraphError: a granularity below 1.
        BenchError: there is no such variant.
    """
    state = effective_state(graph, CacheState(state), environment)
    threads = threads or default_threads(environment)
    counts: dict[str, int] = {}
    blocks: dict[str, Block] = {}
    for start, stop in windows(graph, granularity, stride):
        piece = block(graph, start, stop)
        blocks.setdefault(piece.work_key, piece)
        counts[piece.work_key] = counts.get(piece.work_key, 0) + 1
    return [
        (Spec(piece, variant, state, threads, runtime), counts[key])
        for key, piece in blocks.items()
        for variant in variants
        if variant == AS_RUN or _may_change(Spec(piece, variant, state, threads, runtime), environment)
    ]


def check_names(variants: Iterable[str] = (), runtimes: Iterable[str] = ()) -> None:
    """Check names of variants and of runtimes, for which no graph is needed.

    Raises:
        BenchError: there is no such variant or runtime, or the library of a runtime is not installed.
    """
    for name in variants:
        if name != AS_RUN:
            _variant(name)
    _check_runtimes(runtimes)


def _may_change(spec: Spec, environment: Environment | None) -> bool:
    """Return whether a variant may compute a block in a different way on the device of an environment.

    Raises:
        BenchError: there is no such variant.
    """
    variant = _variant(spec.variant)
    return variant.is_for(environment) and variant.may_change(spec)


def _variant(name: str) -> Variant:
    from xsp.bench.variants import PRECISIONS, VARIANTS, variant_by_name

    variant = variant_by_name(name)
    if variant is None:
        names = (AS_RUN, *VARIANTS, *PRECISIONS)
        raise BenchError(f"there is no variant {name!r}{nearest(name, names)}; there are {', '.join(names)}")
    return variant


def coverage(pairs: Iterable[tuple[Spec, int]], timings: Timings) -> tuple[float, float]:
    """Return the shares of calls, and of their expected time, that have a figure; 0 without calls.

    Args:
        pairs: specs, and the number of occurrences of each.
        timings: the existing timings.
    """
    rows = [
        (count, expected_seconds(spec, count), timings.get(spec.key))
        for spec, count in pairs
        if not spec.op.startswith("step::")
    ]
    timed_rows = [(count, value) for count, value, timing in rows if timing is not None and timing.is_timed]
    calls, expected = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return sum(row[0] for row in timed_rows) / (calls or 1), sum(row[1] for row in timed_rows) / (expected or 1)


def default_threads(environment: Environment | None = None) -> int:
    """Return the number of threads of timings: all cores; 1 if they are of a device that computes itself."""
    return cores() if environment is None or environment.device is None else 1


def effective_state(graph: Graph, state: CacheState, environment: Environment | None = None) -> CacheState:
    """Return the cache state of a graph's blocks: `chain` becomes `warm` if the caches hold the weights of a step.

    These are the cores' own caches, or the last level of the device of an environment.
    """
    if state is not CacheState.CHAIN:
        return state
    if graph.values:
        lasting_bytes = sum(
            {value.storage: value.bytes or 0 for value in graph.values if value.role in LASTING}.values()
        )
    elif isinstance(weights := graph.settings.get(WEIGHT_BYTES), int):
        lasting_bytes = weights * (1 + MOST_STATE if graph.settings.get("train") else 1)
    else:
        return state
    inner_bytes = None if environment is None else environment.inner_cache_bytes
    return state if lasting_bytes > (private_bytes() if inner_bytes is None else inner_bytes) else CacheState.WARM


def private_bytes() -> int:
    """Return the bytes of the largest cache below the last level."""
    levels = Processor().caches()
    inner_sizes = [size for level, size in levels if level < max(level for level, _ in levels)]
    return max(inner_sizes, default=PRIVATE_BYTES)


def fill(
    requests: Iterable[Spec | tuple[Spec, int]],
    timings: Timings,
    seconds: float,
    progress: Progress = lambda name, done, total: None,
    *,
    again: bool = False,
    limits: TurnLimits | None = None,
    in_order: bool = False,
    on_start: Callable[[float], None] = lambda seconds: None,
    device: Device | None = None,
) -> list[Timing]:
    """Time specs that have no timing yet, the most expensive first, and keep the timings.

    The order follows from the number of occurrences times the roofline time. Specs for which the time was not enough
    stay missing. The `overheads` are timed after the first one, once for each number of threads. Specs that no process
    could time (`refusal`) fail at once. However small the budget, at least one of the others is timed: `MIN_SECONDS` is
    left for it.

    Args:
        requests: specs, or pairs of a spec and the number of its occurrences, as `specs` returns them.
        timings: the existing timings, to which new ones are added during the work.
        seconds: time to spend, including the start of processes.
        progress: see `Progress`.
        again: repeat existing timings too.
        limits: limits of one spec, see `xsp.bench.turns`.
        in_order: time specs in the given order instead of the most expensive first.
        on_start: called with the seconds that it took until the first process was ready to time.
        device: where they are timed; default: the processor. `timings` are of its environment. If it is lost, the rest
            stays missing, and `timings.loss` has the reason.

    Returns:
        The new timings of the wanted specs, including failed ones.

    Raises:
        BenchError: no time, no such runtime, torch is not installed, or timings cannot be written.
        DeviceError: the device cannot be used, or nothing could be timed because one that transfers need cannot.
    """
    device, timings.loss = device or Processor(), None
    if not 0 < seconds < math.inf:
        raise BenchError(f"a budget of {seconds:g} s is too short: give seconds above 0, --budget 60s")
    pairs: dict[str, tuple[Spec, int]] = {}
    for request in requests:
        spec, count = request if isinstance(request, tuple) else (request, 1)
        pairs.setdefault(spec.key, (spec, count))
    _check_runtimes({spec.runtime for spec, _ in pairs.values()})
    ordered = missing(pairs.values(), timings if not again else None)
    if ordered:
        timings.check_writable()
    if in_order:
        places = {key: position for position, key in enumerate(pairs)}
        ordered.sort(key=lambda spec: places[spec.key])
    results: list[Timing] = []
    refused_now: dict[str, None] = {}

    def store(batch: list[Timing]) -> None:
        refused_now.update((timing.reason, None) for timing in batch if timing.status is Status.MISSING)
        batch = [timing for timing in batch if timing.status is not Status.MISSING]
        timings.add(batch)
        results.extend(replace(timing, environment=timings.environment.hash) for timing in batch)

    refusals = [untimed(spec, Status.FAILED, reason) for spec in ordered if (reason := refusal(spec))]
    store([replace(timing, taken_ns=time.time_ns(), xsp=__version__) for timing in refusals])
    refused = {timing.key for timing in results}
    ordered = [spec for spec in ordered if spec.key not in refused]
    thread_counts = {spec.threads for spec in ordered if spec.runtime != ONNX_RUNTIME and device.is_host}
    overhead_specs = [spec for threads in thread_counts for spec in overheads(threads)]
    overhead_specs = [spec for spec in overhead_specs if timings.get(spec.key) is None and spec.key not in pairs]
    ordered[1:1] = overhead_specs  # if there is time for only one, it is a requested one
    total = len(refused) + len(ordered)
    deadline = time.monotonic() + seconds
    progress("starting", len(results), total)
    for index, threads in enumerate(dict.fromkeys(spec.threads for spec in ordered)):  # a process has one pool size
        if index and time.monotonic() >= deadline:
            break
        pending = [spec for spec in ordered if spec.threads == threads]
        with Turns(threads, limits or TurnLimits(), device) as turns:
            startup = turns.start()
            if not index:
                on_start(startup)
                deadline = max(deadline, time.monotonic() + MIN_SECONDS)
            while pending and not turns.lost and (remaining := deadline - time.monotonic()) > 0:
                sitting = _sitting(pending, turns.memory_bytes, remaining, turns.rotated_bytes)
                pending = pending[len(sitting) :]
                store(turns.sit(sitting, deadline, partial(_report, progress, len(results), total), seed=len(results)))
            if turns.lost:
                timings.loss = Loss(device.id, turns.lost)
                break
    if refused_now and not any(timing.key in pairs for timing in results):
        raise DeviceError("; ".join(refused_now))
    timings.untimed += [f"{reason}; what needs it was not timed: run it again" for reason in refused_now]
    if timings.loss is not None:
        done = {timing.key for timing in results}
        ops = [spec.op for spec in ordered if spec.key in pairs and spec.key not in done]
        timings.untimed.insert(0, f"{timings.loss}; all timings until then are kept; not timed: {_named(ops)}")
    progress("timed", len(results), total)
    return [timing for timing in results if timing.key in pairs]


def _named(ops: Sequence[str]) -> str:
    """Return how many blocks have these operators, and the first of them."""
    if not ops:
        return "nothing else"
    names = [cut(op.replace("aten::", ""), MOST_LETTERS) for op in dict.fromkeys(ops)]
    shown = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    return f"{counted(len(ops), 'block')} ({shown}), run it again"


def refusal(spec: Spec) -> str:
    """Return the reason why no machine could time a spec, as far as known beforehand; empty for most specs."""
    if spec.runtime not in ("torch", ONNX_RUNTIME):
        return ""
    nodes = [call.op for call in spec.block.calls if call.op.startswith("onnx::")]
    if nodes and spec.runtime == "torch":
        return f"{nodes[0]} is an ONNX node, not an operator of torch"
    return missing_input_reason(spec.block)


def runtime_of(graph: Graph) -> str:
    """Return the name of the runtime that runs a graph's calls."""
    return ONNX_RUNTIME if graph.source is Source.ONNX else "torch"


def _check_runtimes(names: Iterable[str]) -> None:
    available = plugins.names(RUNTIMES)
    for name in names:
        if name == ONNX_RUNTIME and not has_onnx_runtime():
            raise BenchError(
                "ONNX nodes are timed by ONNX Runtime, which is not installed: pip install 'xsp[onnxruntime]'"
            )
        if name not in available:
            raise BenchError(
                f"there is no runtime {name!r}{nearest(name, available)}; there are {', '.join(available) or 'none'}; "
                "after an update of xsp, reinstall it: pip install -e ."
            )


def has_onnx_runtime() -> bool:
    """Return whether ONNX Runtime, which times nodes of ONNX, is installed."""
    return find_spec(ONNX_RUNTIME) is not None


def missing(pairs: Collection[tuple[Spec, int]], timings: Timings | None) -> list[Spec]:
    """Return specs without a timing, most valuable first; specs that needed too much memory before come last.

    Args:
        pairs: specs, and the number of occurrences of each.
        timings: the existing timings; None for none.
    """
    timings_by_key = {} if timings is None else {spec.key: timings.get(spec.key) for spec, _ in pairs}
    untimed_pairs = [(spec, count) for spec, count in pairs if not _is_known(timings_by_key.get(spec.key))]
    return [
        spec
        for spec, _ in sorted(
            untimed_pairs, key=lambda pair: (_was_too_large(timings_by_key.get(pair[0].key)), -expected_seconds(*pair))
        )
    ]


def _is_known(timing: Timing | None) -> bool:
    """Return whether a spec need not be timed: specs that failed under another version of xsp are tried again.

    Specs that needed too much memory are tried again too: the available memory depended on what else ran.
    """
    if timing is None or _was_too_large(timing):
        return False
    return timing.is_timed or timing.xsp == __version__


def _was_too_large(timing: Timing | None) -> bool:
    return timing is not None and timing.status is Status.TOO_LARGE


def expected_seconds(spec: Spec, count: int) -> float:
    """Return the seconds of a step that a spec accounts for, by a rough roofline; it decides what is timed first.

    Whole steps (`xsp.bench.steps`) come before all calls.
    """
    if spec.op.startswith("step::"):
        return math.inf
    total = 0.0
    for call in spec.block.calls:
        node = Node(call, "", NodeKind.COMPUTE)
        total += max((work.flops_of(node) or 0) / ROUGH_FLOPS, (work.bytes_of(node) or 0) / ROUGH_BYTES, ROUGH_CALL_S)
    return count * (total or ROUGH_CALL_S)


def overheads(threads: int) -> list[Spec]:
    """Return the specs, without calls, of the overheads of a module call and an operator call."""
    empty = Block((), ())
    return [Spec(empty, name, CacheState.WARM, threads) for name in OVERHEADS]


def _sitting(specs: Sequence[Spec], memory_bytes: int, seconds: float, rotated_bytes: int | None = None) -> list[Spec]:
    """Return the first specs that take turns: few enough to fit into memory together and into the given seconds."""
    limit = min(SITTING_SIZE, max(1, int(seconds / SECONDS_PER_SPEC)))
    sitting: list[Spec] = []
    total_bytes = 0
    for spec in specs[:limit]:
        total_bytes += footprint(spec, rotated_bytes)
        if sitting and total_bytes > memory_bytes // 2:
            break
        sitting.append(spec)
    return sitting


def footprint(spec: Spec, rotated_bytes: int | None = None) -> int:
    """Return the approximate bytes that a spec takes while it is timed: inputs, copies of weights, and outputs."""
    if rotated_bytes is None:
        rotated_bytes = Processor().rotated_bytes()
    inputs = sum(tensor.bytes or 0 for tensor in spec.block.external.values())
    outputs = sum(tensor.bytes or 0 for call in spec.block.calls for tensor in call.outputs)
    return 2 * inputs + outputs + (0 if spec.state is CacheState.WARM else rotated_bytes)


def _report(progress: Progress, offset: int, total: int, spec: Spec, done: int) -> None:
    op = spec.op
    progress(op if len(op) <= MAX_OP_LENGTH else op[: MAX_OP_LENGTH - 1] + "…", offset + done, total)
