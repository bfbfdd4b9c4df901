"""Graphs captured from models and modules."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp import terminal  # noqa: E402
from xsp.cli import main  # noqa: E402
from xsp.errors import GraphError, ModelError, UsageError  # noqa: E402
from xsp.graph import NodeKind, section, work  # noqa: E402
from xsp.graph.node import EdgeKind, Phase, Role  # noqa: E402

nn = torch.nn


class Branches(nn.Module):
    """A layer that runs twice, a view, an addition in place, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.proj(self.proj(x))
        y += x
        return self.norm(y.transpose(0, 1))


def of(module, *shape: int, **options):
    return xsp.graph.of(module, torch.zeros(shape), **options)


def test_a_module_has_the_calls_of_a_step_with_their_modules() -> None:
    graph = of(Branches(), 8, 8)
    assert [(each.call.op, each.module, each.kind.value) for each in graph.nodes] == [
        ("aten::linear", "proj", "compute"),
        ("aten::linear", "proj#2", "compute"),
        ("aten::add_", "", "compute"),
        ("aten::transpose", "", "view"),
        ("aten::layer_norm", "norm", "compute"),
    ]
    assert graph.measures()["unique"] == 3
    assert graph.parameters == 8 * 8 + 8 + 16
    assert [(each.before, each.after, each.kind) for each in graph.edges] == [
        (0, 1, EdgeKind.DATA),
        (1, 2, EdgeKind.DATA),
        (2, 3, EdgeKind.DATA),
        (3, 4, EdgeKind.DATA),
    ]


def test_the_module_stays_as_it_is_and_no_hook_stays_behind() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    for train in (False, True):
        of(module, 4, 4, train=train)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all(each.grad is None for each in module.parameters())
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_key_depends_on_the_layout_and_not_on_the_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return self.b(self.a(x)), self.a(x.to(memory_format=torch.channels_last))

    graph = of(Twice(), 2, 4, 8, 8)
    first, second, _, third = graph.nodes
    assert first.key == second.key != third.key


def test_what_reshape_did_decides_whether_it_is_a_view() -> None:
    class Reshapes(nn.Module):
        def forward(self, x):
            return x.reshape(-1), x.t().reshape(-1)

    assert [each.kind for each in of(Reshapes(), 3, 4).nodes if each.call.op == "aten::reshape"] == [
        NodeKind.VIEW,
        NodeKind.COMPUTE,
    ]


def test_kinds_follow_from_what_became_of_the_storages() -> None:
    class Kinds(nn.Module):
        def forward(self, x):
            drawn = torch.rand_like(x)
            empty = torch.empty_like(x)
            torch.add(x, drawn, out=empty)
            return nn.functional.dropout(empty, training=False), torch.dropout_(empty, 0.5, False)

    kinds = [(each.call.op.removeprefix("aten::"), each.kind.value) for each in of(Kinds(), 3).nodes]
    assert kinds == [
        ("rand_like", "random"),
        ("empty_like", "create"),
        ("add", "compute"),
        ("dropout", "view"),
        ("dropout_", "view"),
    ]


def test_tied_weights_count_once() -> None:
    module = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
    module[1].weight = module[0].weight
    graph = xsp.graph.of(module, torch.zeros(2, 3, dtype=torch.long))
    assert graph.parameters == 60
    assert graph.nodes[0].call.values == "uniform"


def test_weights_that_are_tied_by_their_data_count_once() -> None:
    module = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
    module[1].weight.data = module[0].weight.data
    graph = xsp.graph.of(module, torch.zeros(2, 3, dtype=torch.long))
    assert graph.settings["rung"] == "moved to meta"
    assert (graph.parameters, graph.measures()["weight_bytes"]) == (60, 240)


def test_a_module_that_keeps_its_last_output_is_captured() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.last = self.linear(x)
            return self.last

    module = Keeps()
    last = module(torch.ones(2, 4))
    assert [each.call.op for each in of(module, 2, 4).nodes] == ["aten::linear"]
    assert module.last is last
    assert last.requires_grad


def test_a_training_step_has_phases_gradients_and_modules_in_backward() -> None:
    graph = of(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 2)), 3, 4, train=True)
    by_phase = {phase: [each for each in graph.nodes if each.phase is phase] for phase in Phase}
    assert all(by_phase.values())
    assert {each.module for each in by_phase[Phase.BACKWARD] if each.call.op == "aten::mm"} == {"0", "3"}
    assert {each.module for each in by_phase[Phase.OPTIMIZER]} == {""}
    assert {Role.GRADIENT, Role.STATE, Role.WEIGHT, Role.INPUT} <= {each.role for each in graph.values}
    assert any(each.kind is NodeKind.RANDOM for each in graph.nodes)
    assert graph.edges_of(EdgeKind.REUSE)


class Attends(nn.Module):
    """Attention of four heads, with the options of one case."""

    def __init__(self, mask: torch.dtype | None = None, pairs: bool = False, **options: object) -> None:
        super().__init__()
        self.proj, self.mask, self.pairs, self.options = nn.Linear(32, 32), mask, pairs, options

    def forward(self, x):
        query = self.proj(x).reshape(2, 6, 4, 8).transpose(1, 2)
        key = query[:, :2] if self.pairs else query
        mask = None if self.mask is None else torch.ones(6, 6, device=x.device).to(self.mask)
        return nn.functional.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, enable_gqa=self.pairs, **self.options
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": torch.float32}, {"mask": torch.bool}, {"is_causal": True}, {"dropout_p": 0.1}, {"pairs": True}],
)
def test_attention_with_gradients_has_the_calls_of_the_processor(options, monkeypatch) -> None:
    module, x = Attends(**options), torch.randn(2, 6, 32)
    without_values = xsp.graph.of(module, x, train=True)
    monkeypatch.setattr("xsp.graph.captured.without_values", lambda module: 1 / 0)
    on_cpu = xsp.graph.of(module, x, train=True)
    assert (without_values.settings["rung"], on_cpu.settings["rung"]) == ("moved to meta", "on the CPU")
    assert [node.call.op for node in without_values.nodes] == [node.call.op for node in on_cpu.nodes]
    assert [node.key for node in without_values.nodes] == [node.key for node in on_cpu.nodes]
    fused = [node.call.op for node in on_cpu.nodes if "flash_attention" in node.call.op]
    assert len(fused) == (0 if "dropout_p" in options else 2)


class Decides(nn.Module):
    """Looks at what it is given, or at that times a weight."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.scaled = scaled

    def forward(self, x):
        x = x * self.weight if self.scaled else x
        return x[x > 0] if x.sum().item() > 0 else x.exp()


def test_values_of_what_a_module_is_given_are_known_without_real_tensors() -> None:
    graph = xsp.graph.of(Decides(scaled=False), torch.tensor([1.0, -1.0, 3.0, 2.0]))
    assert (graph.settings["rung"], list(graph.problems)) == ("moved to meta", [])
    index = next(each for each in graph.nodes if each.call.op == "aten::index")
    assert "aten::item" in {each.call.op for each in graph.nodes}
    assert [each.shape for each in index.call.outputs] == [(3,)]


def test_values_that_decide_need_real_tensors_and_the_graph_says_so() -> None:
    graph = xsp.graph.of(Decides(scaled=True), torch.ones(4))
    assert [each.where for each in graph.problems] == ["moved to meta"]
    assert graph.settings["rung"] == "on the CPU"
    assert {"aten::item", "aten::index"} <= {each.call.op for each in graph.nodes}
    assert next(each for each in graph.nodes if each.call.op == "aten::item").kind is NodeKind.SYNC


def test_a_module_that_raises_is_one_line_with_the_reason_of_each_rung() -> None:
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    with pytest.raises(
        GraphError, match=r"Raises cannot be captured \(moved to meta, on the CPU: ValueError: mine "
    ) as caught:
        of(Raises(), 2)
    assert "\n" not in str(caught.value)


def test_a_lazy_module_is_captured_after_its_first_call() -> None:
    graph = of(nn.Sequential(nn.LazyLinear(5), nn.ReLU()), 2, 7)
    assert graph.parameters == 40


def test_flops_are_those_of_the_shapes_and_unknown_ones_are_counted_beside_them() -> None:
    class Products(nn.Module):
        def forward(self, x):
            y = torch.einsum("bij,bjk->bik", x, x.transpose(1, 2))
            z = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
            return torch.matmul(y, x), z

    found = of(Products(), 2, 3, 5).measures()
    assert found["flops"] == 2 * 2 * 3 * 3 * 5 * 2 + 2 * 2 * 3 * 3 * (5 + 5)

    class Unknown(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x) @ x

    found = of(Unknown(), 4, 4).measures()
    assert (found["flops"], found["flops_unknown"]) == (128, 1)


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (lambda: nn.LSTM(6, 5, batch_first=True), (2, 7, 6), 2 * 2 * 7 * 4 * 5 * (6 + 5)),
        (lambda: nn.GRU(6, 5, bidirectional=True), (7, 2, 6), 2 * 2 * 7 * 2 * 3 * 5 * (6 + 5)),
        (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (1, 4, 9, 9), 2 * 8 * 25 * 2 * 9),
        (lambda: nn.ConvTranspose2d(4, 8, 2), (1, 4, 3, 3), 2 * 4 * 9 * 8 * 4),
        (lambda: nn.Conv2d(4, 8, 3), (4, 9, 9), 2 * 8 * 49 * 4 * 9),
        (lambda: nn.Conv1d(4, 8, 3, padding="same"), (4, 9), 2 * 8 * 9 * 4 * 3),
    ],
)
def test_flops_of_layers(layer, shape, flops) -> None:
    assert of(layer(), *shape).measures()["flops"] == flops


def test_what_an_operator_on_lists_changes_is_read_and_written() -> None:
    class Scales(nn.Module):
        def forward(self, x):
            y = x + 1
            torch._foreach_mul_([y], 2.0)
            return y

    (node,) = [each for each in of(Scales(), 4).nodes if each.call.op == "aten::_foreach_mul_"]
    assert work.bytes_of(node) == 2 * 16


# --- by name ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "nodes"), [(18, 69), (34, 125), (50, 175), (101, 345), (152, 515)])
def test_resnets_have_the_published_number_of_layers(depth: int, nodes: int) -> None:
    pytest.importorskip("torchvision")
    found = xsp.graph.of(f"torchvision:resnet{depth}").measures()
    assert found["nodes"] == nodes
    assert found["unique"] == (28 if depth < 50 else 54)


@pytest.mark.slow
def test_a_named_model_is_shown_kept_and_read_again(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    spec = "transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=100"
    assert main(["graph", spec, "--sequence", "9", "--save", str(tmp_path / "g.json"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = "nodes views computing unique edges parameters flops bytes longest_path diameter".split()
    assert [key for key in found if key in documented] == documented
    assert found["input_elements"] == 9
    assert all(isinstance(found[key], int) for key in documented)
    assert main(["graph", str(tmp_path / "g.json")]) == 0
    page = capsys.readouterr().out
    assert "aten::scaled_dot_product_attention" in page
    assert max(map(len, page.splitlines())) <= 80


def test_a_name_that_there_is_not_is_refused_before_anything_is_built() -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(ModelError, match="did you mean resnet50"):
        xsp.graph.of("torchvision:resnet5O")


@pytest.mark.parametrize(("what", "says"), [("nothing.onnx", "no such file"), (7, "a graph of int")])
def test_what_is_no_source_is_refused(what, says) -> None:
    with pytest.raises((GraphError, UsageError), match=says):
        xsp.graph.of(what)


def test_what_is_wrong_with_a_users_file_is_said_once(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "def build(): pass\ndef typo(batch): return (batch).no_such()\ndef raises(batch): raise ValueError('of mine')\n"
    )
    for name, says in {
        "buidl": "mine.py has no function 'buidl'; did you mean build?",
        "build": "mine.py:build must take the batch size: def build(batch_size)",
        "typo": "'int' object has no attribute 'no_such' in mine.py, line 2",
        "raises": "ValueError: of mine in mine.py, line 3",
    }.items():
        with pytest.raises((GraphError, ModelError)) as caught:
            xsp.graph.of(f"{tmp_path / 'mine.py'}:{name}")
        assert str(caught.value).count(says) == 1
    (tmp_path / "script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(GraphError, match=r"SystemExit: 2 in script\.py, line 2"):
        xsp.graph.of(f"{tmp_path / 'script.py'}:build")


def test_options_that_would_do_nothing_are_refused(tmp_path) -> None:
    graph = of(nn.Linear(3, 2), 5, 3)
    assert graph.settings["batch"] is None  # nobody said which dimension it is
    graph.save(tmp_path / "kept.json")
    for what in (graph, tmp_path / "kept.json"):
        with pytest.raises(UsageError, match="a fixed step, which --batch, --input cannot change"):
            xsp.graph.of(what, batch=4, shape=(3,))
    for batch in (0, -2):
        with pytest.raises(UsageError, match=f"a batch of {batch} samples has no step"):
            of(nn.Linear(3, 2), 5, 3, batch=batch)


def test_a_function_of_a_users_file_that_does_a_step_is_captured(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def step(batch):\n"
        "    net, x = torch.nn.Linear(4, 2), torch.zeros(batch, 4)\n"
        "    best = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    def one():\n"
        "        best.zero_grad()\n"
        "        net(x).sum().backward()\n"
        "        best.step()\n"
        "    return one\n"
    )
    graph = xsp.graph.of(f"{path}:step", batch=3)
    assert {each.phase for each in graph.nodes} == set(Phase)
    assert graph.parameters == 10


def test_packed_weights_of_quantised_layers_are_weights_and_are_read() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised layers")

    def made() -> object:
        plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU()).eval()
        return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)

    first, second = (of(made(), 1, 32) for _ in range(2))
    (packed,) = {node.key for node in first.nodes if node.call.op == "quantized::linear_dynamic"}
    assert packed in {node.key for node in second.nodes}, "no address of an object is in a key"
    found = first.measures()
    assert (found["parameters"], found["weight_bytes"]) == (32 * 64 + 64, 32 * 64 + 4 * 64)
    read_bytes = 32 * 64 + 4 * 64 + 4 * 32  # weights, bias, input
    assert (found["bytes"], found["flops"]) == (read_bytes + 4 * 64 + 2 * 4 * 64, 2 * 32 * 64)


def test_packed_weights_of_a_quantised_recurrence_are_weights() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised layers")
    plain = nn.Sequential(nn.LSTM(6, 5)).eval()
    found = of(torch.ao.quantization.quantize_dynamic(plain, {nn.LSTM}, dtype=torch.qint8), 7, 2, 6).measures()
    assert found["parameters"] == 4 * 5 * (6 + 5) + 2 * 4 * 5
    assert found["flops"] == 2 * 7 * 2 * 4 * 5 * (6 + 5)
    assert found["bytes_unknown"] == 0


def test_sequences_of_different_lengths_in_one_tensor_are_a_hole(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build(batch):\n"
        "    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "    padding = torch.arange(5, device='cpu').expand(batch, 5) > 2\n"
        "    model = torch.nn.TransformerEncoder(layer, 2).eval()\n"
        "    return model, (torch.randn(batch, 5, 8),), {'src_key_padding_mask': padding}\n"
    )
    graph = xsp.graph.of(f"{tmp_path / 'mine.py'}:build", batch=2)
    nested = [node for node in graph.nodes if any(each.dtype == "float32:nested" for each in node.call.inputs)]
    assert nested
    assert graph.measures()["bytes_unknown"] > 0
    assert "≥" in terminal.page(section.section(graph, 2))
    graph.save(tmp_path / "kept.json")
    assert xsp.graph.of(tmp_path / "kept.json").measures() == graph.measures()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_product_with_a_sparse_tensor_has_no_figures_of_a_dense_one() -> None:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("near", torch.eye(16).to_sparse_csr())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.near @ x)

    found = of(Graphs(), 16, 4).measures()
    assert (found["flops"], found["flops_unknown"], found["bytes_unknown"]) == (0, 1, 1)


class Writes(nn.Module):
    """It adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        y = self.linear(x * 1).sum()
        if y.item() > 1e9:
            return x
        return more["all"][0].detach().add_(1) + y


@pytest.mark.parametrize("train", [False, True])
def test_arguments_stay_as_they_are_in_whatever_mode_the_caller_is(train: bool) -> None:
    module, x, other = Writes().train(), torch.ones(2, 4, requires_grad=True), torch.zeros(3)
    module(x, {"all": [other.clone()]}).sum().backward()
    gradient = x.grad.clone()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            graph = xsp.graph.of(module, x, {"all": [other]}, train=train)
        assert graph.settings["rung"] == "on the CPU"
        assert any(node.phase is Phase.BACKWARD for node in graph.nodes) is train
        assert torch.equal(x.grad, gradient)
        assert torch.equal(other, torch.zeros(3))


def test_an_input_with_a_gradient_is_trained_without_values() -> None:
    graph = xsp.graph.of(nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True), train=True)
    assert (graph.settings["rung"], graph.problems) == ("moved to meta", ())
