"""The layers of the nodes of CUDA graphs, so that the kernels of a replay do not all belong to its launch.

A replay is one call of the driver, however many kernels it starts; but each kernel's record names its node. Nodes are
made while a graph is captured, by the same Python code that otherwise launches kernels. CUPTI reports each new node
during the call that makes it, on the same thread; so the running modules are on Python's stack then. When a graph is
made executable, its nodes are copied, which CUPTI also reports. This costs nothing while no graph is made.

Work that was captured on a thread without modules, such as the autograd engine's, keeps the layer of the replay.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from xsp.schema import Rule, Span
from xsp_collectors.layercalls import LayerCall, LayerCalls, Path

UNSEEN_CAPTURES = (
    "kernels and copies of replayed CUDA graphs whose capture was not seen, because it was before the profile, or "
    "because torch.profiler is CUPTI's subscriber: they belong to the layer that replays"
)


class ReplayPlacement(NamedTuple):
    """Spans of a step, and the amount of its replayed work whose capture was not seen."""

    spans: list[Span]
    unknown_count: int


class Captures:
    """The layers of the nodes that were made since `listen`."""

    def __init__(self) -> None:
        self._cupti: Any = None
        self._created_id = self._cloned_id = -1
        self._paths: dict[int, Path] = {}
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        self.unreadable = 0
        """Number of nodes that could not be identified; an exception must not propagate into CUPTI."""

    def listen(self, cupti: Any, subscriber: int | None) -> bool:
        """Make CUPTI report nodes, and return whether it can.

        Args:
            cupti: the binding.
            subscriber: handle of a subscription whose callback is `on_callback`; None if there is none.
        """
        numbers: Any = getattr(cupti, "CallbackIdResource", None)
        domains: Any = getattr(cupti, "CallbackDomain", None)
        required = (numbers, domains, getattr(cupti, "GraphData", None), getattr(cupti, "get_graph_node_id", None))
        if subscriber is None or any(part is None for part in required):
            return False
        self._cupti = cupti
        self._created_id, self._cloned_id = int(numbers.GRAPHNODE_CREATED), int(numbers.GRAPHNODE_CLONED)
        try:
            for number in (self._created_id, self._cloned_id):
                cupti.enable_callback(1, subscriber, int(domains.RESOURCE), number)
        except Exception:  # an older libcupti, a lost device: replays are counted as unseen captures
            return False
        return True

    def on_callback(self, userdata: Any, domain: Any, number: Any, data: Any) -> None:
        """Handle CUPTI's report that a node was made or copied. Called by CUPTI, within the call that made it."""
        try:
            if int(number) in (self._created_id, self._cloned_id):
                self._add_node(int(number), data)
        except Exception:
            self.unreadable += 1

    def path_of(self, node: int) -> Path | None:
        """Return the modules that were running when a node was made; None if that was not seen."""
        return self._paths.get(node)

    def _add_node(self, number: int, data: Any) -> None:
        cupti = self._cupti
        resource = data if hasattr(data, "resource_descriptor") else cupti.ResourceData.from_ptr(int(data))
        graph = cupti.GraphData.from_ptr(int(resource.resource_descriptor))
        node = cupti.get_graph_node_id(int(graph.node))
        if number == self._created_id:
            self._paths[node] = self._path(sys._getframe())
        else:
            original = self._paths.get(cupti.get_graph_node_id(int(graph.original_node)))
            if original is not None:
                self._paths[node] = original

    def _path(self, frame: FrameType) -> Path:
        modules = _running_modules(frame)
        return tuple(self._layer(module, modules[0]) for module in modules)

    def _layer(self, module: Any, outermost: Any) -> LayerCall:
        names = self._names.get(outermost)
        if names is None:
            names = self._names[outermost] = {id(submodule): name for name, submodule in outermost.named_modules()}
        class_name = type(module).__name__
        return LayerCall(str(id(module)), names.get(id(module)) or class_name, class_name)


def _running_modules(frame: FrameType | None) -> list[Any]:
    """Return the modules that are running on a stack, outermost first."""
    torch: Any = sys.modules.get("torch")
    code = torch.nn.Module._call_impl.__code__ if torch is not None else None
    modules = []
    while frame is not None:
        if frame.f_code is code:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules[::-1]


def place(spans: Sequence[Span], captures: Captures) -> ReplayPlacement:
    """Make the work of replays children of the layers that captured its nodes, and add those layers' calls.

    The call of a layer in a replay lasts from the start of its first kernel to the end of its last, on the device.

    Args:
        spans: spans of one step; work of a graph has its node in its attributes, as `graph_node`.
        captures: the captures that were seen so far.
    """
    nodes = {text: _node(text) for text in {span.attributes for span in spans} if text and '"graph_node"' in text}
    if not nodes:
        return ReplayPlacement(list(spans), 0)
    replays: dict[int | None, list[tuple[Span, int]]] = defaultdict(list)
    for span in spans:
        node = nodes.get(span.attributes or "") if span.device is not None else None
        if node is not None:
            replays[span.correlation_id].append((span, node))
    changed_spans: dict[int, Span] = {}
    layers: list[Span] = []
    unknown_count = 0
    for replay, work in replays.items():
        layer_calls = LayerCalls("capture")
        for span, node in sorted(work, key=lambda pair: pair[0].start_ns):
            path = captures.path_of(node)
            unknown_count += path is None
            layer = layer_calls.add(span, path or ())
            if layer is not None:
                changed_spans[id(span)] = span._replace(parent_id=layer.span_id, parent_rule=Rule.CAPTURE.value)
        layers += [call._replace(correlation_id=replay) for call in layer_calls.calls]
    return ReplayPlacement([*(changed_spans.get(id(span), span) for span in spans), *layers], unknown_count)


def _node(attributes: str) -> int | None:
    """Return the node of a graph that the attributes of device work name, or None."""
    node = json.loads(attributes)["graph_node"]
    return int(node) if node is not None else None
