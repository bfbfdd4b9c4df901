"""Our own collectors, held to the contract and to what each of them promises."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.nn.modules.module import register_module_forward_hook  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from xsp import plugins, processes  # noqa: E402
from xsp.collector import Collector, Outline, Probe, Signal  # noqa: E402
from xsp.doctor import collectors  # noqa: E402
from xsp.record import calibration  # noqa: E402
from xsp.record.calibration import cost_per_span  # noqa: E402
from xsp.schema import Level  # noqa: E402
from xsp.testing import check_collector  # noqa: E402
from xsp_collectors import modules, torchops  # noqa: E402
from xsp_collectors.dataloading import DataLoading  # noqa: E402
from xsp_collectors.modules import ModuleCalls  # noqa: E402
from xsp_collectors.onednn import OneDnnPrimitives  # noqa: E402
from xsp_collectors.tensors import describe, first_shape, sketch, sketch_of, tensor_bytes  # noqa: E402
from xsp_collectors.torchops import TorchOps  # noqa: E402
from xsp_collectors.training import TrainingCalls  # noqa: E402

nn = torch.nn
NET = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
IMAGE = torch.randn(2, 3, 16, 16)


def train() -> None:
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.0)
    NET(IMAGE).sum().backward()
    optimizer.step()


def test_all_of_them_are_entry_points_and_those_that_need_no_gpu_work_here():
    everywhere = {"batching", "dataloading", "modules", "onednn", "torchops", "training"}
    assert everywhere < set(plugins.names("xsp.collectors"))
    assert {each.name: each.reason for each in collectors() if each.reason and each.name in everywhere} == {}


def test_modules():
    seen = check_collector(ModuleCalls(), lambda: NET(IMAGE))
    assert [(span.kind, span.name, span.type) for span in seen] == [
        ("module", "0", "Conv2d"),
        ("module", "1", "ReLU"),
        ("forward", "Sequential", None),
        ("module", "Sequential", "Sequential"),
    ]


def test_modules_at_the_model_level_are_the_outermost_calls():
    seen = check_collector(ModuleCalls(), lambda: NET(IMAGE), rung=Level.MODEL)
    assert [(span.kind, span.input_shapes, span.dtype, span.batch_size) for span in seen] == [
        ("forward", "[[2, 3, 16, 16]]", "float32", 2)
    ]


def test_a_call_that_another_thread_began_earlier_is_left_out_as_its_inner_calls_were_not_recorded():
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x):
            has_begun.set()
            may_end.wait()
            return x

    collector = ModuleCalls()
    collector.notify = lambda signal, subject: None  # a session listens
    collector.open()
    try:
        thread = threading.Thread(target=torch.nn.Sequential(Slow(), torch.nn.ReLU()), args=(torch.ones(2),))
        thread.start()
        has_begun.wait()
        collector.start(Level.LAYER, describe=False)
        may_end.set()
        thread.join()
        NET(IMAGE)
        collector.stop()
        seen = list(collector.spans())
    finally:
        collector.close()
    assert [span.name for span in seen if span.kind == "forward"] == ["Sequential"]
    assert {span.thread for span in seen if span.kind == "forward"} == {threading.get_native_id()}


def test_modules_describe_shapes_and_bytes():
    collector = ModuleCalls()
    collector.open()
    collector.start(Level.LAYER, describe=True)
    NET(IMAGE)
    collector.stop()
    (convolution,) = [span for span in collector.spans() if span.type == "Conv2d"]
    collector.close()
    assert convolution.input_shapes == "[[2, 3, 16, 16]]"
    assert convolution.activation_bytes == 2 * 8 * 14 * 14 * 4
    assert convolution.param_bytes == (8 * 3 * 9 + 8) * 4


def test_inner_calls_whose_times_are_not_needed_run_torchs_own_method(monkeypatch):
    """They cost what they cost without xsp; the outermost call is seen again afterwards, also if it raised."""
    monkeypatch.setattr(modules, "_threads_running", lambda: lambda: 1)  # a runner of tests may have threads of its own
    collector, seen = ModuleCalls(), []
    collector.outline, collector.notify = Outline(), lambda signal, _: seen.append(signal)
    collector.open()
    wrapper = nn.Module.__call__
    full, inside = wrapper.__code__, []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append(wrapper.__code__)
            if x.ndim == 1:
                raise ValueError
            return x

    outer = nn.Sequential(Inner(), Inner())
    try:
        outer(torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"^$"):
            outer(torch.ones(2))
        outer(torch.ones(2, 2))
    finally:
        collector.close()
    assert {code.co_name for code in inside} == {"_plain_call"}
    assert wrapper.__code__ is full
    assert seen == [Signal.CALL_BEGIN, Signal.CALL_END] * 3


def test_a_thread_of_xsp_is_none_of_the_programs():
    count, stop = modules._threads_running(), threading.Event()
    before = count()
    own = processes.start_thread(stop.wait, "xsp tests")
    assert count() == before
    other = threading.Thread(target=stop.wait)
    other.start()
    assert count() == before + 1
    stop.set()
    own.join()
    other.join()
    assert count() == before


def test_modules_keep_other_wrappers_in_place():
    collector = ModuleCalls()
    original = nn.Module.__call__
    collector.open()
    ours = nn.Module.__call__
    nn.Module.__call__ = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
    collector.close()
    assert NET(IMAGE).shape == (2, 8, 14, 14)
    assert "was wrapped inside the block" in next(iter(collector.notes()))
    nn.Module.__call__ = original


def test_modules_see_replicas_and_copies_run_their_own_forward():
    """A wrapper on the instance would have been copied along and have run the original's weights."""
    import copy

    collector = ModuleCalls()
    collector.open()
    collector.start(Level.LAYER, describe=False)
    twin = copy.deepcopy(NET)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
        zero = bool((twin(IMAGE) == 0).all())
    collector.stop()
    names = [span.name for span in collector.spans()]
    collector.close()
    assert zero
    assert names == ["0", "1", "Sequential", "Sequential"]


def test_training():
    train()  # a first optimizer step makes torch set up a cache of its own
    seen = check_collector(TrainingCalls(), train)
    assert [(span.kind, span.name, span.phase) for span in seen] == [
        ("backward", "backward", "backward"),
        ("optimizer", "SGD", "optimizer"),
    ]


@pytest.mark.parametrize("finite", [True, False])
def test_an_optimizer_step_that_a_scaler_skips_is_one(finite):
    scaler, original = torch.amp.GradScaler("cpu"), torch.amp.GradScaler.step
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step():
        optimizer.zero_grad()
        scaler.scale((weight if finite else weight * float("inf")).sum()).backward()
        assert scaler.step(optimizer) is None
        scaler.update()

    seen = check_collector(TrainingCalls(), step)
    assert [span.kind for span in seen] == ["backward", "optimizer"]
    assert (weight.detach() == 1).all().item() is not finite
    assert torch.amp.GradScaler.step is original


def test_data_loading():
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
    seen = check_collector(DataLoading(), lambda: list(loader), between_steps=True)
    assert [span.kind for span in seen] == ["data"] * 6  # three batches between steps, three in one


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_are_waited_for_while_they_start_and_end(persistent):
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1, persistent_workers=persistent)
    waited_ns, collector = [], DataLoading()
    collector.notify = lambda signal, subject: waited_ns.append(subject)
    original = torch.utils.data.DataLoader.__iter__
    collector.open()
    try:
        assert len(list(loader)) == 2
    finally:
        collector.close()
    seen = list(collector.spans())
    assert len(seen) == 4  # workers start, two batches, no batch is left
    assert sum(span.dur_ns for span in seen) == sum(waited_ns)
    assert {json.loads(span.attributes) == {"workers": 1, "persistent": persistent} for span in seen} == {True}
    assert torch.utils.data.DataLoader.__iter__ is original


def test_a_loader_inside_a_loader_is_part_of_its_wait():
    inner = torch.utils.data.DataLoader(list(range(4)), batch_size=2)

    class Outer(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from inner

    collector = DataLoading()
    collector.open()
    try:
        assert len(list(torch.utils.data.DataLoader(Outer(), batch_size=None))) == 2
    finally:
        collector.close()
    assert len(list(collector.spans())) == 2


def test_operators():
    train()  # a first optimizer step makes torch set up a cache of its own
    seen = check_collector(TorchOps(), train, rung=Level.OP)
    by_name = {span.name: span for span in seen}
    assert by_name["aten::relu"].sequence_nr == by_name["ReluBackward0"].sequence_nr
    assert by_name["ReluBackward0"].forward_thread == by_name["aten::relu"].thread
    assert by_name["ReluBackward0"].phase == "backward"
    assert by_name["aten::relu"].input_shapes is None


def test_operators_step_back_where_the_program_profiles_itself():
    collector = TorchOps()
    collector.open()
    with torch.autograd.profiler.profile(use_kineto=True) as own:
        collector.start(Level.OP, describe=False)
        NET(IMAGE)
        collector.stop()
    assert list(collector.spans()) == []
    assert "torch.profiler" in next(iter(collector.notes()))
    assert any(event.name == "aten::relu" for event in own.function_events)
    collector.close()


def test_primitives_come_with_the_programs_own_output_passed_on(capfd):
    collector = OneDnnPrimitives()
    collector.open()
    collector.start(Level.LIBRARY, describe=False)
    ctypes.CDLL(None).puts(b"from C")
    print("from Python", flush=True)
    with torch.no_grad():
        nn.Conv2d(16, 32, 3)(torch.randn(4, 16, 32, 32))
    collector.stop()
    seen = list(collector.spans())
    notes = list(collector.notes())
    collector.close()
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == ["from C", "from Python"]
    assert seen or any("no timestamp" in note for note in notes)


PRIMITIVES = """
    import json, torch
    from xsp_collectors.onednn import OneDnnPrimitives
    from xsp.schema import Level
    from xsp.testing import check_collector
    layer, x = torch.nn.Conv2d(16, 32, 3), torch.randn(4, 16, 32, 32)
    with torch.no_grad():
        seen = check_collector(OneDnnPrimitives(), lambda: layer(x))
    print([(s.type, json.loads(s.attributes)["library"], s.dur_ns > 0) for s in seen if s.type != "reorder"])
"""


@pytest.mark.slow
def test_primitives_have_their_own_times_in_a_process_that_had_not_used_them():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PRIMITIVES)], stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "[('convolution', 'oneDNN', True)]"


@pytest.mark.parametrize("line", ["onednn_verbose,v1,primitive,exec,cpu", "onednn_verbose,v1,x,primitive,exec,cpu,y"])
def test_lines_in_an_unknown_form_are_counted(line):
    collector = OneDnnPrimitives()
    collector._lines = [line.encode() + b"\n", b"onednn_verbose,v1,info,cpu,runtime:OpenMP\n"]
    assert list(collector.spans()) == []
    assert len(list(collector.notes())) == 1


class Dear(Collector):
    """Takes 40 us a span where it is on and 10 us where it is hushed, by a clock that nothing else moves.

    An outermost span takes 2 us more where it is hushed, and where something else ran before it another 5 us.
    """

    name, levels = "dear", (Level.LAYER,)

    def __init__(self) -> None:
        self.now = self.pause = 0

    def clock(self) -> int:
        """Return the time in nanoseconds."""
        return self.now

    def open(self) -> None:
        self.pause = 0

    close = stop = open

    def start(self, rung: Level, describe: bool) -> None:
        self.pause = 40_000

    def probe(self) -> Probe:
        return Probe(self._pass, 1)

    def _pass(self) -> None:
        self.now += 1_000 + self.pause


def test_the_cost_of_a_span_is_measured_with_the_collector_on_and_off(monkeypatch):
    dear = Dear()
    monkeypatch.setattr(calibration, "monotonic_ns", dear.clock)
    assert cost_per_span(dear) == {
        "ns_per_span": 40_000,
        "level": int(Level.LAYER),
        "rounds": calibration.ROUNDS,
    }


def test_a_calibration_ends_early_where_little_time_is_left(monkeypatch):
    dear = Dear()
    monkeypatch.setattr(calibration, "monotonic_ns", dear.clock)
    few, many = cost_per_span(dear, limit_ns=0.0), cost_per_span(dear)
    assert (few["rounds"], many["rounds"]) == (calibration.LEAST_ROUNDS, calibration.ROUNDS)
    assert few.keys() == many.keys()
    assert few["ns_per_span"] == many["ns_per_span"] == 40_000
    assert list(calibration.rounds(math.inf)) == list(range(calibration.ROUNDS))


def test_a_calibration_is_of_calls_of_its_own():
    """A difference that is lost in the noise of the machine is zero: what was measured is told by its name."""
    calls, training = ModuleCalls(), TrainingCalls()
    assert cost_per_span(training) is None, "the program ran no backward pass"
    training.open()
    torch.ones(1, requires_grad=True).sum().backward()
    training.close()
    for collector, level in ((calls, Level.LAYER), (training, Level.MODEL)):
        cost = cost_per_span(collector)
        assert cost.keys() == {"ns_per_span", "level", "rounds"}
        assert (cost["level"], min(cost.values()) >= 0) == (level, True)
    assert calls.outline is training.outline is None


def test_a_calibration_calls_no_hook_of_the_program():
    heard = []
    training = TrainingCalls()
    training.open()
    torch.ones(1, requires_grad=True).sum().backward()
    training.close()
    hooks = [
        register_module_forward_hook(lambda *_: heard.append("module")),
        register_optimizer_step_post_hook(lambda *_: heard.append("optimizer")),
    ]
    try:
        assert (cost_per_span(ModuleCalls()), cost_per_span(training)) == (None, None)
    finally:
        for hook in hooks:
            hook.remove()
    assert heard == []


def test_tensors_are_found_in_nested_arguments_and_none_is_kept():
    inputs = describe(sketch((torch.zeros(2, 3), [torch.zeros(4)]), {"mask": {"a": torch.zeros(1, dtype=torch.bool)}}))
    assert inputs == ("[[2, 3], [4], [1]]", "float32", 2)
    assert describe(sketch((), {})) == (None, None, None)
    assert describe(sketch((torch.zeros(5, 1),), {})) == ("[[5, 1]]", "float32", 5)
    assert tensor_bytes(sketch_of((torch.zeros(2), {"x": torch.zeros(3)}))) == 20
    assert tensor_bytes(sketch_of("text")) is None


def test_tensors_without_a_shape_are_left_out():
    parts = [torch.zeros(2, 3), torch.zeros(4, 3)]
    for given in (torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, layout=torch.jagged)):
        assert (sketch((given,), {}), sketch((given, 1), {}), sketch_of([given])) == ([], [], [])
        assert (first_shape((given,), {}), first_shape((1, given), {})) == (None, None)

    class Mute(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise KeyError("mine")

    mute = torch.zeros(2).as_subclass(Mute)
    assert (sketch((mute,), {}), first_shape((mute,), {})) == ([], None)
    assert first_shape((torch.zeros(()), torch.zeros(5, 1)), {}) == (5, 1)


def test_the_size_of_a_list_of_samples_is_that_of_their_padded_batch() -> None:
    """A packed sequence was of another kind for each length of its first row, which stood for the number of samples."""
    rows = [torch.zeros(length, 2) for length in (5, 40, 17)]
    assert first_shape((rows,), {}) == first_shape((tuple(rows), 1), {}) == (3, 40, 2)
    assert first_shape((rows[:2],), {}) == (5, 2), "a pair may be of two things"
    assert first_shape(([rows[0]] * 3,), {}) == (5, 2), "three inputs of one batch"
    assert first_shape(([*rows, torch.zeros(3)],), {}) == (5, 2)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("layout", "places"), [("sparse_coo", 2 * 4 * 8), ("sparse_csr", 5 * 8 + 4 * 8)])
def test_a_layer_with_a_sparse_parameter_has_the_bytes_that_it_holds(layout, places):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4).to_sparse(layout=getattr(torch, layout)))

        def forward(self, x):
            return torch.sparse.mm(self.weight, x)

    model = Sparse()
    (layer,) = [
        span for span in check_collector(ModuleCalls(), lambda: model(torch.ones(4, 2))) if span.kind == "module"
    ]
    assert layer.param_bytes == 4 * 4 + places


def test_what_the_program_puts_around_the_autograd_engine_meanwhile_stays():
    original = torch.autograd._engine_run_backward
    training = TrainingCalls()
    training.open()
    ours = torch.autograd._engine_run_backward
    theirs = torch.autograd._engine_run_backward = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        training.close()
        assert torch.autograd._engine_run_backward is theirs
    finally:
        torch.autograd._engine_run_backward = original


@pytest.mark.parametrize(("value", "is_used"), [("1", True), ("profile_exec", True), ("0", False), ("none", False)])
def test_verbose_output_that_the_program_asked_for_is_left_to_it(monkeypatch, value, is_used):
    monkeypatch.setenv("ONEDNN_VERBOSE", value)
    reason = OneDnnPrimitives().available()
    assert ("ONEDNN_VERBOSE is set: unset it" in (reason or "")) == is_used


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("cudaLaunchKernel", "cuda_runtime"),
        ("cuLaunchKernel", "cuda_runtime"),
        ("aten::cudnn_convolution", "cpu_op"),
        ("cudnn::fused", "cpu_op"),
        ("cumsum", "cpu_op"),
    ],
)
def test_calls_of_the_driver_are_no_operators_in_a_torch_that_does_not_say_what_an_event_is(name, category):
    class Event:
        def name(self):
            return name

        def device_type(self):
            return torch._C._autograd.DeviceType.CPU

    assert torchops._category(Event()) == category


@pytest.mark.parametrize(("captures", "waited"), [(False, [0, 2]), (True, [])])
def test_a_step_ends_when_all_devices_that_the_program_uses_have_ended(monkeypatch, captures, waited):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device != 1, raising=False)
    ModuleCalls().settle()
    assert waits == waited
