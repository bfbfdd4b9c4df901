"""Operations of calls that multiply several tensors, against the operators that they call, as torch counts them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xsp
from xsp import terminal
from xsp.cost import contraction
from xsp.cost.flops import flops
from xsp.graph import work
from xsp.graph.node import Graph

torch = pytest.importorskip("torch")
from graphruns import graph_of  # noqa: E402

nn = torch.nn
dispatch = pytest.importorskip("torch.utils._python_dispatch")


class Products(dispatch.TorchDispatchMode):
    """Counts the products that the dispatcher sees by a plain formula; 8 operations for a complex multiply-add."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in (
            "aten::mm",
            "aten::bmm",
            "aten::mv",
            "aten::dot",
            "aten::vdot",
            "aten::addmm",
            "aten::addmv",
            "aten::baddbmm",
        ):
            left, right = args[-2:]
            size = math.prod(left.shape) * (1 if right.dim() == 1 else right.shape[-1])
            self.total += size * (8 if left.is_complex() else 2)
        elif name == "aten::convolution":
            out = func(*args, **(kwargs or {}))
            self.total += 2 * out.numel() * math.prod(args[1].shape[1:])
            return out
        return func(*args, **(kwargs or {}))


def products(function: Callable[..., object], *tensors: Any) -> int:
    """Return the operations of the products that a function calls: with gradients composite operators decompose."""
    with Products() as counter:
        function(*[tensor.detach().requires_grad_() for tensor in tensors])
    return counter.total


def counted(function: Callable[..., object], *tensors: Any) -> int | None:
    """Return the operations of a step of inference, in which composite operators stay whole."""
    found = graph_of(function, *tensors).measures()
    assert found["flops_unknown"] == 0
    return found["flops"]


def made(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype or torch.float32)


# --- einsum -------------------------------------------------------------------------------------------


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], list[int] | None]:
    """Draw an equation with the shapes of its operands, and perhaps a path."""
    lengths = {letter: draw(st.integers(1, 5)) for letter in "abcdefAB"}
    dots = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    terms, shapes = [], []
    for _ in range(draw(st.integers(2, 5))):
        letters = draw(st.lists(st.sampled_from("abcdefAB"), min_size=0 if dots else 1, max_size=4))
        shape = [1 if draw(st.integers(0, 9)) == 0 and letters.count(one) == 1 else lengths[one] for one in letters]
        term = "".join(letters)
        if dots and draw(st.booleans()):
            place, hidden = draw(st.integers(0, len(letters))), dots[draw(st.integers(0, len(dots))) :]
            hidden = [1 if draw(st.integers(0, 4)) == 0 else size for size in hidden]
            term, shape = f"{term[:place]}...{term[place:]}", [*shape[:place], *hidden, *shape[place:]]
        if not shape and "..." not in term:
            continue
        terms.append(term)
        shapes.append(tuple(shape))
    if len(terms) < 2:
        terms, shapes = ["ab", "bc"], [(lengths["a"], lengths["b"]), (lengths["b"], lengths["c"])]
    equation = ",".join(terms)
    if draw(st.booleans()):
        used = sorted(set(equation) - set(",."))
        target = "".join(draw(st.lists(st.sampled_from(used), unique=True, max_size=4))) if used else ""
        equation += "->" + ("..." if "..." in equation and draw(st.integers(0, 3)) else "") + target
    path = None
    if draw(st.booleans()):
        path = []
        for remaining in range(len(terms), 1, -1):
            path += draw(st.permutations(range(remaining)))[:2]
    return equation, shapes, path


@settings(max_examples=250, deadline=None)
@given(einsums())
def test_an_einsum_counts_the_products_into_which_torch_divides_it(drawn: Any) -> None:
    equation, shapes, path = drawn
    tensors = [made(*shape) for shape in shapes]

    def run(*given: Any) -> object:
        return torch.ops.aten.einsum(equation, given, path=path)

    try:
        expected = products(run, *tensors)
    except RuntimeError:  # not an equation for these shapes
        return
    assert contraction.einsum(equation, shapes, path) == expected


def test_an_einsum_of_three_factors_is_two_products_and_not_one_loop_over_all_letters() -> None:
    def low_rank(x: Any, down: Any, up: Any) -> Any:
        return torch.einsum("btd,dr,re->bte", x, down, up)

    tensors = made(4, 64, 256), made(256, 8), made(8, 256)
    expected = 2 * 4 * 64 * 256 * 8 * 2
    assert counted(low_rank, *tensors) == products(low_rank, *tensors) == expected


def test_an_einsum_is_counted_by_the_path_that_the_call_states() -> None:
    shapes = [(2, 30), (30, 40), (40, 3)]
    one_after_another = contraction.einsum("ab,bc,cd->ad", shapes)
    assert one_after_another == 2 * 2 * 30 * 40 + 2 * 2 * 40 * 3
    assert contraction.einsum("ab,bc,cd->ad", shapes, [1, 2, 0, 1]) == 2 * 30 * 40 * 3 + 2 * 2 * 30 * 3

    def with_path(*given: Any) -> Any:
        return torch.ops.aten.einsum("ab,bc,cd->ad", given, path=[1, 2, 0, 1])

    assert counted(with_path, *(made(*shape) for shape in shapes)) == 2 * 30 * 40 * 3 + 2 * 2 * 30 * 3


# --- other products of several tensors ----------------------------------------------------------------

COMPOSITES: dict[str, tuple[Callable[..., object], list[tuple[int, ...]]]] = {
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1, 2], [1, 0])), [(2, 3, 4), (4, 3, 5)]),
    "tensordot of one dimension": (lambda a, b: torch.tensordot(a, b, dims=1), [(2, 3, 4), (4, 3, 5)]),
    "tensordot of none": (lambda a, b: torch.tensordot(a, b, dims=0), [(2, 3), (4, 5)]),
    "multi_dot": (lambda *each: torch.linalg.multi_dot(each), [(2, 30), (30, 4), (4, 50), (50, 6)]),
    "multi_dot of three": (lambda *each: torch.linalg.multi_dot(each), [(9, 2), (2, 30), (30, 4)]),
    "multi_dot of vectors": (lambda *each: torch.linalg.multi_dot(each), [(30,), (30, 4), (4, 5), (5,)]),
    "inner": (torch.inner, [(3, 4), (5, 4)]),
    "outer": (torch.outer, [(3,), (5,)]),
    "kron": (torch.kron, [(3, 4), (2, 5)]),
    "vecdot": (torch.linalg.vecdot, [(3, 5), (3, 5)]),
    "vecdot of vectors": (torch.linalg.vecdot, [(5,), (5,)]),
    "matmul, broadcast": (torch.matmul, [(2, 1, 3, 4), (5, 4, 6)]),
    "matmul of vectors": (torch.matmul, [(4,), (4,)]),
    **{
        f"matrix_power {n}": (lambda a, n=n: torch.linalg.matrix_power(a, n), [(2, 4, 4)])  # type: ignore[misc]
        for n in (0, 1, 2, 3, 5, 8, 13)
    },
}


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_composite_call_counts_what_the_operators_in_it_count(name: str, dtype: str) -> None:
    function, shapes = COMPOSITES[name]
    tensors = [made(*shape, dtype=getattr(torch, dtype)) for shape in shapes]
    assert counted(function, *tensors) == products(function, *tensors)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_complex_convolution_counts_the_three_real_ones_that_it_is(transposed: bool) -> None:
    convolution = nn.functional.conv_transpose2d if transposed else nn.functional.conv2d
    image = made(1, 3, 8, 8, dtype=torch.complex64)
    weight = made(*((3, 4) if transposed else (4, 3)), 3, 3, dtype=torch.complex64)
    real = counted(convolution, image.real.clone(), weight.real.clone())
    assert real
    assert counted(convolution, image, weight) == 3 * real
    if not transposed:
        assert products(convolution, image, weight) == 3 * real


def test_a_complex_product_in_a_trace_counts_four_real_ones() -> None:
    shapes, scalars = [[2, 3], [3, 4]], [""] * 2
    real = flops("aten::mm", shapes, scalars, ["float", "float"])
    assert real == 48
    for dtype in ("c10::complex<float>", "c10::complex<double>", "c10::complex<c10::Half>"):
        assert flops("aten::mm", shapes, scalars, [dtype, dtype]) == 4 * real


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention_counts_its_two_products_whatever_dimensions_are_broadcast(data: st.DataObject) -> None:
    batch = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))

    def drawn(length: int, width: int) -> Any:
        return made(*[size if data.draw(st.booleans()) else 1 for size in batch], length, width)

    query, key, value = drawn(5, 6), drawn(7, 6), drawn(7, 8)

    def by_hand(query: Any, key: Any, value: Any) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-2, -1)), -1), value)

    assert counted(nn.functional.scaled_dot_product_attention, query, key, value) == products(
        by_hand, query, key, value
    )


def test_shared_heads_are_as_many_products_as_the_query_has_heads() -> None:
    def shared(query: Any, key: Any, value: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    tensors = made(2, 8, 5, 6), made(2, 2, 7, 6), made(2, 2, 7, 6)
    assert counted(shared, *tensors) == 2 * 2 * 8 * 5 * 7 * (6 + 6)


def test_distances_are_a_product_if_there_are_many_rows() -> None:
    for rows, exponent in itertools.product((20, 30), (1.0, 2.0)):
        left, right = made(2, rows, 5), made(2, 10, 5)
        is_product = rows > 25 and exponent == 2
        found = counted(lambda a, b, p=exponent: torch.cdist(a, b, p), left, right)
        assert found == (2 * 2 * rows * 10 * (5 + 2) if is_product else 0)


def test_covariance_and_bilinear_layers_in_inference_and_training() -> None:
    assert counted(torch.cov, torch.zeros(4, 7)) == products(torch.cov, torch.zeros(4, 7)) == 2 * 4 * 4 * 7
    assert counted(torch.corrcoef, torch.zeros(4, 7)) == products(torch.corrcoef, torch.zeros(4, 7))
    layer, tensors = nn.Bilinear(5, 6, 7), (torch.zeros(3, 5), torch.zeros(3, 6))
    forward = xsp.graph.of(layer, *tensors).measures()["flops"]
    trained = xsp.graph.of(layer, *tensors, train=True)
    named = [node for node in trained.nodes if node.phase.value == "forward" and node.call.op == "aten::_trilinear"]
    assert [work.flops_of(node) for node in named] == [forward]
    assert trained.measures()["flops_unknown"] == 0


def test_transforms_and_products_of_elements_count_none() -> None:
    assert counted(torch.fft.rfft2, made(4, 8, 8)) == 0
    assert counted(torch.fft.fftshift, made(4, 8)) == 0
    assert counted(torch.kron, made(4, 7), made(2, 3)) == 0


def test_a_deformable_convolution_counts_as_one_of_its_size() -> None:
    ops = pytest.importorskip("torchvision").ops
    layer = ops.DeformConv2d(4, 8, 3, stride=2)
    found = xsp.graph.of(layer, torch.zeros(2, 4, 9, 9), torch.zeros(2, 18, 4, 4)).measures()
    assert (found["flops"], found["flops_unknown"]) == (2 * 2 * 8 * 16 * 4 * 9, 0)
    assert flops("torchvision::deform_conv2d", [[2, 4, 9, 9], [8, 4, 3, 3], [2, 18, 4, 4]], []) == found["flops"]


def test_quantised_layers_count_as_the_layers_that_they_are() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised layers")
    plain = nn.Sequential(nn.Linear(32, 64), nn.ReLU()).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    found = xsp.graph.of(dynamic, torch.zeros(3, 32)).measures()
    assert (found["flops"], found["flops_unknown"]) == (2 * 3 * 32 * 64, 0)

    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.ao.nn.quantized.Conv2d(4, 8, 3)

        def forward(self, x: Any) -> Any:
            return self.conv(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)).dequantize()

    found = xsp.graph.of(Static(), torch.zeros(1, 4, 9, 9)).measures()
    assert (found["flops"], found["flops_unknown"]) == (2 * 8 * 49 * 4 * 9, 0)


# --- what stays unknown -------------------------------------------------------------------------------


def test_what_is_unknown_is_counted_beside_the_known_part(capsys: pytest.CaptureFixture[str]) -> None:
    from xsp.graph import section

    graph = graph_of(lambda x: torch.linalg.inv(x) @ x, made(64, 64))
    found = graph.measures()
    assert (found["flops"], found["flops_unknown"]) == (2 * 64**3, 1)
    page = terminal.page(section.section(graph, 2))
    assert "≥ 524 K" in page
    assert "at least; 1 call unknown: aten::linalg_inv" in page
    assert "≥ 524 K FLOPs" in str(section.section(graph))
    all_unknown = graph_of(torch.linalg.inv, made(64, 64)).measures()
    assert (all_unknown["flops"], all_unknown["flops_unknown"]) == (None, 1)


UNKNOWN = frozenset(
    "linalg_cholesky linalg_eig linalg_inv linalg_matrix_exp linalg_pinv linalg_qr linalg_slogdet linalg_solve "
    "linalg_svd linalg_lstsq linalg_lu".split()
)
"""Factorisations and solutions of systems: no products by the convention, and far from none."""


def corpus() -> dict[str, Callable[[], object]]:
    """Return calls of a broad selection of torch's functions."""
    from torch.nn import functional as F

    square, image, row = torch.rand(6, 6) + 6 * torch.eye(6), torch.rand(2, 4, 8, 8), torch.rand(2, 8)
    functions: dict[str, Callable[[], object]] = {}
    for name in (
        "abs acos argmax asinh atan ceil clone corrcoef cos cov det diag digamma erf exp floor frac inverse isnan "
        "log logdet matrix_exp max mean median min mode neg nonzero norm pdist pinverse prod relu round rsqrt sigmoid "
        "sign sin sort sqrt std sum svd t tan tanh trace tril triu unique var"
    ).split():
        functions[name] = partial(getattr(torch, name), square)
    for name in UNKNOWN:
        count = 2 if "solve" in name or "lstsq" in name else 1
        functions[name] = partial(getattr(torch.linalg, name.removeprefix("linalg_")), *[square] * count)
    for name in "fft ifft rfft irfft fft2 ifft2 rfft2 fftn rfftn hfft ihfft fftshift ifftshift".split():
        functions[f"fft.{name}"] = partial(getattr(torch.fft, name), square)
    functions |= {
        "addmm": lambda: torch.addmm(square, square, square),
        "addbmm": lambda: torch.addbmm(square, square[None], square[None]),
        "addmv": lambda: torch.addmv(square[0], square, square[0]),
        "addr": lambda: torch.addr(square, square[0], square[0]),
        "baddbmm": lambda: torch.baddbmm(square[None], square[None], square[None]),
        "bilinear": lambda: F.bilinear(row, row, torch.rand(3, 8, 8)),
        "cdist": lambda: torch.cdist(square, square),
        "chain": lambda: torch.linalg.multi_dot([square, square, square]),
        "conv_tbc": lambda: torch.conv_tbc(torch.rand(7, 2, 4), torch.rand(3, 4, 5), torch.rand(5), 1),
        "conv1d": lambda: F.conv1d(row[None], torch.rand(3, 2, 3)),
        "cosine_similarity": lambda: F.cosine_similarity(row, row),
        "cross": lambda: torch.cross(torch.rand(2, 3), torch.rand(2, 3), dim=1),
        "embedding": lambda: F.embedding(torch.tensor([1, 2]), square),
        "fold": lambda: F.fold(torch.rand(1, 12, 9), (4, 4), (2, 2)),
        "grid_sample": lambda: F.grid_sample(image, torch.rand(2, 8, 8, 2), align_corners=False),
        "gru_cell": lambda: nn.GRUCell(8, 4)(row),
        "group_norm": lambda: F.group_norm(image, 2),
        "interpolate": lambda: F.interpolate(image, scale_factor=2, mode="bilinear"),
        "kron": lambda: torch.kron(square, square),
        "layer_norm": lambda: F.layer_norm(row, (8,)),
        "linear": lambda: F.linear(row, torch.rand(5, 8)),
        "lstm": lambda: nn.LSTM(8, 4)(row[None]),
        "lstm_cell": lambda: nn.LSTMCell(8, 4)(row),
        "matrix_norm": lambda: torch.linalg.matrix_norm(square),
        "matrix_power": lambda: torch.linalg.matrix_power(square, 5),
        "multi_head": lambda: nn.MultiheadAttention(8, 2)(row[None], row[None], row[None]),
        "pixel_shuffle": lambda: F.pixel_shuffle(image, 2),
        "stft": lambda: torch.stft(row.repeat(1, 9), 16, window=torch.ones(16), return_complex=True),
        "tensordot": lambda: torch.tensordot(square, square),
        "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16).eval()(row[None]),
        "unfold": lambda: F.unfold(image, 2),
        "vander": lambda: torch.linalg.vander(row),
        "vdot": lambda: torch.vdot(row[0], row[0]),
    }
    return functions


@pytest.mark.filterwarnings("ignore")
def test_of_a_broad_selection_of_functions_only_factorisations_are_unknown() -> None:
    from xsp.graph.recorder import Recorder

    unknown: dict[str, set[str]] = {}
    totals: dict[str, list[int | None]] = {}
    for training in (False, True):
        for name, function in corpus().items():
            torch.manual_seed(0)
            recorder = Recorder()
            with torch.inference_mode(not training), recorder.recording():
                function()
            figures = [work.flops_of(node) for node in recorder.nodes]
            unknown.setdefault(name, set()).update(
                node.call.op for node, figure in zip(recorder.nodes, figures, strict=True) if figure is None
            )
            totals.setdefault(name, []).append(work.total(figures).known)
    found = {name for name, ops in unknown.items() if ops}
    expected = UNKNOWN | {"det", "inverse", "logdet", "matrix_exp", "pinverse", "svd"}
    assert found == expected, {name: unknown[name] for name in found ^ expected}
    differing = {name: total for name, total in totals.items() if name not in found and len(set(total)) > 1}
    assert not differing, "inference and the forward pass of training"


def masked_flops(graph: Graph) -> int:
    """Return the operations of both products on the pairs that causal masks exclude, which torch's counter counts."""
    excluded = 0
    for node in graph.nodes:
        arguments = dict(node.call.arguments)
        if node.call.op == "aten::scaled_dot_product_attention" and arguments["is_causal"]:
            batch, heads, length, size = arguments["query"].shape
            excluded += batch * heads * 4 * size * (length * length - length * (length + 1) // 2)
    return excluded


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "torchvision:resnet18", "torchvision:shufflenet_v2_x0_5", "torchvision:vit_b_16", "torchvision:swin_t",
        "timm:convnext_atto", "timm:edgenext_xx_small", "transformers:bert", "transformers:gpt2",
    ],
)  # fmt: skip
def test_models_of_libraries_count_what_torchs_own_counter_counts(spec: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from xsp import models

    pytest.importorskip(spec.partition(":")[0])
    built = models.build(spec, models.Settings(), device="meta")
    assert isinstance(built, models.ModelCall)
    built = models.on_device(spec, built, models.Settings(device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built()
    graph = xsp.graph.of(spec)
    found = graph.measures()
    assert (found["flops"], found["flops_unknown"]) == (counter.get_total_flops() - masked_flops(graph), 0)


class Force(nn.Module):
    """A model whose forward pass differentiates, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 8))

    def forward(self, positions: Any) -> Any:
        positions = positions.detach().requires_grad_()
        return torch.autograd.grad((positions @ self.weight).tanh().sum(), positions, create_graph=True)[0]


def test_a_model_that_differentiates_in_its_forward_pass_is_counted_in_training() -> None:
    model, positions = Force(), torch.ones(4, 16)
    with Products() as counter:
        model(positions).square().mean().backward()
    found = xsp.graph.of(model, positions, train=True).measures()
    assert (found["flops"], found["flops_unknown"]) == (counter.total, 0)
    assert counter.total == 6 * 2 * 4 * 16 * 8
