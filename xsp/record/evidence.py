"""Evidence whether a program that calls a model in training mode trains it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

MOST_CALLS = 256
"""Calls without any backward pass after which a program is assumed not to train."""

MOST_BACKWARDS = 64
"""Backward passes without an optimizer step after which a program is assumed to use no optimizer of torch."""

FEWEST_BACKWARDS = 4
"""As `MOST_BACKWARDS`, for a program that has made no optimizer of torch so far."""


class TrainingEvidence:
    """Evidence whether a program that calls a model in training mode trains it, and with an optimizer of torch.

    A backward pass proves training. Until the first one, the autograd graphs of the calls are observed: in training a
    graph lives until the backward pass. A module that is called repeatedly is not trained if all its graphs but the
    last are dead and no graph of another module lives. (Several calls may precede one backward pass: siamese networks,
    contrastive learning, summed losses. And a result may be detached, such as a generator's for its discriminator.)
    """

    def __init__(self) -> None:
        self.has_no_optimizer = False
        """Whether the program trains without an optimizer of torch: a step then ends with the backward pass."""

        self._backwards = self._calls = 0
        self._has_stepped = False
        self._graphs: dict[int, list[weakref.ref[Any]]] = {}

    @property
    def has_trained(self) -> bool:
        """Whether a backward pass or an optimizer's step was seen."""
        return self._backwards > 0 or self._has_stepped

    def on_call(self, module: int, result: object) -> None:
        """Watch the graph of the result of a call of a module; `module` is its number."""
        if self._backwards:
            return
        self._calls += 1
        try:
            node = _graph(result)
        except Exception:  # a result of the program's own class may raise anything
            return
        if node is not None:
            mark = _Mark()
            node.metadata["xsp"] = mark
            self._graphs.setdefault(module, []).append(weakref.ref(mark))

    def on_backward(self) -> bool:
        """Count a backward pass, and return whether it is the one that shows that there is no optimizer."""
        self._backwards += 1
        self._graphs.clear()
        if self._has_stepped or self.has_no_optimizer or self._backwards < FEWEST_BACKWARDS:
            return False
        self.has_no_optimizer = self._backwards >= MOST_BACKWARDS or not _has_optimizer()
        return self.has_no_optimizer

    def on_optimizer(self) -> None:
        """Note that an optimizer stepped."""
        self._has_stepped, self.has_no_optimizer = True, False

    def is_disproved(self) -> bool:
        """Return whether the calls so far turned out not to be training."""
        if self.has_trained:
            return False
        alive = [module for module, graphs in self._graphs.items() if any(graph() is not None for graph in graphs)]
        return self._calls >= MOST_CALLS or any(
            len(graphs) > 1 and all(graph() is None for graph in graphs[:-1]) and set(alive) <= {module}
            for module, graphs in self._graphs.items()
        )


def _has_optimizer() -> bool:
    """Return whether an optimizer of torch may have been made: the first one of a class marks the class's method."""
    module = sys.modules.get("torch.optim.optimizer")
    classes = [module.Optimizer] if module is not None else []
    if classes and not hasattr(classes[0], "profile_hook_step"):
        return True  # this torch does not tell
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(each.step, "hooked", False) for each in classes)


class _Mark:
    """A mark on a graph, which lives as long as the graph."""


def _graph(value: Any, nesting: int = 3) -> Any:
    """Return the autograd node of the first tensor in a result that has one."""
    node = getattr(value, "grad_fn", None)
    if node is not None and hasattr(node, "metadata"):
        return node
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    nodes = (_graph(part, nesting - 1) for part in parts if nesting)
    return next((node for node in nodes if node is not None), None)
