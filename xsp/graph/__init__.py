"""The graph of a step: its operator calls with their data flow, from models, programs and traces.

>>> import xsp
>>> graph = xsp.graph.of("torchvision:resnet50", batch=8)     # doctest: +SKIP
>>> graph.measures()["longest_path"]                          # doctest: +SKIP
166
"""

from __future__ import annotations

from xsp.graph.files import load
from xsp.graph.node import Call, Edge, Graph, Node, NodeKind, Problem, Tensor, Value
from xsp.graph.sources import of

__all__ = ["Call", "Edge", "Graph", "Node", "NodeKind", "Problem", "Tensor", "Value", "load", "of"]
