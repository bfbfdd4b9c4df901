"""Fusion where only the order of calls is known: norms after convolutions, and hand-written attention.

The data flow is inferred from order and shapes: a batch norm directly after a convolution with its shape; a softmax
between two products with matching shapes. Gains are upper bounds: the time of the norm, or of all calls between the
products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xsp.advise import Advice, AdviceContext, Interval
from xsp.bound import recordedcalls, totals
from xsp.bound.ladder import Bound, Rung
from xsp.bound.totals import Figure
from xsp.graph.attention import SOFTMAX
from xsp.graph.node import Graph, Node, Phase
from xsp.graph.rules import CONVOLUTIONS, NORMS
from xsp.questions.rewriting import places, step_ns

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")

MOST_DISTANCE = 8
"""Maximum distance between the softmax and a product, in computing calls."""

BETWEEN_OPS = (
    "add add_ sub mul mul_ div div_ masked_fill masked_fill_ where to _to_copy dropout clone contiguous".split()
)


def foldable_norms(graph: Graph) -> list[tuple[int, ...]]:
    """Return the places of batch norms in evaluation mode directly after a convolution with their shape."""
    places: list[tuple[int, ...]] = []
    computing = [place for place, node in enumerate(graph.nodes) if node.computes]
    for previous, place in pairwise(computing):
        convolution, norm = graph.nodes[previous], graph.nodes[place]
        if _op(norm) not in NORMS or _op(convolution) not in CONVOLUTIONS or norm.phase is not Phase.FORWARD:
            continue
        arguments = dict(norm.call.arguments)
        same_shape = (
            convolution.call.outputs
            and norm.call.inputs
            and convolution.call.outputs[0].shape == norm.call.inputs[0].shape
        )
        if arguments.get("training") is False and same_shape and convolution.call.outputs[0].shape is not None:
            places.append((place,))
    return places


def handwritten_attention(graph: Graph) -> list[tuple[int, ...]]:
    """Return the places of the calls between the two products of hand-written attention, including the softmax."""
    groups: list[tuple[int, ...]] = []
    computing = [place for place, node in enumerate(graph.nodes) if node.computes]
    for index, place in enumerate(computing):
        node = graph.nodes[place]
        if _op(node) not in SOFTMAX or node.phase is not Phase.FORWARD or not node.call.inputs:
            continue
        shape = node.call.inputs[0].shape
        if shape is None or len(shape) < 3:
            continue
        first_product = _product(graph, computing[max(0, index - MOST_DISTANCE) : index][::-1])
        last_product = _product(graph, computing[index + 1 : index + 1 + MOST_DISTANCE])
        if first_product is None or last_product is None:
            continue
        outputs, inputs = graph.nodes[first_product].call.outputs, graph.nodes[last_product].call.inputs
        if outputs and inputs and (outputs[0].shape or ())[-2:] == shape[-2:] == (inputs[0].shape or ())[-2:]:
            groups.append(tuple(position for position in computing if first_product < position < last_product))
    return groups


def _product(graph: Graph, places: Sequence[int]) -> int | None:
    """Return the first product among calls; None if a call that is not part of attention comes before it."""
    for place in places:
        op = _op(graph.nodes[place])
        if op in PRODUCTS:
            return place
        if op not in BETWEEN_OPS:
            return None
    return None


def _op(node: Node) -> str:
    return node.call.op.partition("::")[2]


PATTERNS = (
    (
        foldable_norms,
        "batch norm in evaluation mode after a convolution, into whose weights it can be folded",
        "torch.nn.utils.fusion.fuse_conv_bn_eval(convolution.eval(), norm.eval()), or torch.compile(model)",
        "fold_batch_norm",
    ),
    (
        handwritten_attention,
        "attention written out (product, scale, mask, softmax, product): scaled_dot_product_attention does all of it",
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask); for a model of transformers: "
        "attn_implementation='sdpa'",
        "sdpa",
    ),
)


def advice(context: AdviceContext, least_percent: float) -> Iterator[Advice]:
    """Yield upper bounds of the gain of fusing calls, for a trace whose calls are known by their order."""
    bound: Bound = context.bound
    graph = bound.graph
    figures = bound.figures.get(Rung.IN_PLACE.value) or bound.figures.get(Rung.AS_RUN.value)
    if figures is None:
        return
    total_ns = step_ns(context, bound, figures)
    for find_groups, text, remedy, trial in PATTERNS:
        groups = find_groups(graph)
        nodes = [place for group in groups for place in group]
        known_figures: list[Figure] = [figure for place in nodes if (figure := figures[place]) is not None]
        if not known_figures or not total_ns:
            continue
        ns, half = math.fsum(figure.ns for figure in known_figures), totals.half(known_figures)
        if 100 * ns / total_ns < least_percent:
            continue
        times = f", {len(groups)} times" if len(groups) > 1 else ""
        why = (
            f"{len(nodes)} calls that take {ns / 1e6:.3g} ms of a step",
            "the data flow is inferred from the order and shapes of the calls",
        )
        gain = Interval((ns - half) / 1e6, ns / 1e6, (ns + half) / 1e6).limit(total_ns / 1e6)
        where = places(graph, nodes, figures, _spans(bound))
        yield Advice(
            "fusion", text + times, where, gain, True, 100 * ns / total_ns, why, remedy, None, trial,
            side="device" if recordedcalls.is_of_device(context.trace) else "host",
        )  # fmt: skip


def _spans(bound: Bound) -> tuple[str, ...]:
    join = bound.join
    if join is None:
        return ()
    return tuple("" if index is None else join.calls[index].span for index in join.call_of_node)
