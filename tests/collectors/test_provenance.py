"""Layers in compiled code: what inductor says of its code, and where operators go because of it.

The code is generated and run here, by a C++ compiler, or only generated, where it is Triton's, which needs a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.correlate.evidence import correlate  # noqa: E402
from xsp.schema import Span  # noqa: E402
from xsp.testing import spans  # noqa: E402
from xsp_collectors.compiledlayers import place  # noqa: E402
from xsp_collectors.layercalls import LayerCall, Path, common_prefix  # noqa: E402
from xsp_collectors.provenance import CompiledGraph, CompiledGraphs, Site, paths_of_lowered, sites_of  # noqa: E402

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler here"
)
A, B = LayerCall("1", "a", "Linear"), LayerCall("2", "a.b", "ReLU")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(16, 16)
        self.act = torch.nn.GELU()

    def forward(self, value: Any) -> Any:
        return self.act(self.fc(value)) + value


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.blocks = torch.nn.Sequential(Block(), Block())

    def forward(self, value: Any) -> Any:
        return self.blocks(torch.relu(self.stem(value)))


@pytest.fixture
def fresh_compiler(tmp_path, monkeypatch) -> Iterator[None]:
    """A compiler that has compiled nothing yet and whose cache nobody shares."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- generated code ---------------------------------------------------------------------------------------

CODE = """
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''
# Topologically Sorted Source Nodes: [not_this], Original ATen: [aten.relu]
def triton_poi_fused_relu_0(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
''', device_str='cuda')

class Runner:
    def call(self, args):
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
        extern_kernels.addmm(primals_2, primals_3, out=buf0)
        partition0_args = [buf0]
        (buf1,) = self.partitions[0](partition0_args)
        # Topologically Sorted Source Nodes: [attend], Original ATen: [aten._flash]
        buf9 = torch.ops.aten._flash.default(buf1)
        return (buf9,)

    def partition_0(args):
        # Topologically Sorted Source Nodes: [x, relu], Original ATen: [aten.addmm, aten.relu]
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(buf1, 64, stream=stream0)

def get_args():
    extern_kernels.addmm(this, is_not, called)
"""


def test_calls_are_read_in_the_order_in_which_they_are_made_with_the_nodes_above_them():
    assert sites_of(CODE) == [
        Site("aten::addmm", ("linear",)),
        Site("triton_poi_fused_relu_0", ("x", "relu")),
        Site("aten::_flash", ("attend",)),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_triton_code_names_the_layers_of_each_kernel(monkeypatch):
    """The generator is inductor's own, told that the CPU speaks Triton; what it wrote cannot run here."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch.utils import _triton

    pytest.importorskip("triton")
    written: list[CompiledGraph] = []

    def keep(code: str) -> None:
        lowered = graphs._current.lowered_module
        written.append(CompiledGraph(sites_of(code), paths_of_lowered(lowered.graph, graphs._current.traced_paths)))
        raise RuntimeError("this is as far as it can go without a GPU")

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(keep))
    monkeypatch.setattr(_triton, "triton_hash_with_backend", lambda: "none")
    graphs = CompiledGraphs()
    graphs.open()
    try:
        with config.patch(cpu_backend="triton"), torch.no_grad(), pytest.raises(Exception, match="as far as"):
            torch.compile(Net())(torch.randn(4, 16))
    finally:
        graphs.close()
    (graph,) = written
    told = [
        [each.name for each in common_prefix([graph.paths[name] or () for name in site.sources])]
        for site in graph.sites
        if site.operator.startswith("triton_")
    ]
    assert told == [[], ["blocks", "blocks.0"], ["blocks", "blocks.1"]]


# --- real compiled code -----------------------------------------------------------------------------------


def profiled(model: Any, folder: Any) -> list[Span]:
    """Profile training steps of a model that is compiled in the block; return the last step's operators and layers."""
    value = torch.randn(4, 16)
    with xsp.profile("compiled", levels="M/L/G", out=folder, collectors=["modules", "training", "torchops"]) as prof:
        for _ in range(prof.schedule.steps_for(1)):
            with prof.step():
                model(value).sum().backward()
    trace = xsp.load(folder)
    rows = trace.sql("SELECT * FROM spans WHERE timed AND rung = 70 ORDER BY start_ns").fetchall()
    return [Span._make(row) for row in rows]


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_operators_of_compiled_code_belong_to_their_layers_forward_and_backward(tmp_path):
    with torch._functorch.config.patch(enable_autograd_cache=False):
        rows = profiled(torch.compile(Net()), tmp_path / "run")
    names = {row.span_id: row.name for row in rows}
    products = [
        (row.phase, names.get(row.layer_id), row.parent_rule)
        for row in rows
        if row.name in ("aten::addmm", "aten::mm") and "sources" in (row.attributes or "")
    ]
    assert products[:3] == [
        ("forward", "stem", "explicit"),
        ("forward", "blocks.0.fc", "explicit"),
        ("forward", "blocks.1.fc", "explicit"),
    ]
    assert {("backward", "blocks.1.fc", "explicit"), ("backward", "blocks.0.fc", "explicit")} <= set(products[3:])
    layers = [(row.name, row.depth, names.get(row.parent_id)) for row in rows if row.collector == "torchops"]
    assert ("blocks.0.fc", 3, "blocks.0") in layers


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_listening_changes_no_result_compiles_nothing_twice_and_leaves_nothing_behind():
    entry = torch._TorchCompileInductorWrapper.__call__
    torch.manual_seed(0)
    model, value = Net(), torch.randn(4, 16)
    counter = import_module("torch._dynamo.testing").CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter)
    before = compiled(value)
    graphs = CompiledGraphs()
    graphs.open()
    during = compiled(value)
    graphs.close()
    assert torch.equal(before, during)
    assert torch.equal(before, compiled(value))
    assert counter.frame_count == 1
    assert torch._TorchCompileInductorWrapper.__call__ is entry


@pytest.mark.slow
def test_a_graph_that_cannot_be_read_is_compiled_all_the_same_and_said(monkeypatch):
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda wrapper, model, inputs: "compiled")
    graphs = CompiledGraphs()
    graphs.open()
    wrapper = torch._TorchCompileInductorWrapper("default", None, None)
    assert wrapper("no graph at all", []) == "compiled"
    graphs.close()
    assert graphs.errors == {"AttributeError: 'str' object has no attribute 'graph'"}


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_triton_kernels_of_a_real_device_belong_to_their_layers(tmp_path):
    model, value = torch.compile(Net().cuda()), torch.randn(4, 16, device="cuda")
    with xsp.profile("compiled", out=tmp_path / "run") as prof, torch.inference_mode():
        for _ in range(prof.schedule.steps_for(2)):
            with prof.step():
                model(value)
    trace = xsp.load(tmp_path / "run")
    seen = trace.sql(
        "SELECT layer.name, kernel.grade FROM merged kernel JOIN merged layer ON layer.span_id = kernel.layer_id "
        "WHERE kernel.kind = 'kernel' AND kernel.name LIKE 'triton%'"
    ).fetchall()
    assert {("blocks.0", "inferred"), ("blocks.1", "inferred")} <= set(seen)


# --- placing ----------------------------------------------------------------------------------------------


class Known(CompiledGraphs):
    """Graphs that a test states: sites as `operator: node node`, one a line, and the layers of nodes."""

    def __init__(self, sites: str, **paths: Path | None) -> None:
        super().__init__()
        found = [line.split(": ") for line in sites.strip().splitlines()]
        listed = [Site(operator.strip(), tuple(nodes.split())) for operator, nodes in found]
        self._graphs["k"] = CompiledGraph(listed, dict(paths))


CALL = "##_Call_CompiledFxGraph_k_##"


def step(text: str) -> list[Span]:
    return [span._replace(name=span.name.replace("_", " ")) if span.name == CALL else span for span in spans(text)]


def grades(text: str, graphs: CompiledGraphs) -> dict[str, tuple[str | None, str | None]]:
    """Return the layer and the grade of each kernel."""
    rows = correlate(place(step(text), graphs).spans)
    names = {row.span_id: row.name for row in rows}
    return {row.name: (names.get(row.layer_id or ""), row.grade) for row in rows if row.kind == "kernel"}


def kernels_of(*names: str) -> str:
    """Return a compiled module's call in which kernels are launched one after the other."""
    lines = ["step net 0-100", "module net 1-99 depth=0", f"op {CALL} 2-90"]
    for place_, name in enumerate(names):
        start = 10 * (place_ + 1)
        lines += [
            f"op {name} {start}-{start + 8}",
            f"launch cuLaunchKernel {start + 1}-{start + 2} correlation_id={place_ + 1}",
            f"kernel k{place_} {100 + start}-{101 + start} correlation_id={place_ + 1}",
        ]
    return "\n".join(lines)


def test_a_kernel_of_one_layer_is_exact_and_one_of_several_is_inferred_for_the_layer_around_them():
    graphs = Known("t0: x\nt1: x y\nt2: w", x=(A,), y=(A, B), w=())
    assert grades(kernels_of("t0", "t1", "t2"), graphs) == {
        "k0": ("a", "exact"),
        "k1": ("a", "inferred"),
        "k2": ("net", "exact"),
    }


def test_a_node_that_inductor_added_weakens_the_evidence_and_one_that_nobody_knows_ends_it():
    graphs = Known("t0: x added\nt1: x stranger", x=(A,), added=None)
    assert grades(kernels_of("t0", "t1"), graphs) == {"k0": ("a", "inferred"), "k1": ("net", "exact")}
    assert (
        "1 operators of compiled graphs in a step name no layer, t1 (1)"
        in place(step(kernels_of("t0", "t1")), graphs).notes[0]
    )


def test_kernels_of_one_name_are_told_apart_by_order_and_not_at_all_if_some_are_missing():
    graphs = Known("t: x\nt: y", x=(A,), y=(A, B))
    assert grades(kernels_of("t", "t"), graphs) == {"k0": ("a", "exact"), "k1": ("a.b", "exact")}
    assert grades(kernels_of("t"), graphs) == {"k0": ("net", "exact")}


def test_a_layer_lasts_from_its_first_to_its_last_operator_in_a_row():
    found = place(step(kernels_of("t0", "t1", "t2", "t3")), Known(
        "t0: x\nt1: y\nt2: w\nt3: x", x=(A,), y=(A, B), w=()
    )).spans  # fmt: skip
    layers = [(span.name, span.start_ns // 1000, span.end_ns // 1000) for span in found if span.collector is None]
    assert [layer for layer in layers if layer[0] in ("a", "a.b")] == [("a", 10, 28), ("a.b", 20, 28), ("a", 40, 48)]


def test_a_fused_operator_says_which_nodes_and_layers_it_is_made_of():
    (fused,) = (span for span in place(step(kernels_of("t")), Known("t: x y", x=(A,), y=(A, B))).spans
                if span.name == "t")  # fmt: skip
    assert json.loads(fused.attributes or "") == {"sources": ["x", "y"], "layers": ["a", "a.b"]}


def test_a_backward_kernel_goes_to_the_call_of_the_same_graphs_forward_pass():
    text = f"""
        step net 0-100
        module net 1-49 depth=0
        op CompiledFunction 2-45 sequence_nr=7
        op {CALL} 3-40
        op t 10-20
        backward backward 50-95
        op CompiledFunctionBackward 51-90 sequence_nr=7 forward_thread=1 thread=2 phase=backward
        op {CALL} 52-80 thread=2
        op t 60-70 thread=2
        launch cuLaunchKernel 61-62 correlation_id=1 thread=2
        kernel k 110-111 correlation_id=1
    """
    graphs = Known("t: x", x=(A,))
    assert grades(text, graphs) == {"k": ("a", "exact")}
    assert [row.phase for row in correlate(place(step(text), graphs).spans) if row.kind == "kernel"] == ["backward"]


def test_a_graph_that_was_compiled_before_the_block_stays_one_call_and_is_counted():
    found = place(step(kernels_of("t")), CompiledGraphs())
    assert "1 calls of compiled graphs in a step are of graphs that were not compiled while" in found.notes[0]
    assert {span.name for span in found.spans if span.level == 30} == {"net"}


def test_nodes_of_older_and_newer_torch_name_the_same_layer():
    def named(place_: str) -> str:
        stack = {"key": (place_, torch.nn.Linear)}
        node = SimpleNamespace(op="call_function", name="mm", meta={"nn_module_stack": stack})
        (path,) = paths_of_lowered(SimpleNamespace(nodes=[node]), {}).values()
        return path[0].name if path else ""

    places = ("L['self'].blocks[0].fc", "L['self'].blocks.0.fc", "L['self']._modules['blocks']._modules['0'].fc")
    assert {named(place_) for place_ in places} == {"blocks.0.fc"}
