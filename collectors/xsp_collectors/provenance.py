"""Which layers the code that torch.compile generated comes from, by the compiler's own account.

In compiled code no module is called, so there are no calls of layers to see. But the compiler knows: Dynamo notes
on each node of its graph in which modules it was traced, and inductor writes above each kernel call the nodes that
it was made of. Both are read when something is compiled, which takes no part of a timed step, switches no option,
and so causes nothing to be compiled anew. Code that inductor takes from its cache carries the comments too; but
then a backward graph is not traced again, and of its nodes only those of the forward pass have a layer.

What is read here is internal to torch: where a part of it is missing or says nothing, operators stay where they
are, in the compiled module as a whole.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from xsp_collectors.layercalls import Layer, Path


class Site(NamedTuple):
    """A place in generated code at which it calls a kernel or an operator."""

    operator: str
    """The name under which a profiler shows what runs there."""

    sources: tuple[str, ...]
    """The nodes of the graph that it was made of."""


class Graph(NamedTuple):
    """A compiled graph."""

    sites: list[Site]
    paths: dict[str, Path | None]
    """By node; None where inductor added the node itself. Nodes of which nothing is known are missing."""


class CompiledGraphs:
    """The graphs that inductor made while this was open, by the key under which a profiler shows their calls."""

    def __init__(self) -> None:
        self._graphs: dict[str, Graph | None] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._now = _Compiling()
        self.unread: set[str] = set()
        """What went wrong while graphs were read."""

    def get(self, key: str) -> Graph | None:
        """Return a graph, or None if it was compiled at another time, or if several have its key."""
        return self._graphs.get(key)

    def open(self) -> None:
        """Listen to torch.compile; nothing is imported that the program did not use."""
        entry: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
        if entry is not None:
            self._replace(entry, "__call__", self._around_dynamo)

    def close(self) -> None:
        """Take everything out again that nobody else has replaced since."""
        for owner, name, ours, original in reversed(self._replaced):
            if owner.__dict__.get(name) is ours:
                setattr(owner, name, original)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original = owner.__dict__.get(name)
        if original is not None:
            ours = around(original)
            setattr(owner, name, ours)
            self._replaced.append((owner, name, ours, original))

    def _around_dynamo(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(wrapper: Any, model: Any, inputs: Any, **options: Any) -> Any:
            with self._reading():
                self._listen_to_inductor()
                self._now.traced = paths_of(model.graph)
            try:
                return original(wrapper, model, inputs, **options)
            finally:
                self._now.traced = {}

        return __call__

    def _listen_to_inductor(self) -> None:
        # torch.compile imports both next; a backward pass is compiled later, when it first runs
        from torch._inductor import compile_fx, output_code

        if len(self._replaced) == 1:
            self._replace(compile_fx, "_compile_fx_inner", self._around_inductor)
            self._replace(output_code.CompiledFxGraph, "post_compile", self._around_loading)

    def _around_inductor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _compile_fx_inner(gm: Any, *arguments: Any, **options: Any) -> Any:
            outer, self._now.lowered = self._now.lowered, gm
            try:
                return original(gm, *arguments, **options)
            finally:
                self._now.lowered = outer

        return _compile_fx_inner

    def _around_loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Read a graph when it is ready, fresh or from a cache: by now inductor has added its own nodes."""

        def post_compile(compiled: Any, *arguments: Any, **options: Any) -> Any:
            with self._reading():
                traced, lowered = self._now.traced, self._now.lowered
                paths: dict[str, Path | None] = {**traced}
                if lowered is not None:
                    paths = paths_of_lowered(lowered.graph, traced)
                key, graph = str(compiled._fx_graph_cache_key), Graph(sites_of(compiled.source_code), paths)
                # without its cache inductor gives all graphs the same key
                self._graphs[key] = graph if self._graphs.get(key, graph) == graph else None
            return original(compiled, *arguments, **options)

        return post_compile

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the program's own compilation goes on
            self.unread.add(f"{type(error).__name__}: {error}")


class _Compiling(threading.local):
    """What this thread compiles."""

    def __init__(self) -> None:
        self.traced: dict[str, Path] = {}
        """Dynamo's nodes."""

        self.lowered: Any = None
        """The graph that inductor makes code of."""


# --- graphs -----------------------------------------------------------------------------------------------


def paths_of(graph: Any) -> dict[str, Path]:
    """Return the layers of the nodes of Dynamo's graph; a node in no module is the compiled code's own."""
    return {node.name: _path(node.meta.get("nn_module_stack")) for node in graph.nodes if _computes(node)}


def paths_of_lowered(graph: Any, traced: Mapping[str, Path]) -> dict[str, Path | None]:
    """Return the layers of the nodes that inductor names.

    Args:
        graph: inductor's; it names a node by the node of Dynamo's that it came from, one of a backward pass,
            which came from none, by itself.
        traced: the layers of Dynamo's nodes, as far as they are known.
    """
    found: dict[str, set[Path | None]] = {}
    for node in graph.nodes:
        if not _computes(node):
            continue
        origin = node.meta.get("from_node")
        name = str(origin[0].name) if origin else node.name
        stated = [node.meta[key] for key in ("nn_module_stack", "fwd_nn_module_stack") if key in node.meta]
        path = traced.get(name) if origin else None
        if path is None and stated:
            path = _path(next(filter(None, stated), None))
        found.setdefault(name, set()).add(path)
    return {name: paths.pop() for name, paths in found.items() if len(paths) == 1}


def _computes(node: Any) -> bool:
    return str(node.op).startswith("call_")


def _path(stack: Mapping[str, tuple[str, Any]] | None) -> Path:
    """Return the layers of a node, named relative to the module or function that was compiled."""
    return tuple(
        Layer(str(key), _relative(place), kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__)
        for key, (place, kind) in (stack or {}).items()
    )


_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def _relative(place: str) -> str:
    """Return `blocks.0.fc` for `L['self'].blocks[0].fc` and for older ways to write it."""
    words = [word for word in _STEP.sub(r".\1", place).split(".") if word not in ("", "_modules", "_orig_mod")]
    return ".".join(words[2:] if words[:1] in (["L"], ["G"]) else words)


# --- generated code ---------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"^\s*def (call|partition_\d+)\(")
_SOURCES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_PART = re.compile(r"\bpartitions\[(\d+)\]\(")
_CALLS = (
    (re.compile(r"\b(\w+)\.run\("), "{}"),
    (re.compile(r"\bextern_kernels\.(\w+)\("), "aten::{}"),
    (re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.\w+\("), "{}::{}"),
    (re.compile(r"(?<![\w.])aten\.(\w+)(?:\.\w+)?\("), "aten::{}"),
    (re.compile(r"^\s*(cpp_\w+)\("), "{}"),
)


def sites_of(code: str) -> list[Site]:
    """Return the calls in code that inductor generated, in the order in which they are made.

    Inductor writes no sources above the calls of its C++ kernels: those sites have none.
    """
    functions = _functions(code)
    return list(_sites_in("call", functions))


def _functions(code: str) -> dict[str, list[str]]:
    """Return the lines of the functions that call kernels; the text of kernels before them is no part of them."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in code.splitlines():
        begins = _FUNCTION.match(line)
        if begins:
            lines = found[begins[1]] = []
        elif line and not line[0].isspace():
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def _sites_in(name: str, functions: Mapping[str, list[str]]) -> Iterator[Site]:
    sources: tuple[str, ...] = ()
    for line in functions.get(name, []):
        comment = line.lstrip().startswith("#")
        part = _PART.search(line)
        if comment:
            named = _SOURCES.search(line)
            if named:
                sources = tuple(filter(None, (word.strip() for word in named[1].split(","))))
        elif part:
            yield from _sites_in(f"partition_{part[1]}", functions)
        else:
            operator = _called(line)
            if operator is not None:
                yield Site(operator, sources)
                sources = ()


def _called(line: str) -> str | None:
    for pattern, form in _CALLS:
        found = pattern.search(line)
        if found:
            return form.format(*found.groups())
    return None
