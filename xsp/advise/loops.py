"""Loops over single elements or single samples, where one call could process all of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext, Place
from xsp.advise.calls import HostCall
from xsp.advise.registry import question
from xsp.schema import Kind, Level
from xsp.texts import counted

READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")

LEAST_CALLS = 8
"""Minimum number of equal calls in one place to be a loop: reads of single values, concatenations, cells."""

LEAST_SAMPLES = 4

MOST_PYTHON_MS = 0.02
"""Maximum Python time, in milliseconds, that counts for a read in a loop: longer time is other work."""

LEAST_PERCENT = 2.0
"""Minimum percentage of the step for a loop to be worth a line."""


@question("synchronisations", "Where does Python read single values?", number="Q4")
def synchronisations(context: AdviceContext) -> Iterator[Advice]:
    """Reads of single values (`item()`, `if tensor:`, `float(tensor)`) in loops, with what each pass does beside.

    Reads by optimizers are left to the question `optimizer`.
    """
    step_ms, on_device = calls.step_ms(context), context.required_trace.has(Level.KERNEL)
    if not calls.are_worth_a_walk(context, f"name IN {READS}", LEAST_CALLS):
        return
    loops: list[tuple[list[HostCall], list[HostCall], float]] = []
    sequences = {id(group[0].parent) for _, group, count in _loops(context, True) if _is_sequence(group, count)}
    for parent in calls.walk(context, with_device=True):
        if id(parent) in sequences:  # the question `samples` has these: what is read is needed
            continue
        reads = [call for call in parent.children if call.name in READS and call.phase != "optimizer"]
        if not parent.is_op and len(reads) >= LEAST_CALLS:
            loops.append((reads, *_with_indexing(parent, reads, on_device)))
    reads = [call for group, *_ in loops for call in group]
    in_loops = [call for _, group, _ in loops for call in group]
    parts = in_loops if on_device else calls.with_gradients(context, in_loops)
    ms = sum(call.ns for call in parts) / 1e6 + sum(gaps for *_, gaps in loops)
    if not reads or 100 * ms / step_ms < LEAST_PERCENT or ms < calls.LEAST_MS:
        return
    factors = calls.interval_factors(context, parts)
    gain = ms * (1 - len(loops) / len(reads))
    yield Advice(
        "synchronisations",
        f"{len(reads):,} single values are read in loops, in {counted(len(loops), 'place')}",
        calls.places(reads),
        calls.interval(gain, factors).limit(step_ms),
        factors is None,
        100 * gain / step_ms,
        (
            f"reads, the calls on small tensors before them{calls.gradients_text(in_loops, parts)} and the Python code "
            f"in between take {ms:.3g} ms of a step",
            "on a device each read also waits for all work before it, and nothing is issued meanwhile",
        ),
        "compute with the whole tensor, and read the result once: .tolist(), .sum().item(); of many tensors, "
        "torch._foreach_norm and torch.stack first"
        if on_device
        else "compute with the whole tensor, and read the result once: .tolist(), .sum().item()",
    )


MOST_IN_BODY = 4
"""Maximum number of computing operators from one read to the next for them to be the body of one loop."""


def _with_indexing(parent: HostCall, reads: Sequence[HostCall], on_device: bool) -> tuple[list[HostCall], float]:
    """Return the reads with the calls of their loop before them, and the milliseconds of Python time between all these.

    Of a loop are the views, and the few operators that each pass computes with and one call for all values replaces:
    on a device, which the host issues one by one, and others whose time is that of the call.
    """
    loop_calls: list[HostCall] = []
    pending: list[HostCall] = []
    gaps, last_ns, read_set = 0.0, None, set(reads)
    for call in parent.children:
        if call not in read_set:
            if on_device or not call.computes or (call.is_op and call.ns <= 1e3 * MOST_ELEMENT_US):
                pending.append(call)
            else:
                pending, last_ns = [], call.end_ns
            continue
        is_loop = bool(loop_calls) and sum(member.computes for member in pending) <= MOST_IN_BODY
        members = [*(member for member in pending if is_loop or not member.computes), call]
        for member in members:
            if last_ns is not None:
                gaps += min(MOST_PYTHON_MS, max(0.0, (member.start_ns - last_ns) / 1e6))
            last_ns = member.end_ns
        loop_calls += members
        pending = []
    return loop_calls, gaps


@question("samples", "Is a batch computed sample by sample?", number="Q4", shapes=True)
def samples(context: AdviceContext) -> Iterator[Advice]:
    """A module or an operator called once for each sample of the batch that the enclosing module was given.

    The time of all passes through the loop but one can be gained if one for the batch takes no longer than one for a
    sample: of the calls, of what runs between them, such as a loss or a backward pass, and of their gradients. If a
    value is read in each pass, the next one may need it, as in an environment: then Python's own time remains.
    """
    step_ms = calls.step_ms(context)
    for loop_name, loop_calls, count in _loops(context):
        passes = _passes(loop_calls)
        body = {id(call) for call in passes}
        others = [call for call in loop_calls if id(call) not in body]
        nodes = [node for node in calls.gradients(context, [*passes, *others]) if id(node.parent) not in body]
        all_calls = [*passes, *others, *nodes]
        is_sequence = _is_sequence(loop_calls, count)
        between_ns = 0.0 if is_sequence else calls.between_ns(passes)
        passes_ms = (sum(call.ns for call in passes) + between_ns) / 1e6
        others_ms = sum(call.ns for call in (*others, *nodes)) / 1e6
        ms = passes_ms + others_ms
        gain = passes_ms + others_ms * (1 - 1 / count)
        if 100 * gain / step_ms < LEAST_PERCENT or gain < calls.LEAST_MS:
            continue
        factors = calls.interval_factors(context, all_calls)
        names = list(dict.fromkeys(call.name for call in loop_calls))
        listing = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        shape = "×".join(map(str, loop_calls[0].first_shape or ()))
        yield Advice(
            "samples",
            f"{loop_name} calls {listing} {count} times with one sample each ({shape})",
            tuple(_place(name, [call for call in loop_calls if call.name == name]) for name in names),
            calls.interval(gain, factors).limit(step_ms),
            True,
            100 * gain / step_ms,
            (
                f"{len(loop_calls):,} calls, {'operators' if is_sequence else 'what runs'} between them"
                f"{' and their gradients' * bool(nodes)} take {ms:.3g} ms; {count} samples in one call may take "
                "as long as one of them",
                *(["a value is read in each pass, and Python's time between the calls is not counted"] * is_sequence),
            ),
            "if each call needs the value that was read after the one before, as in an environment or a search, run "
            "several of these at once, with one call for all; else pass the whole batch in one call"
            if is_sequence
            else "pass the whole batch in one call, or use torch.vmap",
            None,
        )


@question("growing", "Is a tensor copied again to append to it?", number="Q4", shapes=True)
def growing(context: AdviceContext) -> Iterator[Advice]:
    """Concatenations in a loop that append to the result of the previous one, so that all of it is copied each time."""
    step_ms = calls.step_ms(context)
    chains = [chain for parent in calls.walk(context) if not parent.is_op for chain in _growing_chains(parent)]
    copies = [call for chain in chains for call in chain[:-1]]
    all_calls = calls.with_gradients(context, copies)
    ms = sum(call.ns for call in all_calls) / 1e6
    if ms < calls.LEAST_MS or 100 * ms / step_ms < LEAST_PERCENT:
        return
    yield Advice(
        "growing",
        _growth_text(chains),
        calls.places(copies),
        calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
        False,
        100 * ms / step_ms,
        (
            f"all but the last{' of each' * (len(chains) > 1)}{calls.gradients_text(copies, all_calls)} take "
            f"{ms:.3g} ms of a step",
        ),
        "keep the parts in a list and call torch.cat once, or write into a preallocated tensor",
    )


def _growth_text(chains: Sequence[Sequence[HostCall]]) -> str:
    """Return what grows, and by how many concatenations, in words."""
    smallest, largest = min(map(len, chains)), max(map(len, chains))
    counts = str(largest) if smallest == largest else f"{smallest} to {largest}"
    if len(chains) == 1:
        return f"a tensor grows by {counts} concatenations, each of which copies all previous parts"
    return f"{len(chains)} tensors grow by {counts} concatenations each, and each of these copies all previous parts"


def _growing_chains(parent: HostCall) -> Iterator[list[HostCall]]:
    """Yield chains of concatenations in which the first or last input is as large as the previous one's result."""
    chain: list[HostCall] = []
    size = 0
    for call in parent.children:
        sizes = _sizes(call) if call.name in ("aten::cat", "aten::concat") else []
        if len(sizes) < 2:
            continue
        if not chain or size not in sizes[:1] + sizes[-1:]:
            if len(chain) >= LEAST_CALLS:
                yield chain
            chain = []
        chain.append(call)
        size = sum(sizes)
    if len(chain) >= LEAST_CALLS:
        yield chain


def _sizes(call: HostCall) -> list[int]:
    """Return the number of elements of each tensor in a call's first argument, a list of tensors."""
    argument = call.shapes[0] if call.shapes else None
    is_tensor_list = isinstance(argument, list) and all(isinstance(shape, list) for shape in argument)
    return [math.prod(shape) for shape in argument if shape] if is_tensor_list and isinstance(argument, list) else []


NARROW_SHARE = 0.5
"""Maximum expected time of one layer in place of linear layers that take the same tensor, as a share of their time."""

LEAST_LAYERS = 3


@question(
    "narrow-layers",
    "Do several linear layers, each too narrow to be fast, take the same tensor?",
    number="Q5",
    shapes=True,
)
def narrow_layers(context: AdviceContext) -> Iterator[Advice]:
    """Linear layers in one module that take the same tensor: one layer with all their outputs is one product.

    Describing steps record which tensors are the same (`xsp.schema.INPUT_TENSORS`). The expected time of the one layer
    is that of its multiplications or of its memory traffic, whichever is longer, at the best rates of the step's linear
    layers.
    """
    step_ms = calls.step_ms(context)
    linear = [layer for layer in calls.walk(context) if layer.type == "Linear" and layer.level == Level.LAYER]
    timed = [layer for layer in linear if layer.ns > 0]
    rates = [max((_work(layer)[index] / layer.ns for layer in timed), default=0.0) for index in (0, 1)]
    groups_by_parent: dict[str, list[list[HostCall]]] = {}
    for layers in _same_input_groups(linear):
        if 0 < _merged_ns(layers, rates) < NARROW_SHARE * sum(layer.ns for layer in layers):
            groups_by_parent.setdefault(
                layers[0].parent.type or "the step" if layers[0].parent else "the step", []
            ).append(layers)
    for name, groups in groups_by_parent.items():
        all_layers = [layer for layers in groups for layer in layers]
        nodes = calls.gradients(context, all_layers)
        forward_ms, backward_ms = (sum(layer.ns for layer in layers) / 1e6 for layers in (all_layers, nodes))
        ms = forward_ms + backward_ms
        gain = ms * (1 - sum(_merged_ns(layers, rates) for layers in groups) / 1e6 / forward_ms)
        if gain < calls.LEAST_MS or 100 * gain / step_ms < LEAST_PERCENT:
            continue
        yield Advice(
            "narrow-layers",
            f"{len(groups[0])} linear layers take the same tensor in {name}"
            + (f", in {len(groups)} places" if len(groups) > 1 else ""),
            calls.places(all_layers),
            calls.interval(gain, calls.interval_factors(context, [*all_layers, *nodes])).limit(step_ms),
            True,
            100 * gain / step_ms,
            (
                f"{len(all_layers)} calls{' and their gradients' * bool(nodes)} take {ms:.3g} ms, "
                f"{ms - gain:.3g} ms at the best rates of linear layers in the step",
            ),
            "one Linear with the outputs of all, then .chunk or .view; its weight is their weights, concatenated",
        )


def _same_input_groups(linear: Sequence[HostCall]) -> Iterator[list[HostCall]]:
    """Yield groups of layers that are given the same tensor inside the same call."""
    groups: dict[tuple[str | None, tuple[int, ...]], list[HostCall]] = {}
    for layer in linear:
        if layer.input_ids and layer.phase != "backward":
            groups.setdefault((layer.parent.span_id if layer.parent else None, layer.input_ids), []).append(layer)
    for group in groups.values():
        if len({layer.name for layer in group}) >= LEAST_LAYERS:
            yield group


def _merged_ns(layers: Sequence[HostCall], rates: Sequence[float]) -> float:
    """Return the expected ns of one layer in place of several that take the same tensor; 0 if unknown."""
    work = [_work(layer) for layer in layers]
    if not all(products for products, _ in work) or not all(rates):
        return 0.0
    saved_reads = math.prod(layers[0].first_shape or (0,)) * (
        len(layers) - 1
    )  # reads of the input that one layer saves
    return max(
        sum(products for products, _ in work) / rates[0], (sum(size for _, size in work) - saved_reads) / rates[1]
    )


def _work(layer: HostCall) -> tuple[int, int]:
    """Return a linear layer's number of multiplications and of elements read or written; zeros if unknown."""
    for op in layer.children:
        if op.name == "aten::linear" and op.first_shape and len(op.shapes) > 1:
            weight = op.shapes[1]
            if isinstance(weight, list) and len(weight) == 2 and all(type(size) is int for size in weight):
                outputs, inputs = (int(str(size)) for size in weight)
                rows = math.prod(op.first_shape[:-1])
                return rows * inputs * outputs, rows * (inputs + outputs) + inputs * outputs
    return 0, 0


CELLS = ("LSTMCell", "GRUCell", "RNNCell")


@question("recurrence", "Is a recurrent layer a loop over its cell?", number="Q5")
def recurrence(context: AdviceContext) -> Iterator[Advice]:
    """PyTorch's recurrent cells called once for each time step, where one call of the layer processes all of them.

    With the cells go the operators between them, which cut out the inputs of each time step and collect the results.
    """
    step_ms = calls.step_ms(context)
    cells_by_name: dict[tuple[str, str], list[HostCall]] = {}
    ops_by_name: dict[tuple[str, str], list[HostCall]] = {}
    for parent in calls.walk(context):
        cells = [cell for cell in parent.children if cell.type in CELLS]
        for cell in cells:
            cells_by_name.setdefault((cell.name, str(cell.type)), []).append(cell)
        if len(cells) >= LEAST_CALLS:
            begin, end = (parent.children.index(cell) for cell in (cells[0], cells[-1]))
            between = (call for call in parent.children[begin:end] if call.is_op)
            ops_by_name.setdefault((cells[0].name, str(cells[0].type)), []).extend(between)
    for (name, cell_type), group in cells_by_name.items():
        ops = ops_by_name.get((name, cell_type), [])
        loop_calls = [*group, *ops]
        all_calls = calls.with_gradients(context, loop_calls)
        ms = sum(call.ns for call in all_calls) / 1e6
        if len(group) < LEAST_CALLS or ms < calls.LEAST_MS or 100 * ms / step_ms < LEAST_PERCENT:
            continue
        yield Advice(
            "recurrence",
            f"{name} ({cell_type}) is called {len(group)} times in a loop, once for each time step",
            (_place(name, group),),
            calls.interval(ms, calls.interval_factors(context, all_calls)).limit(step_ms),
            True,
            100 * ms / step_ms,
            (
                f"the calls{', the operators between them' * bool(ops)}{calls.gradients_text(loop_calls, all_calls)} "
                f"take {ms:.3g} ms; a single call of the layer computes all products with the input as one",
            ),
            f"torch.nn.{cell_type.removesuffix('Cell')} over the whole sequence, unless steps need "
            "results of later layers",
        )


LEAST_PASSES = 64
"""Minimum number of equal calls in one place to be a loop over elements; modules have fewer equal layers."""

MOST_ELEMENT_US = 20.0
"""Maximum median time of its operators in microseconds: a call takes 2 to 10 µs however small the tensors are."""

LEAST_ELEMENTS_PERCENT = 20.0
"""Minimum percentage of the step for such a loop to be worth a line."""


@question("elements", "Does a loop of Python compute element by element?", number="Q4")
def elements(context: AdviceContext) -> Iterator[Advice]:
    """Loops of Python whose passes call operators on small tensors, so that most of the time is that of the calls.

    Loops that other questions know are left out: reads of values, samples, cells, growing tensors, updates in place. So
    are devices, where fewer launches are advised. Whether it is worth a line is decided by the calls and a little
    Python code after each. The gain is a bound: all time from the first call of a loop, and of its gradients, to the
    last.
    """
    if context.required_trace.has(Level.KERNEL):
        return
    step_ms = calls.step_ms(context)
    ops: list[HostCall] = []
    others: list[HostCall] = []
    passes, python_ms = 0, 0.0
    for parent in calls.walk(context):
        looped = _looped_ops(parent)
        if looped:
            ops += looped
            others += _others_in_loop(parent, looped)
            passes = max(passes, max(Counter(op.name for op in looped).values()))
            gaps = ((later.start_ns - earlier.end_ns) / 1e6 for earlier, later in pairwise(looped))
            python_ms += sum(min(MOST_PYTHON_MS, max(0.0, gap)) for gap in gaps)
    if not ops or statistics.median(op.ns for op in ops) > 1e3 * MOST_ELEMENT_US:
        return
    all_calls = calls.with_gradients(context, ops)
    ms = sum(call.ns for call in all_calls) / 1e6 + python_ms
    if 100 * ms / step_ms < LEAST_ELEMENTS_PERCENT or ms < calls.LEAST_MS:
        return
    all_calls = calls.with_gradients(context, [*ops, *others])
    ms = min(step_ms, max(ms, (sum(call.ns for call in all_calls) + calls.between_ns(all_calls)) / 1e6))
    gain = ms * (1 - 1 / passes)
    median_us = statistics.median(op.ns for op in ops if op.computes) / 1e3  # views take less
    yield Advice(
        "elements",
        f"loops of Python call {len(ops):,} operators on small tensors, {median_us:.2g} µs each",
        calls.places(ops),
        calls.interval(gain, calls.interval_factors(context, all_calls)).limit(step_ms),
        True,
        100 * gain / step_ms,
        (
            f"they{calls.gradients_text(ops, all_calls)} and what is between them take {ms:.3g} ms of a step; each "
            "call takes some microseconds, however little it computes",
        ),
        "compute with whole tensors at once: broadcasting, indexing by tensors, torch.vmap; if each pass needs the "
        "result of the one before, torch.compile of the loop, or a layer of torch that contains it (nn.LSTM, nn.GRU)",
    )


def _others_in_loop(parent: HostCall, looped: Sequence[HostCall]) -> list[HostCall]:
    """Return the other calls that each pass makes: modules, and operators that are called a few times less often."""
    members = {id(op) for op in looped}
    begin, end = looped[0].start_ns, looped[-1].end_ns
    inside = [call for call in parent.children if begin <= call.start_ns and call.end_ns <= end]
    counts = Counter(call.name for call in inside)
    return [call for call in inside if id(call) not in members and counts[call.name] >= LEAST_CALLS]


def _looped_ops(parent: HostCall) -> list[HostCall]:
    """Return the operators that a call of the program makes `LEAST_PASSES` times or more, if no other question does."""
    is_other = (
        parent.is_op or parent.kind in (Kind.BACKWARD, Kind.OPTIMIZER) or parent.phase in ("backward", "optimizer")
    )
    if is_other or len(parent.children) < LEAST_PASSES:
        return []
    counts = Counter(child.name for child in parent.children if child.is_op)
    looped = [child for child in parent.children if child.is_op and counts[child.name] >= LEAST_PASSES]
    known = (*READS, "aten::cat", "aten::concat")
    if any(op.name in known for op in looped) or any(child.type in CELLS for child in parent.children):
        return []
    computing = [op for op in looped if op.computes]
    in_place = sum(op.name.endswith("_") for op in computing)
    return looped if computing and in_place < len(computing) / 2 and not _sample_calls(parent)[0] else []


def _place(name: str, group: Sequence[HostCall]) -> Place:
    first_call = group[0]
    op = name if first_call.is_op else None
    (place,) = calls.places(group, op)[:1]
    return Place(place.module if op else name, op, place.spans, len(group))


def _loops(context: AdviceContext, with_device: bool = False) -> Iterator[tuple[str, list[HostCall], int]]:
    """Yield the name of a call that loops, the calls in its loop and the batch size; inner loops are not listed."""
    loops: dict[tuple[str, int], tuple[list[HostCall], int]] = {}
    pending = list(calls.roots(context, with_device))
    while pending:
        parent = pending.pop(0)
        loop_calls, count = _sample_calls(parent)
        if loop_calls:
            name = parent.type or parent.name if parent.level == Level.LAYER else "the step"
            previous, repeats = loops.get((name, count), ([], 0))
            loops[name, count] = ([*previous, *loop_calls], repeats + 1)
        else:
            pending += [child for child in parent.children if not child.is_op]
    for (name, count), (loop_calls, repeats) in loops.items():
        yield f"{repeats} × {name}" if repeats > 1 else name, loop_calls, count


def _passes(loop_calls: Sequence[HostCall]) -> list[HostCall]:
    """Return all calls from each pass through a loop to the next one, for passes that make the same calls.

    Args:
        loop_calls: the calls that are made once in each pass, of one or several loops.
    """
    by_parent: dict[int, list[HostCall]] = {}
    for call in loop_calls:
        by_parent.setdefault(id(call.parent), []).append(call)
    found: list[HostCall] = []
    for group in by_parent.values():
        parent = group[0].parent
        if parent is None:
            continue
        passes = _all_passes(group, parent)
        made = Counter(tuple(call.name for call in calls_made) for calls_made in passes)
        usual = max(made, key=lambda names: made[names], default=())
        found += [call for calls_made in passes if tuple(c.name for c in calls_made) == usual for call in calls_made]
    return found


def _all_passes(group: Sequence[HostCall], parent: HostCall) -> list[list[HostCall]]:
    """Return the calls inside `parent` from each call named as the first of the group to the next one."""
    heads = {id(call) for call in group if call.name == group[0].name}
    places = [place for place, call in enumerate(parent.children) if id(call) in heads]
    return [parent.children[begin:end] for begin, end in pairwise(places)]


def _sample_calls(parent: HostCall) -> tuple[list[HostCall], int]:
    """Return the calls directly inside that are made once for each sample of the batch, and the batch size."""
    if parent.is_op or parent.kind == Kind.OPTIMIZER:  # each call of a closure needs the update before it
        return [], 0
    parent_shape = parent.first_shape or ()
    batches = set(parent_shape[:2])
    by_name: dict[tuple[str, str], list[HostCall]] = {}
    for child in parent.children:
        by_name.setdefault((child.name, str(child.shapes)), []).append(child)
    loop_calls: list[HostCall] = []
    batch_size = 0
    for group in by_name.values():
        first_call, count = group[0], len(group)
        if count < LEAST_SAMPLES or first_call.first_shape is None or (first_call.is_op and _is_small(first_call)):
            continue
        is_sample = first_call.first_shape[0] == 1 and (first_call.is_op or first_call.tensor_count == 1)
        is_sample = is_sample or (
            not first_call.is_op
            and first_call.tensor_count == 1
            and first_call.first_shape in _sample_shapes(parent_shape, count)
        )
        if is_sample and (count in batches or (not batches and _slices_samples(parent, count))):
            loop_calls += group
            batch_size = max(batch_size, count)
    return loop_calls, batch_size


def _sample_shapes(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the possible shapes of one sample of a batch of `count`, in the first or the second dimension."""
    return [(*shape[:index], *shape[index + 1 :]) for index, size in enumerate(shape[:2]) if size == count]


_CUTS = ("aten::slice", "aten::select", "aten::narrow")


def _is_sequence(loop_calls: Sequence[HostCall], count: int) -> bool:
    """Return whether each pass may need the one before: Python reads a value in it, and no batch holds its sample."""
    parent = loop_calls[0].parent
    if parent is None:
        return False
    cuts = [call for call in parent.children if call.name in _CUTS and (call.first_shape or (0,))[0] >= count]
    return len(cuts) < count and all(
        any(call.name in READS for call in calls_made) for calls_made in _all_passes(loop_calls, parent)
    )


def _is_small(call: HostCall) -> bool:
    return not call.computes or call.name in READS


def _slices_samples(parent: HostCall, count: int) -> bool:
    """Return whether single samples are sliced out at least `count` times."""
    picks = ("aten::slice", "aten::select", "aten::unsqueeze", "aten::narrow")
    return sum(child.name in picks for child in parent.children) >= count
