"""Graphs of ONNX files: nodes with their attributes, shapes by the library's own inference, edges by names.

Nodes that state a constant are not calls. Nodes that compute only with constants are calls, as in published counts,
although a runtime may fold them; `from_constants` in the settings is their number. A file does not describe storages,
so a view is an operator that is defined as one: it gives its input another shape or another name. Values of weights are
not read, wherever they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xsp.errors import GraphError, first_line
from xsp.graph import keys, onnxshapes
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Problem, Role, Source, Tensor
from xsp.graph.values import Flow
from xsp.plugins import importing
from xsp.stats import known_sum
from xsp.version import __version__

CONSTANTS = frozenset(["Constant", "ConstantOfShape"])
"""Operators that state a value, and compute nothing if their inputs are constants too."""

VIEWS = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"])
"""Operators that give their input another shape or name."""

RANDOM = frozenset(
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"]
)
STANDARD_DOMAINS = frozenset(["", "ai.onnx", "ai.onnx.ml"])
WITH_SUBGRAPHS = frozenset(["If", "Loop", "Scan", "SequenceMap"])
VALUE_DEPENDENT = frozenset(
    "Gather GatherElements GatherND Scatter ScatterElements ScatterND NonZero Unique TopK Compress".split()
)
QUANTISED = frozenset(["int8", "uint8", "int4", "uint4"])
"""Types of the weights of quantised layers."""

MOST_NAMED = 3

_TYPES = {"FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "BOOL": "bool"}

_VALUE_FIELDS = ("f", "i", "s", "t", "g", "floats", "ints", "strings", "tensors", "graphs")
"""Fields of an attribute that hold its value."""

WINDOWS = {"Conv", "ConvInteger", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"}
"""Operators that move a kernel over their input."""


def load(path: Path, batch: int | None = None, sizes: Mapping[str, int] | None = None) -> Graph:
    """Read an ONNX file.

    Args:
        path: the file; separate files with its weights are not needed.
        batch: first dimension of all inputs; default: the number in the file, or 1 if the file has a name instead.
        sizes: numbers for named dimensions of inputs, by name.

    Raises:
        GraphError: the library is missing, the file is damaged, does not fit that batch, or has no such names.
    """
    with importing(GraphError, "ONNX files need the library onnx ({error}); pip install 'xsp[onnx]'"):
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    model = _read(onnx, path)
    problems: list[Problem] = list(_missing_files(path, model))
    file_batch = onnxshapes.set_sizes(model, batch, onnxshapes.check_sizes(path, model, sizes or {}, batch), problems)
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and not 0 < opset.version <= newest:
            problems.append(
                Problem(
                    f"opset {opset.version}",
                    f"onnx {onnx.__version__} supports 1 to {newest}; operators are read as defined there",
                )
            )
    model = onnxshapes.with_inferred_shapes(onnx, model, problems)
    advice = "omit --batch" if batch is not None else "give that one: --size" if sizes else "give that one: --batch N"
    return _Reader(onnx, model, path, problems, advice).graph(file_batch)


def _read(onnx: Any, path: Path) -> Any:
    try:
        model = onnx.load(str(path), load_external_data=False)
    except OSError as error:
        raise GraphError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # protobuf's errors have no common class across its versions
        raise GraphError(f"{path}: the ONNX file is damaged ({first_line(error)[:200]})") from error
    if not model.graph.node:
        raise GraphError(f"{path}: not an ONNX model, or a model without nodes")
    return model


def _missing_files(path: Path, model: Any) -> Iterator[Problem]:
    """Yield a problem for each missing file of weights; shapes do not need them."""
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    for location in sorted(locations):
        if not (path.parent / location).is_file():
            yield Problem("weights", f"{location} with weights is missing; the graph does not need it")


class _Reader:
    """Reads the nodes of a model once, in order."""

    def __init__(self, onnx: Any, model: Any, path: Path, problems: list[Problem], advice: str) -> None:
        self.onnx, self.model, self.path, self.problems, self.advice = onnx, model, path, problems, advice
        self.versions = {opset.domain: opset.version for opset in model.opset_import}
        self.flow = Flow()
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self.storage: dict[str, str] = {}
        self.view_nodes: dict[str, int] = {}
        self.unknown_shapes: list[str] = []
        self.constant_count = self.folded_count = 0
        self.folded_names: set[str] = set()
        self.subgraph_nodes: list[str] = []
        self.used_names = {name for node in self.model.graph.node for name in (*node.input, *_outer_names(node))}
        self.used_names |= {output.name for output in self.model.graph.output}
        self._defaults: dict[tuple[str, str], dict[str, Any]] = {}
        graph = model.graph
        self.types = {info.name: _tensor(onnx, info.type) for info in (*graph.value_info, *graph.output, *graph.input)}
        self.impossible_outputs = {
            info.name
            for info in (*graph.value_info, *graph.output)
            if any(dim.dim_value < -1 for dim in info.type.tensor_type.shape.dim)
        }
        for tensor in graph.initializer:
            self.constants[tensor.name] = Tensor(_dtype(onnx, tensor.data_type), tuple(tensor.dims))
        for graph_input in graph.input:
            if graph_input.name not in self.constants:
                self.storage[graph_input.name] = graph_input.name
                self.flow.add_outside(graph_input.name, Role.INPUT, self.types[graph_input.name].bytes)

    def graph(self, batch: int | None) -> Graph:
        """Return the graph."""
        for node in self.model.graph.node:
            self._visit(node)
        if not self.nodes:
            raise GraphError(f"{self.path}: none of its nodes depends on an input")
        if self.unknown_shapes:
            names = ", ".join(self.unknown_shapes[:MOST_NAMED])
            more = f" and {len(self.unknown_shapes) - MOST_NAMED} more" if len(self.unknown_shapes) > MOST_NAMED else ""
            self.problems.append(Problem("shapes", f"unknown for the outputs of {names}{more}"))
        if self.subgraph_nodes:
            self.problems.append(Problem("graphs inside nodes", f"not analysed: {', '.join(self.subgraph_nodes)}"))
        settings: dict[str, Any] = {
            "batch": batch,
            "train": False,
            "opset": self.versions.get("", self.versions.get("ai.onnx")),
            "constant_nodes": self.constant_count,
            "from_constants": self.folded_count,
            "onnx": self.onnx.__version__,
            "xsp": __version__,
        }
        return Graph(
            name=self.path.name,
            source=Source.ONNX,
            nodes=tuple(self.nodes),
            edges=self.flow.edges(),
            values=self.flow.final_values(),
            known_by=KnownBy.NAMES,
            counts="nodes of ONNX",
            parameters=self._parameters(),
            settings=settings,
            problems=tuple(self.problems),
        )

    def _visit(self, node: Any) -> None:
        names = [name for name in node.input if name]
        for name in names:
            if name not in self.storage and name not in self.constants:
                raise GraphError(
                    f"{self.path}: the ONNX file is damaged ({_label(node)} reads {name}, which no node makes)"
                )
        if node.op_type in CONSTANTS and all(name in self.constants for name in names):
            self.constant_count += 1
            for name in node.output:
                self.constants[name] = self._constant_tensor(node, name)
            return
        self._add(node)

    def _constant_tensor(self, node: Any, name: str) -> Tensor:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    return Tensor(_dtype(self.onnx, attribute.t.data_type), tuple(attribute.t.dims))
                if attribute.name == "sparse_value":
                    sparse = attribute.sparse_tensor
                    return Tensor(_dtype(self.onnx, sparse.values.data_type), tuple(sparse.dims))
        return self.types.get(name, Tensor(None, None))

    def _add(self, node: Any) -> None:
        number, domain = len(self.nodes), node.domain
        output_names = [
            name for place, name in enumerate(node.output) if name and (not place or name in self.used_names)
        ]
        if all(
            name in self.folded_names or name in self.constants for name in (*node.input, *_outer_names(node)) if name
        ):
            self.folded_count += 1
            self.folded_names.update(output_names)
        standard = domain in STANDARD_DOMAINS
        inputs: list[tuple[str, Any]] = []
        reads: list[int] = []
        for place, name in enumerate(node.input):
            inputs.append((f"input{place}", self._type(name) if name else None))
            if name:
                reads.append(self._read(number, name))
        if node.op_type in WITH_SUBGRAPHS:
            self.subgraph_nodes.append(_label(node))
            outer_names = [name for name in _outer_names(node) if name in self.storage or name in self.constants]
            inputs += [(f"outer{place}", self._type(name)) for place, name in enumerate(outer_names)]
            reads += [self._read(number, name) for name in outer_names]
        outputs = tuple(map(self._type, output_names))
        misfit = self._misfit(node, outputs) if standard else ""
        if misfit:
            self.problems.append(Problem(_label(node), misfit))
            outputs = tuple(Tensor(tensor.dtype, None) for tensor in outputs)
        if any(tensor.shape is None for tensor in outputs):
            self.unknown_shapes.append(_label(node))
        view = standard and any(node.input[:1]) and (node.op_type in VIEWS or _is_idle_dropout(node, self.versions))
        returns, writes = [], []
        for name in output_names:
            if view and node.op_type in VIEWS and self._conflicts(inputs, name):
                raise GraphError(
                    f"{self.path}: {_label(node)} fixes the batch size that the file was made with; {self.advice}"
                )
            if view:
                self.storage[name] = self.storage.get(node.input[0], node.input[0])
                self.view_nodes[name] = number
                returns.append(reads[0])
            else:
                self.storage[name] = name
                writes.append(self.flow.write(number, name, Role.ACTIVATION, self._type(name).bytes))
                returns.append(writes[-1])
        if node.op_type in WITH_SUBGRAPHS or not standard or misfit:
            kind = NodeKind.OPAQUE
        else:
            kind = NodeKind.VIEW if view else NodeKind.RANDOM if node.op_type in RANDOM else NodeKind.COMPUTE
        if kind is NodeKind.RANDOM:
            self.flow.add_order(number, kind)
        call = Call(
            f"{'onnx' if domain in ('', 'ai.onnx') else domain}::{node.op_type}",
            (*inputs, *self._attributes(node).items()),
            outputs,
            str(self._version(node)),
            keys.UNIFORM if node.op_type in VALUE_DEPENDENT else "",
        )
        self.nodes.append(
            Node(
                call, keys.key(call), kind, node.name, reads=tuple(reads), returns=tuple(returns), writes=tuple(writes)
            )
        )

    def _read(self, number: int, name: str) -> int:
        if name in self.constants:
            tensor = self.constants[name]
            self.flow.add_outside(name, Role.WEIGHT if _is_weight(tensor) else Role.CONSTANT, tensor.bytes)
            return self.flow.read(number, name)
        return self.flow.read(number, self.storage[name], self.view_nodes.get(name))

    def _type(self, name: str) -> Tensor:
        return self.constants.get(name) or self.types.get(name) or Tensor(None, None)

    def _conflicts(self, inputs: list[tuple[str, Any]], name: str) -> bool:
        old_count, new_count = inputs[0][1].elements, self._type(name).elements
        return old_count is not None and new_count is not None and old_count != new_count

    def _misfit(self, node: Any, outputs: tuple[Tensor, ...]) -> str:
        """Return why a convolution or pool cannot run on its input, which shape inference does not check; else ""."""
        if node.op_type not in WINDOWS:
            return ""
        if len(node.input) < (2 if "Conv" in node.op_type else 1) or not outputs:
            return "it lacks an input or its output"
        input_shape = self._type(node.input[0]).shape
        if node.output[0] in self.impossible_outputs or (
            input_shape and 0 not in input_shape and 0 in (outputs[0].shape or ())
        ):
            return f"its kernel is larger than its padded input{f' {list(input_shape)}' if input_shape else ''}"
        if "Conv" not in node.op_type or input_shape is None or len(input_shape) < 2:
            return ""
        kernel = self._type(node.input[1]).shape
        if kernel is None:
            return ""
        if len(kernel) != len(input_shape):
            return f"its kernel {list(kernel)} does not fit its input {list(input_shape)}"
        channels = kernel[0] if node.op_type == "ConvTranspose" else kernel[1] * self._attributes(node).get("group", 1)
        return (
            ""
            if channels == input_shape[1]
            else f"its kernel {list(kernel)} is for {channels} channels, not {input_shape[1]}"
        )

    def _version(self, node: Any) -> int | None:
        """Return the version of its vocabulary that introduced the operator in its present form."""
        schema = self._schema(node)
        return schema.since_version if schema is not None else self.versions.get(node.domain)

    def _schema(self, node: Any) -> Any:
        version = self.versions.get(node.domain, self.versions.get("ai.onnx" if not node.domain else "", 1))
        try:
            return self.onnx.defs.get_schema(node.op_type, version, "" if node.domain == "ai.onnx" else node.domain)
        except self.onnx.defs.SchemaError:
            return None

    def _attributes(self, node: Any) -> Mapping[str, Any]:
        """Return the attributes of a node, with the defaults of its version, by name."""
        key = (node.domain, node.op_type)
        if key not in self._defaults:
            schema = self._schema(node)
            declared = schema.attributes.items() if schema is not None else ()
            self._defaults[key] = {
                name: self._value(attribute.default_value)
                for name, attribute in declared
                if attribute.default_value.name
            }
        attributes = {**self._defaults[key], **{attribute.name: self._value(attribute) for attribute in node.attribute}}
        return dict(sorted(attributes.items()))

    def _value(self, attribute: Any) -> Any:
        if not attribute.type or attribute.ref_attr_name:  # files of the first version do not state the type
            fields = {field.name: value for field, value in attribute.ListFields()}
            return _plain(next((fields[name] for name in _VALUE_FIELDS if name in fields), None))
        return _plain(self.onnx.helper.get_attribute_value(attribute))

    def _parameters(self) -> int | None:
        """Return the elements of the constants that are weights and that calls read; None if a shape is unknown."""
        tensors = [tensor for name, tensor in self.constants.items() if self.flow.has_value(name)]
        return known_sum(tensor.elements for tensor in tensors if tensor.dtype is None or _is_weight(tensor))


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a constant is a weight: one of floating-point numbers, or the matrix of a quantised layer."""
    kind = tensor.dtype or ""
    matrix = len(tensor.shape or ()) > 1  # scales and zero points of channels are vectors
    return kind.startswith(("float", "bfloat", "complex")) or (kind in QUANTISED and matrix)


def _outer_names(node: Any) -> list[str]:
    """Return the distinct outer names that the graphs inside a node read; empty if it has no graphs."""
    names: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            local = {info.name for info in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                names.update(dict.fromkeys(name for name in (*inner.input, *_outer_names(inner)) if name not in local))
                local.update(inner.output)
            names.update(dict.fromkeys(output.name for output in graph.output if output.name not in local))
    names.pop("", None)
    return list(names)


def _is_idle_dropout(node: Any, versions: Mapping[str, int]) -> bool:
    """Return whether a node is a drop-out outside training, which passes its input on."""
    if node.op_type != "Dropout":
        return False
    if versions.get("", versions.get("ai.onnx", 0)) < 7:
        return any(attribute.name == "is_test" and attribute.i for attribute in node.attribute)
    return len(node.input) < 3 or not node.input[2]


def _label(node: Any) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()


def _dtype(onnx: Any, number: int) -> str | None:
    if not number:
        return None
    try:
        name = str(onnx.TensorProto.DataType.Name(number))
    except ValueError:
        return None
    return _TYPES.get(name, name.lower())


def _tensor(onnx: Any, kind: Any) -> Tensor:
    if not kind.HasField("tensor_type"):
        return Tensor(None, None)
    tensor_type = kind.tensor_type
    sizes = [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None for dim in tensor_type.shape.dim
    ]
    complete = tensor_type.HasField("shape") and None not in sizes
    return Tensor(
        _dtype(onnx, tensor_type.elem_type), tuple(size for size in sizes if size is not None) if complete else None
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "data_type"):
        return f"tensor {value.data_type} {list(value.dims)}"
    if hasattr(value, "node"):
        return f"graph of {len(value.node)} nodes"
    try:
        return tuple(_plain(element) for element in value)
    except TypeError:
        return str(type(value).__name__)
