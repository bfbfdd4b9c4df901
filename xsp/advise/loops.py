"""Loops over single elements or single samples, where one call could process all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from xsp.advise import calls
from xsp.advise.advice import Advice, Asked, Interval, Place
from xsp.advise.calls import Call
from xsp.advise.registry import question
from xsp.schema import Level

SYNC = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")

LEAST_TURNS = 8
"""Minimum number of equal calls in one place to be a loop: reads of single values, concatenations, cells."""

LEAST_SAMPLES = 4

BETWEEN_MS = 0.02
"""Maximum Python time, in milliseconds, that counts for a read in a loop: longer time is other work."""

LEAST_PERCENT = 2.0
"""Minimum percentage of the step for a loop to be worth a line."""


@question("synchronisations", "Where does Python read single values?", number="Q4")
def synchronisations(asked: Asked) -> Iterator[Advice]:
    """Reads of single values (`item()`, `if tensor:`, `float(tensor)`) in loops, with the indexing before them.

    Reads by optimizers are left to the question `optimizer`.
    """
    whole = calls.step_ms(asked)
    found: list[tuple[list[Call], list[Call], float]] = []
    for around in calls.every(asked):
        reads = [each for each in around.inside if each.name in SYNC and each.phase != "optimizer"]
        if not around.is_op and len(reads) >= LEAST_TURNS:
            found.append((reads, *_with_indexing(around, reads)))
    reads = [each for those, *_ in found for each in those]
    parts = [each for _, those, _ in found for each in those]
    ms = sum(each.ns for each in parts) / 1e6 + sum(gaps for *_, gaps in found)
    if not reads or 100 * ms / whole < LEAST_PERCENT or ms < calls.LEAST_MS:
        return
    ends = calls.ends(asked, parts)
    once = ms * (1 - len(found) / len(reads))
    yield Advice(
        "synchronisations",
        f"{len(reads):,} single values are read in loops, in {len(found)} place{'s' * (len(found) > 1)}",
        calls.places(reads),
        calls.interval(once, ends).within(whole),
        ends is None,
        100 * once / whole,
        (
            f"reads, the indexing before them and the Python code in between take {ms:.3g} ms of a step",
            "on a device each read also waits for all work before it",
        ),
        "compute with the whole tensor, and read the result once: .tolist(), .sum().item()",
    )


def _with_indexing(around: Call, reads: Sequence[Call]) -> tuple[list[Call], float]:
    """Return the reads with the view calls before them, and the milliseconds of Python time between all these calls."""
    kept: list[Call] = []
    gaps, last_ns, pending, wanted = 0.0, None, [], set(reads)
    for each in around.inside:
        if each in wanted or not each.computes:
            pending.append(each)
            if each in wanted:
                for one in pending:
                    if last_ns is not None:
                        gaps += min(BETWEEN_MS, max(0.0, (one.start_ns - last_ns) / 1e6))
                    last_ns = one.end_ns
                kept += pending
                pending = []
        else:
            pending, last_ns = [], each.end_ns
    return kept, gaps


@question("samples", "Is a batch computed sample by sample?", number="Q4")
def samples(asked: Asked) -> Iterator[Advice]:
    """A module or an operator called once for each sample of the batch that the enclosing module was given.

    The time of all calls but one can be gained if one call for the batch takes no longer than a call for one sample.
    """
    whole = calls.step_ms(asked)
    for around, those, count in _loops(asked):
        ms = sum(each.ns for each in those) / 1e6
        gain = ms * (1 - 1 / count)
        if 100 * gain / whole < LEAST_PERCENT or gain < calls.LEAST_MS:
            continue
        ends = calls.ends(asked, those)
        names = list(dict.fromkeys(each.name for each in those))
        shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        shape = "×".join(map(str, those[0].first_shape or ()))
        yield Advice(
            "samples",
            f"{around} calls {shown} {count} times with one sample each ({shape})",
            tuple(_place(name, [each for each in those if each.name == name]) for name in names),
            Interval(gain * (ends[0] if ends else 1.0), gain, gain * (ends[1] if ends else 1.0)).within(whole),
            True,
            100 * gain / whole,
            (f"{len(those):,} calls take {ms:.3g} ms; {count} samples in one call may take as long as one of them",),
            "pass the whole batch in one call, or use torch.vmap",
            None,
        )


@question("growing", "Is a tensor copied again to append to it?", number="Q4")
def growing(asked: Asked) -> Iterator[Advice]:
    """Concatenations in a loop that append to the result of the previous one, so that all of it is copied each time."""
    whole = calls.step_ms(asked)
    found = [those for around in calls.every(asked) if not around.is_op for those in _grown(around)]
    again = [each for those in found for each in those[:-1]]
    ms = sum(each.ns for each in again) / 1e6
    if ms < calls.LEAST_MS or 100 * ms / whole < LEAST_PERCENT:
        return
    yield Advice(
        "growing",
        _growth(found),
        calls.places(again),
        calls.interval(ms, calls.ends(asked, again)).within(whole),
        False,
        100 * ms / whole,
        (f"all but the last{' of each' * (len(found) > 1)} take {ms:.3g} ms of a step",),
        "keep the parts in a list and call torch.cat once, or write into a preallocated tensor",
    )


def _growth(found: Sequence[Sequence[Call]]) -> str:
    """Return what grows, and by how many concatenations, in words."""
    fewest, most = min(map(len, found)), max(map(len, found))
    counts = str(most) if fewest == most else f"{fewest} to {most}"
    if len(found) == 1:
        return f"a tensor grows by {counts} concatenations, each of which copies all previous parts"
    return f"{len(found)} tensors grow by {counts} concatenations each, and each of these copies all previous parts"


def _grown(around: Call) -> Iterator[list[Call]]:
    """Yield chains of concatenations in which the first or last input is as large as the previous one's result."""
    chain: list[Call] = []
    held = 0
    for each in around.inside:
        sizes = _sizes(each) if each.name in ("aten::cat", "aten::concat") else []
        if len(sizes) < 2:
            continue
        if not chain or held not in sizes[:1] + sizes[-1:]:
            if len(chain) >= LEAST_TURNS:
                yield chain
            chain = []
        chain.append(each)
        held = sum(sizes)
    if len(chain) >= LEAST_TURNS:
        yield chain


def _sizes(call: Call) -> list[int]:
    """Return the number of elements of each tensor in a call's first argument, a list of tensors."""
    first = call.shapes[0] if call.shapes else None
    known = isinstance(first, list) and all(isinstance(each, list) for each in first)
    return [math.prod(each) for each in first if each] if known and isinstance(first, list) else []


NARROW_SHARE = 0.5
"""Maximum expected time of one layer in place of linear layers that take the same tensor, as a share of their time."""

LEAST_LAYERS = 3


@question("narrow-layers", "Do several linear layers, each too narrow to be fast, take the same tensor?", number="Q5")
def narrow_layers(asked: Asked) -> Iterator[Advice]:
    """Linear layers in one module that take the same tensor: one layer with all their outputs is one product.

    Describing steps record which tensors are the same (`xsp.schema.GIVEN`). The expected time of the one layer is that
    of its multiplications or of its memory traffic, whichever is longer, at the best rates of the step's linear layers.
    """
    whole = calls.step_ms(asked)
    linear = [each for each in calls.every(asked) if each.type == "Linear" and each.level == Level.LAYER]
    timed = [each for each in linear if each.ns > 0]
    rates = [max((_work(each)[what] / each.ns for each in timed), default=0.0) for what in (0, 1)]
    found: dict[str, list[list[Call]]] = {}
    for those in _of_one_tensor(linear):
        if 0 < _together_ns(those, rates) < NARROW_SHARE * sum(each.ns for each in those):
            found.setdefault(those[0].around.type or "the step" if those[0].around else "the step", []).append(those)
    for name, several in found.items():
        every = [each for those in several for each in those]
        nodes = calls.gradients(asked, every)
        forward_ms, backward_ms = (sum(each.ns for each in those) / 1e6 for those in (every, nodes))
        ms = forward_ms + backward_ms
        gain = ms * (1 - sum(_together_ns(those, rates) for those in several) / 1e6 / forward_ms)
        if gain < calls.LEAST_MS or 100 * gain / whole < LEAST_PERCENT:
            continue
        yield Advice(
            "narrow-layers",
            f"{len(several[0])} linear layers take the same tensor in {name}"
            + (f", in {len(several)} places" if len(several) > 1 else ""),
            calls.places(every),
            calls.interval(gain, calls.ends(asked, [*every, *nodes])).within(whole),
            True,
            100 * gain / whole,
            (
                f"{len(every)} calls{' and their gradients' * bool(nodes)} take {ms:.3g} ms, {ms - gain:.3g} ms at the "
                "best rates of linear layers in the step",
            ),
            "one Linear with the outputs of all, then .chunk or .view; its weight is their weights, concatenated",
        )


def _of_one_tensor(linear: Sequence[Call]) -> Iterator[list[Call]]:
    """Yield groups of layers that are given the same tensor inside the same call."""
    groups: dict[tuple[str | None, tuple[int, ...]], list[Call]] = {}
    for each in linear:
        if each.given and each.phase != "backward":
            groups.setdefault((each.around.span_id if each.around else None, each.given), []).append(each)
    for those in groups.values():
        if len({each.name for each in those}) >= LEAST_LAYERS:
            yield those


def _together_ns(those: Sequence[Call], rates: Sequence[float]) -> float:
    """Return the expected ns of one layer in place of several that take the same tensor; 0 if unknown."""
    work = [_work(each) for each in those]
    if not all(products for products, _ in work) or not all(rates):
        return 0.0
    given = math.prod(those[0].first_shape or (0,)) * (len(those) - 1)  # reads of the input that one layer saves
    return max(sum(products for products, _ in work) / rates[0], (sum(size for _, size in work) - given) / rates[1])


def _work(layer: Call) -> tuple[int, int]:
    """Return a linear layer's number of multiplications and of elements read or written; zeros if unknown."""
    for each in layer.inside:
        if each.name == "aten::linear" and each.first_shape and len(each.shapes) > 1:
            weight = each.shapes[1]
            if isinstance(weight, list) and len(weight) == 2 and all(type(size) is int for size in weight):
                outputs, inputs = (int(str(size)) for size in weight)
                rows = math.prod(each.first_shape[:-1])
                return rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs
    return 0, 0


CELLS = ("LSTMCell", "GRUCell", "RNNCell")


@question("recurrence", "Is a recurrent layer a loop over its cell?", number="Q5")
def recurrence(asked: Asked) -> Iterator[Advice]:
    """PyTorch's recurrent cells called once for each time step, where one call of the layer processes all of them."""
    whole = calls.step_ms(asked)
    found: dict[tuple[str, str], list[Call]] = {}
    for around in calls.every(asked):
        cells = [each for each in around.inside if each.type in CELLS]
        for each in cells:
            found.setdefault((each.name, str(each.type)), []).append(each)
    for (name, kind), those in found.items():
        ms = sum(each.ns for each in those) / 1e6
        if len(those) < LEAST_TURNS or ms < calls.LEAST_MS or 100 * ms / whole < LEAST_PERCENT:
            continue
        yield Advice(
            "recurrence",
            f"{name} ({kind}) is called {len(those)} times in a loop, once for each time step",
            (_place(name, those),),
            calls.interval(ms, calls.ends(asked, those)).within(whole),
            True,
            100 * ms / whole,
            (f"the calls take {ms:.3g} ms; a single call of the layer computes all products with the input as one",),
            f"torch.nn.{kind.removesuffix('Cell')} over the whole sequence, unless steps need results of later layers",
        )


def _place(name: str, those: Sequence[Call]) -> Place:
    first = those[0]
    op = name if first.is_op else None
    (place,) = calls.places(those, op)[:1]
    return Place(place.module if op else name, op, place.spans, len(those))


def _loops(asked: Asked) -> Iterator[tuple[str, list[Call], int]]:
    """Yield the name of a call that loops, the calls in its loop and the batch size; inner loops are not listed."""
    found: dict[tuple[str, int], tuple[list[Call], int]] = {}
    pending = list(calls.of(asked))
    while pending:
        around = pending.pop(0)
        those, count = _looped(around)
        if those:
            name = around.type or around.name if around.level == Level.LAYER else "the step"
            kept, several = found.get((name, count), ([], 0))
            found[name, count] = ([*kept, *those], several + 1)
        else:
            pending += [each for each in around.inside if not each.is_op]
    for (name, count), (those, several) in found.items():
        yield f"{several} × {name}" if several > 1 else name, those, count


def _looped(around: Call) -> tuple[list[Call], int]:
    """Return the calls directly inside that are made once for each sample of the batch, and the batch size."""
    if around.is_op:
        return [], 0
    given = around.first_shape or ()
    batches = set(given[:2])
    by_name: dict[tuple[str, str], list[Call]] = {}
    for each in around.inside:
        by_name.setdefault((each.name, str(each.shapes)), []).append(each)
    kept: list[Call] = []
    most = 0
    for those in by_name.values():
        first, count = those[0], len(those)
        if count < LEAST_SAMPLES or first.first_shape is None or (first.is_op and _is_small(first)):
            continue
        alone = first.first_shape[0] == 1 and (first.is_op or first.tensors == 1)
        alone = alone or (not first.is_op and first.tensors == 1 and first.first_shape in _slices(given, count))
        if alone and (count in batches or (not batches and _picks(around, count))):
            kept += those
            most = max(most, count)
    return kept, most


def _slices(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the possible shapes of one sample of a batch of `count`, in the first or the second dimension."""
    return [(*shape[:at], *shape[at + 1 :]) for at, size in enumerate(shape[:2]) if size == count]


def _is_small(call: Call) -> bool:
    return not call.computes or call.name in SYNC


def _picks(around: Call, count: int) -> bool:
    """Return whether single samples are sliced out at least `count` times."""
    picks = ("aten::slice", "aten::select", "aten::unsqueeze", "aten::narrow")
    return sum(each.name in picks for each in around.inside) >= count
