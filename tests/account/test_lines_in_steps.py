"""Time of the program's own code in its steps: outside the phases, outside operators, and in second passes."""

from __future__ import annotations

from typing import Any

import pytest
from asking import main_of

from xsp import account, advise
from xsp.account import entries as names
from xsp.account.sentences import limit, lines, remarks
from xsp.advise.advice import Advice
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000


def line_of(number: int, calls: str, share: float = 1.0, **values: Any) -> dict[str, Any]:
    return {"file": "train.py", "line": number, "function": "train", "calls": calls, "ns": round(share * 60 * MS),
            "gaps": 6, **values}  # fmt: skip


def phase(name: str, *found: dict[str, Any], kind: int = 0) -> dict[str, Any]:
    return {"kind": kind, "phase": name, "gaps": 6, "ns": 60 * MS, "lines": [*found]}


def trained(text: str, step_ms: float, before_ms: float = 0.0, **run: Any) -> Trace:
    """Return a run of steps of one kind, three of them recorded, of the spans of one."""
    rows = [row for number in range(3) for row in spans(text, step=number)]
    loop = [
        {"step": number, "dur_ns": step_ms * MS, "before_ns": before_ms * MS, "rung": 40 if number < 3 else 10}
        for number in range(30)
    ]
    return with_loop(trace_of(rows, run), loop)


def advice_of(trace: Trace, question: str) -> list[Advice]:
    return list(advise.of(trace, only=[question]).advice)


STATISTICS = """
    step s          0-10000
    forward Net     0-3000
    backward b      3000-7000
    op aten::abs    7100-7200
    op aten::item   8000-8100
    optimizer SGD   9000-10000
"""
INNER = {"file": "norms.py", "line": 4, "last": 6, "calls": "p.grad.norm, item", "ns": 8 * MS, "of_ns": 10 * MS}


def test_the_line_of_python_between_backward_and_the_optimizer_is_named() -> None:
    found = line_of(20, "statistics", 0.9, within=INNER)
    trace = trained(STATISTICS, 10, lines=[phase("outside", found, line_of(21, "log", 0.1))])
    assert limit(account.of(trace)) == (
        "The largest part of an iteration is backward, 4.00 of 10.0 ms (40 %); 2.00 of 10.0 ms (20 %) pass outside the "
        "model and its phases, 1.44 ms of it in norms.py:4-6 (called in train.py:20), p.grad.norm, item."
    )
    (piece,) = advice_of(trace, "outside")
    assert piece.what.startswith("1.44 ms of an iteration of 10.0 ms pass in norms.py:4-6 (called in train.py:20)")
    assert piece.do.startswith("read values less often, and together")
    of_package = trained(STATISTICS, 10, lines=[phase("outside", {**found, "package": True})])
    assert limit(account.of(of_package)).endswith("ms of it in norms.py:4-6, p.grad.norm, item.")
    assert piece.at_most
    assert piece.gain.high <= 2.0


def test_what_runs_outside_the_phases_may_be_needed() -> None:
    """A loss that is written in operators is no flaw; its line is named all the same."""
    trace = trained(STATISTICS, 10, lines=[phase("outside", line_of(20, "contrastive_loss"))])
    assert "2.00 ms of it in train.py:20, contrastive_loss" in limit(account.of(trace))
    assert advice_of(trace, "outside") == []


def test_a_line_of_numpy_in_the_step_is_to_take_less_time_and_one_of_operators_may_be_needed() -> None:
    """An environment took a third of an iteration, and only its line was named."""
    found = phase("outside", line_of(20, "np.tanh, rng.normal", 0.8), line_of(21, "log_prob", 0.2))
    (piece,) = advice_of(trained(STATISTICS, 10, lines=[found]), "outside")
    assert piece.do.startswith("make train.py:20 take less time")
    assert piece.at_most
    assert piece.gain.value == pytest.approx(1.6)
    operators = STATISTICS.replace("7100-7200", "7100-8000")
    assert advice_of(trained(operators, 10, lines=[found]), "outside") == []


FOCAL = """
    step s            0-10000
    forward Net       0-3000
    op aten::softmax  3100-3500 sequence_nr=1 input_shapes=[[256,4000],[],[]]
    op aten::log      3500-3900 sequence_nr=2 input_shapes=[[256,4000]]
    op aten::rsub     3900-4300 sequence_nr=3 input_shapes=[[256,4000],[],[]]
    op aten::mul      4300-4700 sequence_nr=4 input_shapes=[[256,4000],[256,4000]]
    op aten::sum      4700-5000 sequence_nr=5 input_shapes=[[256,4000],[],[],[]]
    backward b        5000-9000
    op SumBackward0      5000-5200 sequence_nr=5
    op MulBackward0      5200-5600 sequence_nr=4
    op RsubBackward1     5600-5800 sequence_nr=3
    op LogBackward0      5800-6200 sequence_nr=2
    op SoftmaxBackward0  6200-6600 sequence_nr=1
    op AddmmBackward0    6600-9000 sequence_nr=0
    optimizer SGD     9000-10000
"""


def test_a_loss_of_many_operators_has_its_line_and_its_remedy_and_is_no_report() -> None:
    line = line_of(20, "torch.softmax, torch.log, .sum")
    trace = trained(FOCAL, 10, lines=[phase("outside", line)])
    assert advice_of(trace, "outside") == []
    (piece,) = advice_of(trace, "loss")
    assert piece.what.startswith("a loss is composed of 5 operators on tensors of 256×4000 at train.py:20: with their ")
    assert "torch.compile of the function at train.py:20" in piece.do
    assert piece.gain.value == pytest.approx(3.5 - 0.8)
    assert piece.at_most
    few = trained(FOCAL.replace("input_shapes=[[256,4000]]", "input_shapes=[[256]]"), 10)
    assert advice_of(few, "loss") == []
    a_model = trained(FOCAL.replace("aten::log ", "aten::mm "), 10)
    assert advice_of(a_model, "loss") == []


LOSS_IN_FORWARD = FOCAL.replace(
    "forward Net       0-3000",
    """forward Net       0-5000
    module Net         0-5000
    module Linear      0-3000
    op aten::addmm    0-3000 sequence_nr=0 input_shapes=[[4000],[256,4000],[4000,4000],[],[]]""",
)


def test_a_loss_inside_a_model_is_found_after_its_last_product() -> None:
    trace = trained(LOSS_IN_FORWARD, 10)
    (piece,) = advice_of(trace, "loss")
    assert piece.what.startswith("a loss is composed of 5 operators on tensors of 256×4000 in Net: with their ")
    assert "torch.compile of the function in Net" in piece.do
    assert piece.gain.value == pytest.approx(3.5 - 0.8)
    before_a_product = trained(LOSS_IN_FORWARD.replace("4700-5000 seq", "4650-4700 seq").replace(
        "    backward b", "    op aten::addmm    4700-5000 sequence_nr=6 input_shapes=[[10],[256,4000],[4000,10]]\n"
        "    backward b"), 10)  # fmt: skip
    assert advice_of(before_a_product, "loss") == []


def test_a_loss_after_a_product_outside_modules_is_one_too() -> None:
    product = "    op aten::mm       3000-3100 sequence_nr=0 input_shapes=[[256,64],[64,4000]]\n    op aten::softmax "
    trace = trained(FOCAL.replace("    op aten::softmax ", product), 10)
    assert [piece.question for piece in advice_of(trace, "loss")] == ["loss"]


def test_lines_of_steps_of_other_kinds_are_not_named() -> None:
    trace = trained(STATISTICS, 10, lines=[phase("outside", line_of(20, "item"), kind=3)])
    assert "train.py" not in limit(account.of(trace))


NUMPY = """
    step s              0-9000
    forward Net         0-9000
    module Net          0-9000
    module conv         0-1000    type=Conv2d
    op aten::conv2d     100-900
    module act          1000-9000 type=Wrap
    op Act              1100-8900
    op aten::detach     1200-1210
    op aten::from_numpy 8800-8850
"""


@pytest.mark.parametrize("is_inside", [True, False])
def test_python_outside_operators_that_is_most_of_forward_is_named_with_its_line(is_inside: bool) -> None:
    inner = {"file": "act.py", "line": 9, "calls": "np.tanh", "ns": 9 * MS, "of_ns": 10 * MS}
    found = line_of(20, "model", within=inner) if is_inside else line_of(20, "model")
    trace = trained(NUMPY, 9, lines=[phase("forward", found)])
    place = "Python outside operators, act.py:9 (called in train.py:20), np.tanh"
    assert (place in limit(account.of(trace))) == is_inside
    (piece,) = advice_of(trace, "stall")
    assert "a call of Act spends 7.6" in piece.what
    assert piece.at_most
    assert ("see act.py:9" in piece.do) == is_inside


def test_no_line_has_the_time_in_which_other_threads_may_hold_the_lock_of_python() -> None:
    """Threads of a service waited for each other's tokenizers: a line of forward was told to replace NumPy."""
    inner = {"file": "act.py", "line": 9, "calls": "np.tanh", "ns": 9 * MS, "of_ns": 10 * MS}
    rows = [row for number in range(3) for row in spans(NUMPY, step=number)]
    loop = [
        {"step": number, "start_ns": 5 * number * MS, "dur_ns": 9 * MS, "before_ns": MS, "thread": 1 + number % 2,
         "beside_ns": MS, "rung": 40 if number < 3 else 10}
        for number in range(30)
    ]  # fmt: skip
    trace = with_loop(trace_of(rows, {"lines": [phase("forward", line_of(20, "model", within=inner))]}), loop)
    assert "Python outside operators, or waits for its lock (GIL), which other threads hold" in limit(account.of(trace))
    (piece,) = advice_of(trace, "stall")
    assert "act.py" not in piece.do
    assert "GIL" in piece.do


@pytest.mark.parametrize(
    ("share", "is_loop", "named"),
    [(0.4, False, False), (0.4, True, True), (0.15, False, True), (0.02, True, False)],
    ids=["too long for the gap", "long loop", "fits", "too short"],
)
def test_the_line_of_a_stall_is_one_that_can_be_python(share: float, is_loop: bool, named: bool) -> None:
    """The line with most time in forward was one of operators: it was told to replace NumPy."""
    operators = {"file": "net.py", "line": 20, "calls": "s.lin, .index_add", "ns": 50 * MS, "of_ns": 100 * MS}
    python = {**operators, "line": 12, "calls": "index.tolist", "ns": round(100 * share * MS), "is_loop": is_loop}
    found = line_of(20, "model", within=operators, inner=[operators, python])
    text = "step s 0-10000\nforward Net 0-9990\nmodule net 0-9990 type=Net\nop aten::mm 10-7000\nop aten::mm 8500-9980"
    (piece,) = advice_of(trained(text, 10, lines=[phase("forward", found)]), "stall")
    assert "1.46 ms outside operators" in piece.what
    assert ("see net.py:12 (called in train.py:20), index.tolist" in piece.do) == named
    assert "net.py:20" not in piece.do


@pytest.mark.parametrize("name", ["TanhBackward0", "CompiledFunction", "aten::tanh"])
def test_operators_that_are_not_written_in_python_do_not_stall(name: str) -> None:
    assert advice_of(trained(NUMPY.replace("op Act  ", f"op {name} "), 9), "stall") == []


def test_code_that_was_compiled_runs_outside_operators() -> None:
    inner = {"file": "act.py", "line": 9, "calls": "", "ns": 9 * MS}
    compiled = [{"start_ns": 1, "dur_ns": 1}]
    trace = trained(NUMPY, 9, lines=[phase("forward", line_of(20, "model", within=inner))], compilations=compiled)
    assert "act.py" not in limit(account.of(trace))


TWICE = """
    step s          0-20000
    forward Net     0-4000
    forward Net     4000-9000
    forward Loss    9000-9100
    backward b      9100-19000
    optimizer SGD   19000-20000
"""


def call(module: int, trains: bool, shape: tuple[int, ...] = (8, 3)) -> dict[str, Any]:
    name = {1: "Net", 2: "Loss"}[module]
    return {"what": "forward", "type": name, "module": module, "trains": trains, "shape": [*shape]}


@pytest.mark.parametrize(
    ("calls", "is_second"),
    [
        ([call(1, False), call(1, True), call(2, True)], True),
        ([call(1, True), call(1, True), call(2, True)], False),  # a batch in two halves
        ([call(1, False, (64, 3)), call(1, True), call(2, True)], False),
        ([{**call(1, False), "module": 3}, call(1, True), call(2, True)], False),  # a teacher
        ([call(1, False), call(1, True)], False),  # of another kind of step
    ],
)
def test_a_pass_without_gradients_of_the_model_that_is_trained_is_named(
    calls: list[dict[str, Any]], is_second: bool
) -> None:
    kinds = [{"kind": 0, "name": "training", "training": True, "calls": calls}]
    trace = trained(TWICE, 20, kinds=kinds)
    main = main_of(trace)
    texts = [remark.text for remark in remarks(account.of(trace))]
    pieces = advice_of(trace, "second-pass")
    if not is_second:
        assert pieces == []
        assert texts == []
        return
    assert texts == ["Net is called in each training step also without gradients: 4.00 of 20.0 ms (20 %)."]
    assert [line.name for line in lines(main, main.host)][1:3] == ["forward of Net", "forward of Net without gradients"]
    assert sum(line.ms for line in lines(main, main.host)) == pytest.approx(20)
    (piece,) = pieces
    assert piece.gain.high == pytest.approx(4.0)
    assert piece.at_most


def averaging(operators: str, times: int) -> Trace:
    text = "before b 0-10000\nstep s 10000-20000\nforward Net 10000-19000\n"
    starts = range(100, 9900, 9800 // times)
    text += "".join(
        f"op aten::{name} {at + 10 * place}-{at + 10 * place + 8}\n"
        for at in starts
        for place, name in enumerate(operators.split())
    )
    return trained(text, 10, 10, between={"gaps": 6, "ns": 60 * MS, "lines": [line_of(31, "value.copy_")]})


@pytest.mark.parametrize(
    ("operators", "times", "is_loop"),
    [
        ("mul mul add copy_", 60, True),
        ("detach lerp_", 60, True),
        ("mul mul add copy_", 8, False),
        ("mul add", 60, False),  # nothing is written to
        ("flip rand sub_ resize rot90", 60, False),  # images of a batch
    ],
)
def test_tensors_that_are_changed_one_by_one_between_steps_are_a_list_for_one_call(
    operators: str, times: int, is_loop: bool
) -> None:
    trace = averaging(operators, times)
    assert main_of(trace).host.ms(names.BETWEEN) == pytest.approx(10, rel=0.05)
    (piece,) = advice_of(trace, "between")
    assert ("multi_avg_fn" in piece.do) == is_loop
    assert ("train.py:31" in piece.do) or not is_loop
    assert ("one by one" in piece.what) == is_loop


def test_sorts_of_each_sample_between_steps_have_a_remedy_of_their_own() -> None:
    text = "before b 0-10000\nstep s 10000-20000\nforward Net 10000-19000\n"
    text += "".join(f"op aten::argsort {1000 * at}-{1000 * at + 900}\n" for at in range(8))
    (piece,) = advice_of(trained(text, 10, 10), "between")
    assert piece.do.startswith("torch.topk(values, k)")
    assert piece.do.endswith("if each of its 8 calls is for one sample, one call for the whole batch")


def test_a_line_with_less_than_half_of_the_time_between_steps_is_named_in_advice_as_on_the_first_screen() -> None:
    found = [line_of(31, "penalty", 0.4), line_of(41, "model", 0.3), line_of(51, "stop", 0.3)]
    text = "before b 0-10000\nop aten::add 100-108\nstep s 10000-20000\nforward Net 10000-19000"
    trace = trained(text, 10, 10, between={"gaps": 6, "ns": 60 * MS, "lines": found})
    entry = main_of(trace).host[names.BETWEEN]
    place = entry.place if entry is not None else None
    assert place == "train.py:31, penalty"
    (piece,) = advice_of(trace, "between")
    assert f"of them in {place}" in piece.what


CLOSURE = """
    step s          0-10000
    optimizer SGD   0-10000
    forward Net     500-2500
    op aten::item   3000-5000
    backward b      6000-9000
    op aten::mul_   9100-9200
"""


def test_what_the_closure_of_an_optimizer_does_is_no_part_of_its_step() -> None:
    """Lightning calls the training step in one; metrics in it were "the optimizer", 30 % of an iteration."""
    main = main_of(trained(CLOSURE, 10))
    assert main.host.ms(names.OPTIMIZER) == pytest.approx(1.0)
    assert main.host.ms(names.OUTSIDE) == pytest.approx(0.5 + 3.5)
    again = "backward b 3000-3500\n" + CLOSURE.strip()
    assert main_of(trained(again, 10)).host.ms(names.OPTIMIZER) == pytest.approx(4.5)  # LBFGS works between its calls


def test_operators_of_a_closure_are_no_updates_of_parameters() -> None:
    reads = "".join(f"op aten::add_ {3000 + 10 * at}-{3000 + 10 * at + 8}\n" for at in range(200))
    assert advice_of(trained(CLOSURE + reads, 10), "optimizer") == []
    updates = "".join(f"op aten::add_ {9000 + 10 * at}-{9000 + 10 * at + 8}\n" for at in range(90))
    (piece,) = advice_of(trained(CLOSURE.replace("op aten::mul_   9100-9200", "") + updates, 10), "optimizer")
    assert "90 operators, 1 ms of a step" in piece.what
