"""Verdict on a measurement: whether sharing pays, in one sentence with the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xsp import summary
from xsp.comparison import evidence
from xsp.share import estimate
from xsp.share.loadworker import ATTACH, MMAP, PICKLE, WAYS
from xsp.share.measuring import COLD, TOGETHER, WARM, Measured
from xsp.share.shelf import size_text
from xsp.share.weights import Tensor

PAYS, DOES_NOT, CANNOT_TELL = "pays", "does not pay", "cannot tell"

MATTERS = 0.05
"""Smallest gain that counts: in time, as a share of the time of `load_file`; in memory per process, as a share of the
weights."""

FEW_LARGE = 0.5
"""If less than this share of the weights has large pages, the text reports it: it explains a slower first call."""


class Verdict(NamedTuple):
    """The verdict on a measurement."""

    verdict: str
    """`PAYS`, `DOES_NOT` or `CANNOT_TELL`, against `load_file`."""

    sentence: str
    from_load_file: int | None
    """Number of processes from which on `attach` takes less memory than `load_file`; None if never, or not measured."""

    from_torch_load: int | None


def pays_from(found: Measured, other: str) -> int | None:
    """Return the number of processes from which on `attach` takes less memory than another way.

    Returns:
        None if there is no such number, by `MATTERS`, or if the system does not report memory.
    """
    if ATTACH not in found.memory or other not in found.memory:
        return None
    ours, theirs = found.memory[ATTACH], found.memory[other]
    gain = theirs.each - ours.each
    if gain < MATTERS * found.nbytes:
        return None
    return max(1, int((ours.one - theirs.one) // gain) + 2)


def difference(found: Measured, state: str) -> tuple[evidence.Evidence, str]:
    """Return the difference of `attach` from `load_file`, in ns of loading and the first call, and its verdict."""
    test = evidence.turn_repeats(found.most) if state == WARM else evidence.RUNS
    a, b = found.taken[MMAP, state].total_ns, found.taken[ATTACH, state].total_ns
    result = test.evidence(a, b)
    return result, test.verdict(result, test.adjusted([result.p])[0], min(len(a), len(b)))


def judged(found: Measured) -> Verdict:
    """Return the verdict against `load_file` with a warm store, because `load_file` shares its pages as well."""
    result, outcome = difference(found, WARM)
    memory = pays_from(found, MMAP)
    gain = f"{_ms(-result.change)} ms [{_ms(-(result.high or 0))} … {_ms(-(result.low or 0))}] of {_ms(result.a)} ms"
    kind = CANNOT_TELL
    if outcome == evidence.FASTER and -result.change >= MATTERS * result.a:
        kind, sentence = PAYS, f"attach saves {gain}"
    elif memory is not None:
        kind, sentence = PAYS, f"in memory, from {_count(memory)} on; in time, attach saves over load_file {gain}"
    elif result.low is not None and -result.low < MATTERS * result.a:
        kind, sentence = DOES_NOT, f"attach takes as long as load_file or longer: it saves {gain}"
        if outcome == evidence.SLOWER:
            sentence = f"attach takes longer than load_file: it saves {gain}"
        elif result.change < 0:
            sentence = f"attach saves less than {100 * MATTERS:.0f} % over load_file: {gain}"
    else:
        sentence = (
            f"cannot tell: {found.turns} turns do not show whether attach saves {100 * MATTERS:.0f} % or more "
            f"over load_file: it saves {gain}"
        )
    return Verdict(kind, sentence if kind == CANNOT_TELL else f"{kind}: {sentence}", memory, pays_from(found, PICKLE))


def text(found: Measured) -> str:
    """Return the measurement as text."""
    size = f"{size_text(found.nbytes)}, {found.tensors} tensors"
    module = f" in {found.module}" if found.module and found.module != found.source else ""
    verdict = judged(found)
    use = "first call" if found.module else "one read"
    lines = [
        f"{found.source}{module}: {size}; {found.turns} turns of at most {found.most}, each in a new process",
        "",
        verdict.sentence,
        *_memory_lines(found, verdict),
        "",
        f"{'ms':22} {'load':>22} {use:>22} {'both':>22}",
    ]
    for (way, state), taken in found.taken.items():
        figures = [_figure(values) for values in (taken.load_ns, taken.call_ns, taken.total_ns)]
        lines.append(f"{way + ', ' + state:22} " + " ".join(f"{figure:>22}" for figure in figures))
    if (ATTACH, COLD) in found.taken:
        result, outcome = difference(found, COLD)
        where = (
            f" [{_ms(-result.high)} … {_ms(-result.low)}]" if result.low is not None and result.high is not None else ""
        )
        lines += ["", f"cold, attach saves over load_file {_ms(-result.change)} ms{where}: {outcome}"]
    lines += [
        "",
        "Trimmed means with 95 % intervals. Warm: the file is in memory and in the store. Cold: in neither;",
    ]
    lines += [f"nothing was measured cold: {found.not_cold}" if found.not_cold else "the store copies it first."]
    if found.large_bytes is not None and found.large_bytes < FEW_LARGE * found.nbytes:
        lines += [
            "",
            f"Of the weights {size_text(found.large_bytes)} have large pages in the store, the rest pages of 4 KiB,",
            "each touched by the first call; a file in the page cache may have larger ones. See docs/use/share.md.",
        ]
    return "\n".join(lines)


def _memory_lines(measured: Measured, verdict: Verdict) -> list[str]:
    if len(measured.memory) < len(WAYS):
        return ["memory: not reported by the system (no /proc/PID/smaps_rollup)"]
    lines = [f"memory, without libraries      1 process   each further   PSS of one of {TOGETHER}"]
    for way, memory in measured.memory.items():
        further = size_text(round(max(0.0, memory.each)))
        lines.append(f"  {way:26} {size_text(memory.one):>11} {further:>14}   {size_text(memory.pss):>13}")
    for way, count in ((MMAP, verdict.from_load_file), (PICKLE, verdict.from_torch_load)):
        less = f"from {_count(count)} on" if count else "for no number of processes"
        lines.append(f"  attach, with the store, takes less than {way} {less}")
    return lines


def plain(found: Measured) -> dict[str, Any]:
    """Return the measurement for JSON; times in nanoseconds, memory in bytes."""
    verdict = judged(found)
    return {
        "source": found.source,
        "module": found.module or None,
        "nbytes": found.nbytes,
        "tensors": found.tensors,
        "turns": found.turns,
        "most_turns": found.most,
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "less_memory_than_load_file_from": verdict.from_load_file,
        "less_memory_than_torch_load_from": verdict.from_torch_load,
        "times": [
            {"way": way, "state": state, "load_ns": taken.load_ns, "call_ns": taken.call_ns}
            for (way, state), taken in found.taken.items()
        ],
        "memory": [{"way": way, **memory._asdict()} for way, memory in found.memory.items()],
        "not_cold": found.not_cold or None,
        "large_bytes": found.large_bytes,
    }


def _figure(values: list[float]) -> str:
    interval = summary.interval(values)
    between = f" [{_ms(interval.lo)} … {_ms(interval.hi)}]" if interval is not None else ""
    return f"{_ms(summary.trimmed_mean(values))}{between}"


def _count(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def _ms(ns: float) -> str:
    value = ns / 1e6
    text = f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return text.removeprefix("-") if float(text) == 0 else text


# --- estimates --------------------------------------------------------------------------------------------------------


def estimate_text(source: str, tensors: Sequence[Tensor], known: estimate.Constants) -> str:
    """Return an estimate as text: over each way, and by parts of the model."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    lines = [
        f"{source}: {size_text(nbytes)}, {len(tensors)} tensors; an estimate of loading, without a first call",
        "",
        f"{'ms':22} {'without a store':>16} {'attach':>10} {'saved':>10}",
    ]
    for row in estimate.estimate_savings(nbytes, len(tensors), known):
        figures = f"{_ms(row.other_ns):>16} {_ms(row.attach_ns):>10} {_ms(row.saved_ns):>10}"
        lines.append(f"{row.way + ', ' + row.state:22} {figures}  {PAYS if row.pays else DOES_NOT}")
    lines += [
        "",
        "Saved over load_file, torch.load, warm, by the first part of the names; without the request to the store:",
    ]
    for name, (size, count) in estimate.groups(tensors).items():
        saved = [_ms(value) for value in _group(size, count, known).values()]
        lines.append(f"  {name[:28]:28} {size_text(size):>10} {count:>5} tensors  {', '.join(saved)} ms")
    cost = known.costs[ATTACH]
    lines += [
        "",
        f"attach takes {cost.fixed_ns / 1e6:.2f} ms and {cost.tensor_ns / 1e3:.1f} µs per tensor here; load_file "
        f"{known.costs[MMAP].fixed_ns / 1e6:.2f} and {known.costs[MMAP].tensor_ns / 1e3:.1f},",
        f"torch.load {known.costs[PICKLE].fixed_ns / 1e6:.2f} and {known.costs[PICKLE].tensor_ns / 1e3:.1f}, plus "
        "the copy. Cold times do not include reading from the disk, which",
        "all ways do. For memory and the first call: xsp share measure.",
    ]
    return "\n".join(lines)


def _group(nbytes: int, count: int, constants: estimate.Constants) -> dict[str, float]:
    """Return the saving for a part of the weights in nanoseconds, by way, warm, without the request to the store."""
    rows = [row for row in estimate.estimate_savings(nbytes, count, constants) if row.state == WARM]
    fixed = constants.costs[ATTACH].fixed_ns
    return {row.way: row.saved_ns - constants.costs[row.way].fixed_ns + fixed for row in rows}


def estimate_plain(source: str, tensors: Sequence[Tensor], known: estimate.Constants) -> dict[str, Any]:
    """Return an estimate for JSON; times in nanoseconds."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return {
        "source": source,
        "nbytes": nbytes,
        "tensors": len(tensors),
        "ways": [
            {
                "way": row.way,
                "state": row.state,
                "other_ns": row.other_ns,
                "attach_ns": row.attach_ns,
                "saved_ns": row.saved_ns,
                "pays": row.pays,
            }
            for row in estimate.estimate_savings(nbytes, len(tensors), known)
        ],
        "groups": [
            {"name": name, "nbytes": size, "tensors": count, "saved_ns": _group(size, count, known)}
            for name, (size, count) in estimate.groups(tensors).items()
        ],
        "costs": {way: cost._asdict() for way, cost in known.costs.items()},
    }
