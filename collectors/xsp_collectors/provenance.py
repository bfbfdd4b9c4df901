"""The layers from which torch.compile generated code, according to the compiler.

Compiled code calls no modules, so no calls of layers can be observed. But the compiler knows the layers: Dynamo notes
on each node of its graph the modules in which it was traced, and inductor writes above each kernel call the nodes that
it was made from. Both are read when something is compiled, which is not part of a timed step; no option is switched, so
nothing is recompiled. Code from inductor's cache has the comments too, but its backward graph is not traced again: of
its nodes, only those of the forward pass have a layer.

The data that is read here is internal to torch. If a part is missing, operators stay children of the whole compiled
module.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from xsp_collectors.layercalls import LayerCall, Path


class Site(NamedTuple):
    """A place in generated code that calls a kernel or an operator."""

    operator: str
    """The name of the call in a profiler."""

    sources: tuple[str, ...]
    """The nodes of the graph from which the call was generated."""


class CompiledGraph(NamedTuple):
    """A compiled graph."""

    sites: list[Site]
    paths: dict[str, Path | None]
    """Paths by node; None for a node that inductor added. Nodes about which nothing is known are missing."""


class CompiledGraphs:
    """The graphs that inductor compiled while this was open, by the key that a profiler shows in their calls' names."""

    def __init__(self) -> None:
        self._graphs: dict[str, CompiledGraph | None] = {}
        self._hooks: list[tuple[Any, str, Any, Any]] = []
        self._current = _Compilation()
        self.errors: set[str] = set()
        """Errors in reading graphs."""

    def get(self, key: str) -> CompiledGraph | None:
        """Return a graph; None if it was compiled at another time, or if several graphs have its key."""
        return self._graphs.get(key)

    def open(self) -> None:
        """Hook into torch.compile; nothing is imported that the program does not use."""
        entry: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
        if entry is not None:
            self._replace(entry, "__call__", self._wrap_dynamo)

    def close(self) -> None:
        """Remove the hooks, except those that other code has replaced since."""
        for owner, name, wrapper, original in reversed(self._hooks):
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)
        self._hooks.clear()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = owner.__dict__.get(name)
        if original is not None:
            wrapper = wrap(original)
            setattr(owner, name, wrapper)
            self._hooks.append((owner, name, wrapper, original))

    def _wrap_dynamo(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(wrapper: Any, model: Any, inputs: Any, **options: Any) -> Any:
            with self._collect_errors():
                self._listen_to_inductor()
                self._current.traced_paths = paths_of(model.graph)
            try:
                return original(wrapper, model, inputs, **options)
            finally:
                self._current.traced_paths = {}

        return __call__

    def _listen_to_inductor(self) -> None:
        """Wrap Inductor's functions, once."""
        # torch.compile imports both next anyway; a backward pass is compiled later, when it first runs
        from torch._inductor import compile_fx, output_code

        if len(self._hooks) == 1:
            self._replace(compile_fx, "_compile_fx_inner", self._wrap_inductor)
            self._replace(output_code.CompiledFxGraph, "post_compile", self._wrap_loading)

    def _wrap_inductor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _compile_fx_inner(gm: Any, *arguments: Any, **options: Any) -> Any:
            previous, self._current.lowered_module = self._current.lowered_module, gm
            try:
                return original(gm, *arguments, **options)
            finally:
                self._current.lowered_module = previous

        return _compile_fx_inner

    def _wrap_loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `post_compile` to read a graph when it is ready, new or cached: inductor has then added its nodes."""

        def post_compile(compiled: Any, *arguments: Any, **options: Any) -> Any:
            with self._collect_errors():
                traced_paths, lowered_module = self._current.traced_paths, self._current.lowered_module
                paths: dict[str, Path | None] = {**traced_paths}
                if lowered_module is not None:
                    paths = paths_of_lowered(lowered_module.graph, traced_paths)
                key, graph = str(compiled._fx_graph_cache_key), CompiledGraph(sites_of(compiled.source_code), paths)
                # without its cache inductor gives all graphs the same key
                self._graphs[key] = graph if self._graphs.get(key, graph) == graph else None
            return original(compiled, *arguments, **options)

        return post_compile

    @contextlib.contextmanager
    def _collect_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the program's own compilation must continue
            self.errors.add(f"{type(error).__name__}: {error}")


class _Compilation(threading.local):
    """The compilation that runs on this thread."""

    def __init__(self) -> None:
        self.traced_paths: dict[str, Path] = {}
        """Paths of Dynamo's nodes."""

        self.lowered_module: Any = None
        """The graph that inductor generates code from."""


# --- graphs -----------------------------------------------------------------------------------------------


def paths_of(graph: Any) -> dict[str, Path]:
    """Return the layers of the nodes of Dynamo's graph; a node without modules belongs to the compiled code itself."""
    return {node.name: _path(node.meta.get("nn_module_stack")) for node in graph.nodes if _computes(node)}


def paths_of_lowered(graph: Any, traced_paths: Mapping[str, Path]) -> dict[str, Path | None]:
    """Return the layers of the nodes that inductor names.

    Args:
        graph: inductor's graph; a node is named after the Dynamo node that it came from. A node of a backward pass has
            no such origin, and its own name.
        traced_paths: the known layers of Dynamo's nodes.
    """
    paths_by_node: dict[str, set[Path | None]] = {}
    for node in graph.nodes:
        if not _computes(node):
            continue
        origin = node.meta.get("from_node")
        name = str(origin[0].name) if origin else node.name
        stacks = [node.meta[key] for key in ("nn_module_stack", "fwd_nn_module_stack") if key in node.meta]
        path = traced_paths.get(name) if origin else None
        if path is None and stacks:
            path = _path(next(filter(None, stacks), None))
        paths_by_node.setdefault(name, set()).add(path)
    return {name: paths.pop() for name, paths in paths_by_node.items() if len(paths) == 1}


def _computes(node: Any) -> bool:
    return str(node.op).startswith("call_")


def _path(stack: Mapping[str, tuple[str, Any]] | None) -> Path:
    """Return the layers of a node, named relative to the compiled module or function."""
    return tuple(
        LayerCall(str(key), _relative(location), kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__)
        for key, (location, kind) in (stack or {}).items()
    )


_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def _relative(location: str) -> str:
    """Return `blocks.0.fc` for `L['self'].blocks[0].fc`, and for older notations."""
    words = [word for word in _STEP.sub(r".\1", location).split(".") if word not in ("", "_modules", "_orig_mod")]
    return ".".join(words[2:] if words[:1] in (["L"], ["G"]) else words)


# --- generated code ---------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"^\s*def (call|partition_\d+)\(")
_SOURCES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_PARTITION = re.compile(r"\bpartitions\[(\d+)\]\(")
_CALLS = (
    (re.compile(r"\b(\w+)\.run\("), "{}"),
    (re.compile(r"\bextern_kernels\.(\w+)\("), "aten::{}"),
    (re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.\w+\("), "{}::{}"),
    (re.compile(r"(?<![\w.])aten\.(\w+)(?:\.\w+)?\("), "aten::{}"),
    (re.compile(r"^\s*(cpp_\w+)\("), "{}"),
)


def sites_of(code: str) -> list[Site]:
    """Return the call sites in code that inductor generated, in the order of execution.

    Inductor writes no sources above the calls of its C++ kernels: those sites have none.
    """
    # the lines of the functions that call kernels, without the source of the kernels before them
    functions: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in code.splitlines():
        header = _FUNCTION.match(line)
        if header:
            lines = functions[header[1]] = []
        elif line and not line[0].isspace():
            lines = None
        elif lines is not None:
            lines.append(line)
    return list(_sites_in("call", functions))


def _sites_in(name: str, functions: Mapping[str, list[str]]) -> Iterator[Site]:
    sources: tuple[str, ...] = ()
    for line in functions.get(name, []):
        is_comment = line.lstrip().startswith("#")
        partition = _PARTITION.search(line)
        if is_comment:
            match = _SOURCES.search(line)
            if match:
                sources = tuple(filter(None, (word.strip() for word in match[1].split(","))))
        elif partition:
            yield from _sites_in(f"partition_{partition[1]}", functions)
        else:
            operator = _operator_of(line)
            if operator is not None:
                yield Site(operator, sources)
                sources = ()


def _operator_of(line: str) -> str | None:
    for pattern, template in _CALLS:
        match = pattern.search(line)
        if match:
            return template.format(*match.groups())
    return None
