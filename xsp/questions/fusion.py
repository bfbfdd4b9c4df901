"""Fusion: calls that one kernel could compute together, so that intermediate values are not written to memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from xsp.advise import Advice, AdviceContext, Interval, Needs, question
from xsp.bound import totals
from xsp.graph import work
from xsp.graph.draft import Draft, Web
from xsp.graph.node import Graph, KnownBy, Phase, Role
from xsp.graph.rewrite import RuleChange
from xsp.questions import callorder
from xsp.questions.rewriting import Gain, Prices, piece

LEAST_PERCENT = 5.0
"""Minimum upper bound of a gain, in percent of the step, to suggest fusion."""

LEAST_CALLS = 3
"""Minimum length of a chain: pairs of elementwise calls are ubiquitous."""

LEAST_UPDATES = 10
"""Minimum number of weight updates of an optimizer that loops over parameters."""

ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "add sub mul div neg abs exp log sqrt rsqrt pow square tanh sigmoid relu gelu silu erf sin cos clamp where "
        "masked_fill hardtanh hardswish leaky_relu elu softplus mish reciprocal maximum minimum rsub addcmul addcdiv"
    ).split()
)

ADVICE_BY_RULE = {
    "norm": (
        "torch.nn.utils.fusion.fuse_conv_bn_eval(convolution.eval(), norm.eval()), or torch.compile(model)",
        "fold_batch_norm",
    ),
    "attention": (
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale); for a model of "
        "transformers: attn_implementation='sdpa'",
        "sdpa",
    ),
    "joined": (
        "one nn.Linear with concatenated weights, torch.cat([q.weight, k.weight, ...]), then .split(sizes, -1)",
        None,
    ),
}


@question("fusion", "Which calls can be fused?", number="Q5", needs=Needs.BOUND)
def fusion(context: AdviceContext) -> Iterator[Advice]:
    """Batch norms that fold into convolutions, hand-written attention, linear layers on one input: the gain is the
    difference of timings. Chains of elementwise calls and optimizers that loop over parameters: the gain is at most the
    share of their time that memory traffic between them has in all of their traffic. If only the order of calls is
    known, norms after convolutions and hand-written attention: the gain is at most the time of the removed calls."""
    if context.graph.known_by is KnownBy.ORDER:
        yield from callorder.advice(context, LEAST_PERCENT)
        return
    prices: Prices = context.part("prices")
    for gain in prices.gains(ADVICE_BY_RULE):
        remedy, trial = ADVICE_BY_RULE[gain.changes[0].rule]
        advice = prices.advice("fusion", gain, problem_text(gain), remedy, trial)
        if not gain.at_most or advice.of_step_percent >= LEAST_PERCENT:
            yield advice
    removed = {place for change in prices.rewritten.changes for place in change.removed}
    chains_by_ops = chains(prices.rewritten.original, removed)
    for ops, groups in chains_by_ops.items():
        yield from _chain(prices, ops, groups)
    if context.trace is None:  # for a trace, the question `optimizer` is more precise
        yield from _updates(prices)


# --- chains -----------------------------------------------------------------------------------------------


def chains(graph: Graph, excluded: set[int]) -> dict[tuple[str, ...], list[list[int]]]:
    """Return chains of elementwise calls whose intermediate values only the next call reads, grouped by operators.

    Args:
        graph: a graph with tensors.
        excluded: places of calls to leave out.
    """
    draft = Draft(graph)
    web = Web(draft)
    chain_of: dict[int, list[int]] = {}
    for number in draft.order:
        step = draft.steps[number]
        if number in excluded or step.call.op not in ELEMENTWISE or not step.is_pure or step.phase is not Phase.FORWARD:
            continue
        chain = [number]
        for origin in dict.fromkeys(step.operands):
            producer = draft.producer(origin)
            is_fusible = (
                producer is not None
                and origin[0] in chain_of
                and producer.call.outputs[0].shape == step.call.outputs[0].shape
            )
            if is_fusible and web.only_reader(origin) == number and chain_of[origin[0]] is not chain:
                chain[:0] = chain_of[origin[0]]
        for place in chain:
            chain_of[place] = chain
    groups: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for members in {id(chain): chain for chain in chain_of.values()}.values():
        if len(members) >= LEAST_CALLS:
            groups[tuple(graph.nodes[place].call.op.removeprefix("aten::") for place in members)].append(members)
    return groups


def _chain(prices: Prices, ops: tuple[str, ...], groups: Sequence[Sequence[int]]) -> Iterator[Advice]:
    graph = prices.rewritten.original
    nodes = [place for chain in groups for place in chain]
    all_bytes = outside_bytes = 0
    for chain in groups:
        byte_counts = [work.bytes_of(graph.nodes[place]) for place in chain]
        if None in byte_counts:
            return
        internal = {(place, 0) for place in chain}
        read_bytes = [
            tensor.bytes or 0
            for place in chain
            for origin, tensor in zip(graph.nodes[place].origins, graph.nodes[place].call.inputs, strict=True)
            if origin not in internal
        ]
        all_bytes += sum(filter(None, byte_counts))
        outside_bytes += sum(read_bytes) + (graph.nodes[chain[-1]].call.outputs[0].bytes or 0)
    module = graph.nodes[nodes[0]].module
    times = f", {len(groups)} times" if len(groups) > 1 else ""
    text = f"{module + ': ' if module else ''}{len(ops)} elementwise calls in a row ({', '.join(ops[:6])}){times}"
    is_gelu = "pow" in ops and "tanh" in ops
    hint = "torch.nn.functional.gelu(x, approximate='tanh') if it is that function, else " if is_gelu else ""
    yield from _bounded_advice(
        prices, text, nodes, outside_bytes, all_bytes, f"{hint}torch.compile(model), which fuses them", "compile"
    )


def _bounded_advice(
    prices: Prices, text: str, nodes: Sequence[int], outside_bytes: int, all_bytes: int, remedy: str, trial: str | None
) -> Iterator[Advice]:
    """Yield the gain if time is proportional to bytes, and only bytes from and to the outside are moved."""
    figures = [prices.before[place] for place in nodes]
    known_figures = [figure for figure in figures if figure is not None]
    if len(known_figures) < len(figures) or not all_bytes:
        return
    share = max(0.0, 1 - outside_bytes / all_bytes)
    ns, half = (share * part for part in (math.fsum(figure.ns for figure in known_figures), totals.half(known_figures)))
    gain = Interval((ns - half) / 1e6, ns / 1e6, (ns + half) / 1e6)
    why = (
        f"{len(nodes)} calls that take {math.fsum(figure.ns for figure in known_figures) / 1e6:.3g} ms",
        f"{100 * share:.0f} % of the bytes that they move are intermediate results",
    )
    advice = piece(prices, "fusion", text, nodes, gain, True, why, remedy, None, trial)
    if advice.of_step_percent >= LEAST_PERCENT:
        yield advice


# --- optimizers ---------------------------------------------------------------------------------------------


def updates(graph: Graph) -> list[int]:
    """Return the places of calls that update weights one by one after backward; empty for fused or foreach updates."""
    last_backward = max((place for place, node in enumerate(graph.nodes) if node.phase is Phase.BACKWARD), default=None)
    if last_backward is None:
        return []
    optimizer_calls = [place for place in range(last_backward + 1, len(graph.nodes)) if graph.nodes[place].computes]
    names = [graph.nodes[place].call.op.removeprefix("aten::") for place in optimizer_calls]
    if any(name.startswith(("_foreach", "_fused")) for name in names):
        return []
    writes = [
        place
        for place in optimizer_calls
        if any(graph.values[number].role is Role.WEIGHT for number in graph.nodes[place].writes)
    ]
    return optimizer_calls if len(writes) >= LEAST_UPDATES else []


def _updates(prices: Prices) -> Iterator[Advice]:
    graph = prices.rewritten.original
    nodes = updates(graph)
    byte_counts = [work.bytes_of(graph.nodes[place]) for place in nodes]
    if not nodes or None in byte_counts:
        return
    outputs = {value for place in nodes for value in graph.nodes[place].writes}
    read_bytes: dict[int, int] = {}
    written_bytes: dict[int, int] = {}
    for place in nodes:
        node = graph.nodes[place]
        for number, tensor in zip(node.reads, node.call.inputs, strict=True):
            if number not in outputs:
                read_bytes[graph.values[number].storage] = tensor.bytes or 0
        for number in node.writes:
            value = graph.values[number]
            if value.version:
                written_bytes[value.storage] = value.bytes or 0
    weights = sum(
        graph.values[number].role is Role.WEIGHT for number in {w for n in nodes for w in graph.nodes[n].writes}
    )
    text = f"the optimizer updates weights one by one: {len(nodes)} calls, {weights} of them write a weight"
    remedy = "torch.optim.AdamW(parameters, ..., fused=True), also SGD and Adagrad; foreach=True where fused fails"
    yield from _bounded_advice(
        prices,
        text,
        nodes,
        sum(read_bytes.values()) + sum(written_bytes.values()),
        sum(filter(None, byte_counts)),
        remedy,
        None,
    )


# --- calls that can be removed ----------------------------------------------------------------------------------------
# Removable work: calls that a step could omit without a change of its results.

RULES = ("dead", "equal", "cast", "copy", "loop")


@question("removable", "Which calls can be removed?", number="Q4", needs=Needs.BOUND)
def removable(context: AdviceContext) -> Iterator[Advice]:
    """Calls whose results are not read, that recompute existing values, that copy or cast without need, and calls on
    the samples of a batch one by one. The gain is their time minus that of their replacement.

    A loop over samples in a trace is left to the question `samples` if the call on the whole batch is not timed."""
    prices: Prices = context.part("prices")
    for gain in prices.gains(RULES):
        if gain.at_most and gain.changes[0].rule == "loop" and context.trace is not None:
            continue
        yield prices.advice("removable", gain, problem_text(gain), remedy_text(gain.changes[0]))


def problem_text(gain: Gain) -> str:
    """Return the problem in one line."""
    first, count = gain.changes[0], len(gain.changes)
    text = first.description if count == 1 else f"{first.description}, {count} times"
    location = _location(first)
    return f"{location}: {text}" if location else text


def _location(change: RuleChange) -> str:
    """Return the module that contains all of a change, with the number of its call; empty for the outermost one."""
    if not change.modules:
        return ""
    paths = [module.split(".") for module in change.modules]
    if change.rule == "loop":  # each sample is another call of the same modules
        shared_parts = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        return ".".join(shared_parts)
    path, _, turn = change.modules[0].partition("#")
    return f"{path}, call {turn}" if turn else path


def remedy_text(change: RuleChange) -> str:
    """Return the change to make in the program."""
    location = f" in the forward of {_location(change).partition(',')[0]}" if _location(change) else ""
    if change.rule == "dead":
        return f"delete its computation{location}, or do not request it (need_weights=False, output_attentions=False)"
    if change.rule == "equal":
        return f"compute it once{location} and keep it: y = layer(x), then use y in both places"
    if change.rule == "cast":
        note = "" if change.changes_numbers is None else "; compare results, which are then computed in another type"
        return f"delete the casts (.double(), .float(), .to(dtype)){location}{note}"
    if change.rule == "copy":
        return f"delete the copy (.clone(), .contiguous(), F.pad by 0, torch.cat of one){location}"
    return f"call it once on the whole batch{location}: y = f(x) instead of torch.stack([f(each) for each in x])"
