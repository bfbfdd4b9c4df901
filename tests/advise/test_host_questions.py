"""Questions on traces of the host: stalls, copies, casts, loops, optimizers, gradients, threads.

The steps are constructed, so that no test depends on the speed of a machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from xsp import account, advise
from xsp.account.between import main_lines
from xsp.advise import Advice, Needs, calls, text
from xsp.advise.algebra import _sum_chain
from xsp.advise.calls import HostCall, _limit_to_step
from xsp.advise.loops import _with_indexing
from xsp.run import Between
from xsp.schema import Level
from xsp.store.loop import BARE
from xsp.testing import spans, trace_of, with_loop


def advice_of(step: str, name: str, **run: object) -> list[Advice]:
    """Return the advice of a question on three equal steps of 10 ms."""
    rows = [
        row
        for number in range(3)
        for row in spans("\n".join(_moved(line, 100_000 * number) for line in step.strip().splitlines()), step=number)
    ]
    report = advise.of(trace_of(rows, run=run), max_needs=Needs.TRACE)
    assert name not in report.unanswered, report.unanswered
    return [piece for piece in report.advice if piece.question == name]


def _moved(line: str, offset_us: int) -> str:
    kind, name, times, *rest = line.split()
    begin, end = times.split("-")
    return " ".join((kind, name, f"{int(begin) + offset_us}-{int(end) + offset_us}", *rest))


PLAIN = """
    step s 0-10000
    forward Net 10-9900
    module net 20-9890 type=Net input_shapes=[[64,256]]
    module net.a 30-4900 type=Linear input_shapes=[[64,256]]
    op aten::linear 40-4890 dtype=float
    module net.b 4910-9880 type=Linear input_shapes=[[64,256]]
    op aten::linear 4920-9870 dtype=float
"""


def inside(*lines: str) -> str:
    """Return a step whose module `net.a` makes these calls from 1000 to 4000 µs."""
    plain_lines = [line for line in PLAIN.splitlines() if "40-4890" not in line]
    outer = ["op aten::linear 40-1000 dtype=float", "op aten::linear 4000-4890 dtype=float"]
    return "\n".join((*plain_lines, *outer, *lines))


def test_a_step_of_operators_gets_no_advice() -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    report = advise.of(trace_of(rows, run={"machine": {"torch_threads": 2, "cores": 2}}), max_needs=Needs.TRACE)
    assert report.advice == ()


def test_time_of_a_module_outside_operators_is_a_stall() -> None:
    (piece,) = advice_of(inside(), "stall")
    assert [place.module for place in piece.where] == ["net.a"]
    assert 2.5 < piece.gain.low <= piece.gain.value <= 3.1
    assert not piece.at_most
    assert "a call of Linear spends" in piece.what


def test_time_missing_from_one_step_is_no_stall() -> None:
    rows = [row for number, text in enumerate((inside(), PLAIN, inside())) for row in spans(text, step=number)]
    assert advise.of(trace_of(rows), only=["stall"]).advice == ()


def test_time_of_the_step_around_the_model_is_a_stall_of_the_step() -> None:
    text = PLAIN.replace("step s 0-10000", "step s 0-12000")
    (piece,) = advice_of(text, "stall")
    assert "outside the model" in piece.what
    assert piece.where[0].module is None


def test_a_stall_of_the_step_is_no_longer_than_what_passes_there_in_other_steps() -> None:
    """Recorded steps took 4.3 times as long outside the phases, and 100 % of an iteration was a stall."""
    text = PLAIN.replace("step s 0-10000", "step s 0-16000")
    rows = [row for number in range(3) for row in spans(text, step=number)]
    loop = [
        {"step": number, "dur_ns": dur_ns, "before_ns": 0, "rung": rung}
        for number, (dur_ns, rung) in enumerate([(1.6e7, Level.OP)] * 3 + [(1.1e7, BARE)] * 17)
    ]
    trace = with_loop(trace_of(rows), loop)
    (piece,) = advise.of(trace, only=["stall"]).advice
    main = account.of(trace).main
    assert main is not None
    assert piece.gain.value == pytest.approx(main.host.ms("outside the phases"))
    assert piece.gain.value < 5


@pytest.mark.parametrize("traces", [1, 3])
def test_steps_are_distinguished_within_one_trace_of_a_job(traces: int) -> None:
    step = inside("op aten::relu 3950-3990")
    rows = []
    for number in range(3):
        lines = "\n".join(_moved(line, 100_000 * number) for line in step.strip().splitlines())
        rows += spans(lines, step=number, trace_id=f"{number if traces == 3 else 0:032x}")
    report = advise.of(trace_of(rows), max_needs=Needs.TRACE)
    (piece,) = (entry for entry in report.advice if entry.question == "stall")
    assert 2.8 < piece.gain.value < 3.0
    assert not piece.at_most
    assert "in 3 recorded steps" in piece.why[0]


def test_clones_that_the_program_calls_are_reported_and_those_inside_operators_are_not() -> None:
    (piece,) = advice_of(
        inside("op aten::clone 1000-4000 dtype=float", "op aten::copy_ 1100-3900 dtype=float"), "copies"
    )
    assert (piece.where[0].module, piece.where[0].op, piece.at_most) == ("net.a", "aten::clone", False)
    assert abs(piece.gain.value - 3) < 0.01
    assert advice_of(inside("op aten::reshape 1000-4000", "op aten::clone 1100-3900"), "copies") == []


def test_a_layout_that_had_to_be_made_is_a_bound() -> None:
    (piece,) = advice_of(inside("op aten::contiguous 1000-4000", "op aten::clone 1010-3990"), "copies")
    assert piece.at_most
    assert advice_of(inside("op aten::contiguous 1000-4000"), "copies") == []


DOUBLE = (
    "op aten::to 1000-1500 dtype=float",
    "op aten::copy_ 1010-1490 dtype=double",
    "op aten::mm 1500-3500 dtype=double",
    "op aten::to 3500-4000 dtype=double",
    "op aten::copy_ 3510-3990 dtype=float",
)


def test_double_precision_gains_its_casts_and_half_of_the_work_and_changes_numbers() -> None:
    (piece,) = advice_of(inside(*DOUBLE), "casts")
    assert abs(piece.gain.value - 2) < 0.01
    assert piece.changes_numbers is not None
    assert piece.where[0].module == "net.a"
    rows = [row for number in range(3) for row in spans(inside(*DOUBLE), step=number)]
    assert [entry.question for entry in advise.of(trace_of(rows), same_numbers=True).advice] == []


def test_casts_to_half_and_back_are_a_bound_and_casts_one_way_are_nothing() -> None:
    half = [line.replace("double", "c10::BFloat16") for line in DOUBLE]
    (piece,) = advice_of(inside(*half), "casts")
    assert piece.at_most
    assert "float to c10::BFloat16" in piece.what.replace("c10::BFloat16 to float and ", "")
    assert advice_of(inside(*half[:3]), "casts") == []


def test_single_values_read_in_a_loop_are_counted_with_the_indexing_before_them() -> None:
    reads = [
        line
        for index in range(1000, 4000, 200)
        for line in (
            f"op aten::select {index}-{index + 80} dtype=float",
            f"op aten::item {index + 90}-{index + 190} dtype=float",
        )
    ]
    (piece,) = advice_of(inside(*reads), "synchronisations")
    assert piece.what.startswith("15 single values")
    assert 2 < piece.gain.value < 3
    assert advice_of(inside(*reads[:8]), "synchronisations") == []
    assert advice_of(inside(*reads).replace("dtype=float", "phase=optimizer"), "synchronisations") == []


def test_a_loop_of_reads_contains_its_comparisons_and_their_gradients() -> None:
    """Without the loop, none of its calls on single values is made; the norm of a large tensor still is."""

    def loop(us: int) -> list[Advice]:
        passes = [
            line
            for index in range(1000, 4000, 200)
            for line in (
                f"op aten::select {index}-{index + 20} dtype=float sequence_nr={index}",
                f"op aten::gt {index + 30}-{index + 30 + us} dtype=float",
                f"op aten::is_nonzero {index + 90}-{index + 100} dtype=bool",
            )
        ]
        nodes = [
            f"op SelectBackward0 {index}-{index + 100} sequence_nr={index - 5000}" for index in range(6000, 9000, 200)
        ]
        text = inside(*passes).replace("net.b 4910-9880", "net.b 4910-5500").replace("4920-9870", "4920-5490")
        return advice_of("\n".join((text, "backward b 5990-9890", *nodes)), "synchronisations")

    (piece,) = loop(15)
    us = 15 * (20 + 15 + 10 + 100) + 14 * (10 + 20 + 20) + 15 * 10
    assert piece.gain.value == pytest.approx(us / 1000 * 14 / 15, rel=0.2)
    assert "and their gradients" in piece.why[0]
    (smaller,) = loop(50)
    assert smaller.gain.value < piece.gain.value + 0.1


@pytest.mark.slow
def test_a_batch_that_is_computed_sample_by_sample_is_reported_with_its_size() -> None:
    def loop(shape: str, count: int = 64) -> str:
        return inside(
            *(f"module net.a.c {1000 + 40 * n}-{1039 + 40 * n} type=Cell input_shapes={shape}" for n in range(count)),
            *(f"op aten::mm {1001 + 40 * n}-{1038 + 40 * n} dtype=float" for n in range(count)),
        )

    (piece,) = advice_of(loop("[[1,256]]"), "samples")
    assert "64 times with one sample each (1×256)" in piece.what
    assert piece.at_most
    for step in (loop("[[1,256],[1,256]]"), loop("[[8,256]]"), loop("[[1,256]]", 12)):
        assert advice_of(step, "samples") == []


TRAINING = """
    step s 0-10000
    forward Net 10-3000
    op aten::linear 20-2990 dtype=float
    backward b 3010-5990 phase=backward
    op aten::mm 3020-5980 phase=backward
"""


def updates(first: int, *names: str) -> str:
    return "\n".join(
        f"op aten::{name} {first + 400 * n + 100 * position}-{first + 400 * n + 100 * position + 99}"
        for n in range(9)
        for position, name in enumerate(names)
    )


@pytest.mark.slow
def test_an_optimizer_that_goes_through_parameters_is_reported_and_one_in_one_call_is_not() -> None:
    loop = (
        TRAINING + "optimizer Adam 6000-9900 phase=optimizer\n" + updates(6010, "mul_", "addcmul_", "sqrt", "addcdiv_")
    )
    (piece,) = advice_of(loop, "optimizer")
    assert "9 parameters one by one: 36 operators" in piece.what
    assert "fused=True" in piece.do
    assert "foreach=True" not in piece.do, "on a processor it saves nothing of large tensors"
    assert piece.where[0].module == "Adam"
    assert advice_of(loop.replace("optimizer Adam", "optimizer LBFGS"), "optimizer") == []  # it has no fused form
    assert advice_of(loop.replace("aten::mul_ 6010", "aten::_fused_adam_ 6010"), "optimizer") == []


def test_optimizers_of_one_step_are_one_piece_with_the_time_of_all() -> None:
    def stepping(*names: str) -> list[Advice]:
        lines = [
            line
            for index, name in enumerate(names)
            for line in (
                f"optimizer {name} {6000 + 1900 * index}-{7850 + 1900 * index} phase=optimizer",
                *(f"op aten::{op} {6010 + 1900 * index + 80 * position}-{6085 + 1900 * index + 80 * position}"
                  for position, op in enumerate(("mul_", "addcmul_", "sqrt", "addcdiv_") * 5)),
            )
        ]  # fmt: skip
        return advice_of(TRAINING + "\n".join(lines), "optimizer")

    (single,) = stepping("Adam")
    for names, prefix in ((("Adam", "Adam"), "Adam updates"), (("Adam", "SGD"), "Adam and SGD update")):
        (combined,) = stepping(*names)
        assert combined.what.startswith(f"{prefix} 10 parameters one by one in 2 calls of optimizers: 40 operators")
        assert combined.gain.value == pytest.approx(2 * single.gain.value, rel=0.01)


def test_updates_written_by_hand_are_reported_too() -> None:
    (piece,) = advice_of(TRAINING + updates(6010, "mul", "sub_", "add_", "neg"), "optimizer")
    assert piece.what.startswith("the program updates 9 parameters")
    assert "_foreach_" in piece.do
    step = TRAINING + updates(6010, "mul", "sub_", "add_", "neg") + "\noptimizer SGD 9700-9790 phase=optimizer"
    (piece,) = advice_of(step, "optimizer")
    assert piece.what.startswith("the program updates 9 parameters or gradients, beside the optimizer,")
    assert "clip_grad_norm_" in piece.do


def test_unused_gradients_are_reported_if_no_backward_pass_follows() -> None:
    recorded_ops = "\n".join(f"op aten::mul {1000 + n * 20}-{1019 + n * 20} sequence_nr={n}" for n in range(150))
    (piece,) = advice_of(inside(recorded_ops), "gradients")
    assert "150 operators are recorded" in piece.what
    assert piece.trial == "inference_mode"
    assert advice_of(inside(recorded_ops, "backward b 9890-9990"), "gradients") == []
    same_number = "\n".join(f"op aten::mul {1000 + n * 20}-{1019 + n * 20} sequence_nr=7" for n in range(150))
    assert advice_of(inside(same_number), "gradients") == []


def test_more_threads_than_cores_are_a_bound() -> None:
    (piece,) = advice_of(PLAIN, "oversubscription", machine={"torch_threads": 8, "cores": 2})
    assert (piece.what, piece.trial, piece.at_most) == ("8 threads share 2 cores", "threads=2", True)
    assert not piece.gain_known
    page = text.page(advise.AdviceReport("s", None, (piece,), ("oversubscription",), {}, {}))
    assert "1. gain not known before it is tried" in page
    assert "at most" not in page
    assert advice_of(PLAIN, "oversubscription", machine={"torch_threads": 2, "cores": 2}) == []


def test_an_unanswered_question_names_the_missing_option() -> None:
    report = advise.of(trace_of(spans("step s 0-100\nforward Net 10-90")), max_needs=Needs.TRACE)
    assert report.advice == ()
    assert "record again with --levels M/L/G" in report.unanswered["stall"]


def test_a_step_without_a_thread_contains_the_calls_of_the_busiest_thread() -> None:
    text = """
        step s 0-10000 thread=None
        op aten::mm 0-3000 dtype=float
        op aten::mm 6000-9990 dtype=float
        op aten::mm 3500-4000 thread=2 dtype=float
    """
    (piece,) = advice_of(text, "stall")
    assert 2.9 < piece.gain.value < 3.1


@pytest.mark.parametrize(("recorded", "stalls"), [(1, 0), (2, 1)])
def test_a_gap_in_the_only_recorded_step_of_many_is_no_stall(recorded: int, stalls: int) -> None:
    rows = [row for number in range(recorded) for row in spans(inside(), step=number)]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": 0, "rung": Level.OP if index < recorded else BARE}
        for index in range(30)
    ]
    assert len(advise.of(with_loop(trace_of(rows), loop), only=["stall"]).advice) == stalls


def test_gaps_that_python_needs_between_many_calls_are_no_stall() -> None:
    many = [f"op aten::view {index}-{index + 65} dtype=float" for index in range(1000, 4000, 100)]
    assert advice_of(inside(*many), "stall") == []


AGAIN = """
    step s 0-10000
    forward Net 10-9900
    module net 20-9890 type=Net input_shapes=[[64,256]]
    module net.a 30-3000 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[0]}
    op aten::linear 40-2990 dtype=float input_shapes=[[64,256],[8,256],[8]]
    module net.a 3100-6000 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[0]}
    op aten::linear 3110-5990 dtype=float
    module net.b 6100-9880 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[0]}
    op aten::linear 6200-9870 dtype=float
"""


LISTED = "input_shapes=[[[8],[8,256]]]"


def test_a_module_with_the_same_inputs_is_a_repeat() -> None:
    (piece,) = advice_of(AGAIN, "repeated")
    assert [(place.module, place.calls) for place in piece.where] == [("net.a", 1)]
    assert piece.gain.value == pytest.approx(2.9)
    assert not piece.at_most


ANCHORS = """
    step s            0-10000
    forward Net       0-1000
    module Net        0-1000    type=Net input_shapes=[[64,256]] attributes={"input_tensors":[0]}
    op aten::linear   10-990    sequence_nr=1 input_shapes=[[64,256],[8,256],[8]]
    forward Net       1000-2000
    module Net        1000-2000 type=Net input_shapes=[[64,256]] attributes={"input_tensors":[1]}
    op aten::linear   1010-1990 sequence_nr=2 input_shapes=[[64,256],[8,256],[8]]
    forward Net       2000-3000
    module Net        2000-3000 type=Net input_shapes=[[64,256]] attributes={"input_tensors":[0]}
    op aten::linear   2010-2990 sequence_nr=3 input_shapes=[[64,256],[8,256],[8]]
    forward Net       3000-4000
    module Net        3000-4000 type=Net input_shapes=[[64,256]] attributes={"input_tensors":[1]}
    op aten::linear   3010-3990 sequence_nr=4 input_shapes=[[64,256],[8,256],[8]]
    backward b        4000-9000
    op AddmmBackward0 4000-5000 sequence_nr=4
    op AddmmBackward0 5000-6000 sequence_nr=3
    op AddmmBackward0 6000-7000 sequence_nr=2
    op AddmmBackward0 7000-8000 sequence_nr=1
"""


def test_a_whole_model_that_gets_two_tensors_twice_each_is_two_repeats_with_their_gradients() -> None:
    (piece,) = advice_of(ANCHORS, "repeated")
    assert piece.what == "Net is called 2 times in a step with tensors that it was given before"
    assert piece.gain.value == pytest.approx(4.0)


def test_a_call_without_gradients_replaces_none_with_them() -> None:
    assert advice_of(ANCHORS.replace(" sequence_nr=1", "").replace(" sequence_nr=2", ""), "repeated") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('3100-6000 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[0]}',
         '3100-6000 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[1]}'),
        ('3100-6000 type=Linear input_shapes=[[64,256]] attributes={"input_tensors":[0]}',
         "3100-6000 type=Linear input_shapes=[[64,256]]"),
        ("op aten::linear 3110-5990", "op aten::native_dropout 3110-5990"),
        ("    module net.a 3100", "    op aten::add_ 3010-3050 input_shapes=[[64,256]]\n    module net.a 3100"),
        ("    module net.a 3100", "    op aten::sub_ 3010-3050 input_shapes=[[8,256],[8,256]]\n    module net.a 3100"),
        ("    module net.a 3100", f"    op aten::_foreach_add_ 3010-3050 {LISTED}\n    module net.a 3100"),
    ],
    ids=["another tensor", "not recorded", "chance", "written to between", "weights disturbed", "weights updated"],
)  # fmt: skip
def test_a_module_that_may_return_another_result_is_no_repeat(before: str, after: str) -> None:
    assert before in AGAIN
    assert advice_of(AGAIN.replace(before, after), "repeated") == []


def test_a_loop_over_samples_takes_all_that_each_pass_does() -> None:
    """With the loss and the backward pass of each sample: 35 % were promised of a step that was 12 times too long."""
    lines = ["step s 0-10000"]
    for number in range(32):
        begin = 100 + 300 * number
        lines += [
            f"op aten::select {begin}-{begin + 10} input_shapes=[[32,64]]",
            f"forward Net {begin + 10}-{begin + 90} input_shapes=[[1,64]]",
            f"module Net {begin + 10}-{begin + 90} type=Net input_shapes=[[1,64]]",
            f"op aten::linear {begin + 20}-{begin + 80} dtype=float input_shapes=[[1,64],[64,64]]",
            f"op aten::cross_entropy_loss {begin + 100}-{begin + 140} input_shapes=[[1,64]]",
            f"backward backward {begin + 150}-{begin + 290}",
            f"op AddmmBackward0 {begin + 160}-{begin + 200} input_shapes=[[1,64]]",
        ]
    (piece,) = advice_of("\n".join(lines), "samples")
    assert "32 times with one sample each (1×64)" in piece.what
    assert 31 * 0.3 <= piece.gain.value <= 32 * 0.3
    closure = ["step s 0-10000", "optimizer LBFGS 50-9900", *lines[1:]]
    assert advice_of("\n".join(closure), "samples") == [], "each evaluation needs the update before it"


@pytest.mark.parametrize(
    ("first", "is_sequence"), [("unsqueeze 0 [64]", True), ("select 0 [32,64]", False), ("unsqueeze 1 [64]", False)]
)
def test_calls_that_wait_for_values_may_need_them(first: str, is_sequence: bool) -> None:
    """A policy was to take all steps of its environment in one call, and 91 % of an iteration were to be saved."""
    name, place, shape = first.split()
    lines = ["step s 0-10000"]
    for number in range(32):
        begin = 100 + 300 * number
        lines += [
            f"op aten::{name} {begin}-{begin + 10} input_shapes=[{shape}]",
            f"forward Net {begin + 10}-{begin + 90} input_shapes=[[1,64]]",
            f"module Net {begin + 10}-{begin + 90} type=Net input_shapes=[[1,64]]",
            f"op aten::linear {begin + 20}-{begin + 80} dtype=float input_shapes=[[1,64],[64,64]]",
            *([f"op aten::item {begin + 100}-{begin + 110} input_shapes=[[1]]"] * (int(place) == 0)),
        ]
    (piece,) = advice_of("\n".join(lines), "samples")
    assert "32 times with one sample each (1×64)" in piece.what
    assert ("run several of these at once" in piece.do) == is_sequence
    assert (piece.gain.value < 31 * 0.12) == is_sequence, "what Python does between the calls is not saved"
    assert bool(advice_of("\n".join(lines), "synchronisations")) == (place == "0" and not is_sequence)


def test_samples_without_the_dimension_of_the_batch_are_samples() -> None:
    loop = "\n".join(
        f"module net.a {1000 + 40 * number}-{1035 + 40 * number} type=Linear input_shapes=[[256]]\n"
        f"op aten::linear {1001 + 40 * number}-{1034 + 40 * number} dtype=float input_shapes=[[256]]"
        for number in range(64)
    )
    plain_lines = "\n".join(line for line in PLAIN.splitlines() if "net.a" not in line and "40-4890" not in line)
    (piece,) = advice_of(f"{plain_lines}\n{loop}", "samples")
    assert "64 times with one sample each (256)" in piece.what


@pytest.mark.slow
def test_a_model_in_training_mode_that_nothing_trains_is_named_with_what_dropout_takes() -> None:
    training_ops = (
        'op aten::dropout 1000-2000 dtype=float attributes={"input_scalars":[null,0.1,true]}',
        'op aten::batch_norm 2000-2500 dtype=float attributes={"input_scalars":[null,null,null,null,null,true]}',
    )
    (piece,) = advice_of(inside(*training_ops), "training-mode")
    assert "1 call of dropout and 1 call of batch norm" in piece.what
    assert piece.gain.value == pytest.approx(1.0)
    assert advice_of(inside(*(entry.replace("true", "false") for entry in training_ops)), "training-mode") == []
    assert advice_of(inside(*(entry.split(" attr")[0] for entry in training_ops)), "training-mode") == []
    (norm,) = advice_of(inside(training_ops[1]), "training-mode")
    assert not norm.gain_known
    assert advice_of(inside(*training_ops) + "\n backward backward 9900-9950", "training-mode") == []


def test_a_tensor_that_grows_by_concatenation_is_copied_each_time() -> None:
    def step(shapes: list[list[list[int]]]) -> str:
        return inside(
            *(
                f"op aten::cat {1000 + 100 * index}-{1090 + 100 * index} dtype=TensorList "
                f"input_shapes={json.dumps([sizes, []], separators=(',', ':'))}"
                for index, sizes in enumerate(shapes)
            )
        )

    (piece,) = advice_of(step([[[index + 1, 64], [1, 64]] for index in range(20)]), "growing")
    assert piece.gain.value == pytest.approx(0.09 * 19)
    assert piece.what.startswith("a tensor grows by 20 concatenations")
    assert advice_of(step([[[1, 64], [1, 64]] for _ in range(20)]), "growing") == []


def test_all_growing_tensors_are_in_the_text_and_in_the_gain() -> None:
    cats = [
        f"op aten::cat {begin + 100 * index}-{begin + 100 * index + 90} input_shapes=[[[{index + 1},64],[1,64]],[]]"
        for begin, count in ((100, 10), (2000, 8))
        for index in range(count)
    ]
    (piece,) = advice_of("\n".join(("step s 0-10000", "forward Net 10-9900", *cats)), "growing")
    assert piece.what.startswith("2 tensors grow by 8 to 10 concatenations each")
    assert piece.gain.value == pytest.approx(0.09 * (9 + 7))


GENERATES = """
    step s 0-10000
    forward Net 10-9900 input_shapes=[[1,{length}]]
    module net 20-9890 type=Net
    op aten::embedding 40-4890 dtype=long
    op aten::linear 4920-9870 dtype=float
"""


def generating(lengths: dict[int, int], step: str = GENERATES) -> list[Advice]:
    """Return the advice on prefixes for steps, by number, that call a model with these numbers of tokens."""
    rows = [row for index, length in lengths.items() for row in spans(step.format(length=length), step=index)]
    report = advise.of(trace_of(rows), max_needs=Needs.TRACE)
    return [piece for piece in report.advice if piece.question == "prefix"]


def test_a_text_recomputed_for_each_token_is_reported_from_recorded_steps() -> None:
    (piece,) = generating({index: 5 + index for index in (3, 4, 9, 20, 31, 32, 60, 61)})
    assert piece.at_most
    assert 90 < piece.of_step_percent < 100
    assert "use_cache=True" in piece.do
    assert (
        len(generating({index: 5 + index % 100 for index in (3, 4, 9, 20, 31, 32, 60, 61, 103, 107)})) == 1
    )  # another text


@pytest.mark.parametrize(
    "lengths",
    [
        dict.fromkeys(range(10), 64),  # of one length
        dict.fromkeys(range(10), 1),  # with a cache
        {index: 10 + (37 * index) % 50 for index in range(12)},  # sentences of many lengths
        {index: 10 + 8 * index for index in range(12)},  # a schedule of longer and longer sequences
        {index: 20 + index for index in range(4)},  # too few to tell
    ],
)
def test_other_lengths_are_no_growing_text(lengths: dict[int, int]) -> None:
    assert generating(lengths) == []


def test_growing_inputs_without_tokens_are_not_reported() -> None:
    assert generating({index: 5 + index for index in range(20)}, GENERATES.replace("embedding", "linear")) == []


def test_a_whole_text_in_one_step_is_reported_too() -> None:
    lines = ["step s 0-10000"]
    for index in range(9):
        begin = 10 + 1000 * index
        lines += [f"forward Net {begin}-{begin + 900} input_shapes=[[2,{10 + index}]]",
                  f"op aten::embedding {begin + 10}-{begin + 890} dtype=long"]  # fmt: skip
    (piece,) = advice_of("\n".join(lines), "prefix")
    assert piece.at_most


def test_a_loop_over_a_recurrent_cell_is_one_call_of_the_layer() -> None:
    cells = (f"module net.a.cell {1000 + 100 * index}-{1090 + 100 * index} type=GRUCell" for index in range(20))
    (piece,) = advice_of(inside(*cells), "recurrence")
    assert "torch.nn.GRU " in piece.do
    assert piece.at_most


def test_without_its_loop_a_recurrence_needs_neither_the_operators_between_its_cells_nor_their_gradients() -> None:
    """Of a training's step (51.7 ms) nn.LSTM saved 39.4 where the cells' forward calls alone took 13."""
    lines = ["step s 0-10000", "forward Net 10-4000", "module net 20-3990 type=Net"]
    for index in range(20):
        begin = 100 + 150 * index
        lines += [f"op aten::select {begin}-{begin + 20} sequence_nr={2 * index}",
                  f"module net.cell {begin + 20}-{begin + 120} type=LSTMCell",
                  f"op aten::lstm_cell {begin + 25}-{begin + 115} sequence_nr={2 * index + 1}"]  # fmt: skip
    lines.append("backward b 4100-9900")
    for index in range(20):
        begin = 4200 + 280 * index
        lines += [f"op autograd::engine::evaluate_function:SelectBackward0 {begin}-{begin + 30} "
                  f"sequence_nr={2 * index} phase=backward",
                  f"op autograd::engine::evaluate_function:LstmBackward0 {begin + 30}-{begin + 230} "
                  f"sequence_nr={2 * index + 1} phase=backward"]  # fmt: skip
    (piece,) = advice_of("\n".join(lines), "recurrence")
    # 20 cells of 100 µs, 19 selections between them of 20, their gradients of 200 and 30
    assert piece.of_step_percent == pytest.approx(100 * (2 + 0.38 + 4 + 0.57) / 10, rel=0.02)
    assert "the operators between them and their gradients" in piece.why[0]


def element_loop(*names: str, passes: int = 100, backward: bool = True) -> str:
    """Return a step in which a loop calls these operators, 5 µs each, with as much Python code after each."""
    lines, begin = ["step s 0-10000", "forward Net 10-100", "module net 20-90 type=Net"], 200
    for index in range(passes):
        for place, name in enumerate(names):
            lines.append(f"op aten::{name} {begin}-{begin + 5} sequence_nr={len(names) * index + place}")
            begin += 10
    if backward:
        lines.append(f"backward b {begin}-9900")
        for number in range(len(names) * passes):
            lines.append(f"op autograd::engine::evaluate_function:B {begin + 10 * number}-{begin + 10 * number + 8} "
                         f"sequence_nr={number} phase=backward")  # fmt: skip
    return "\n".join(lines)


def test_long_python_code_between_the_calls_of_a_loop_is_part_of_what_it_takes() -> None:
    """The bound of a loop of 68.5 ms whose body was half Python was 48 % where the whole was saved."""
    lines = ["step s 0-10000", "forward Net 10-100", "module net 20-90 type=Net"]
    lines += [f"op aten::sub {100 + 90 * index}-{115 + 90 * index}" for index in range(100)]
    (piece,) = advice_of("\n".join(lines), "elements")
    assert piece.of_step_percent == pytest.approx(100 * (99 * 90 + 15) / 10_000 * 0.99, rel=0.01)


def test_modules_in_a_loop_over_elements_are_part_of_it() -> None:
    """The bound of a recurrence by hand was 32 % without its linear layers, where a layer of torch saved 69 %."""
    lines = ["step s 0-10000", "forward Net 0-9900", "module net 0-9900 type=Net"]
    for index in range(60):
        begin = 100 + 100 * index
        lines.append(f"module net.cell {begin}-{begin + 60} type=Linear")
        lines += [f"op aten::tanh {begin + 65 + 15 * place}-{begin + 75 + 15 * place}" for place in (0, 1)]
    (piece,) = advice_of("\n".join(lines), "elements")
    assert piece.of_step_percent == pytest.approx(100 * (59 * 100 + 25) / 10_000 * (1 - 1 / 120), rel=0.02)


def test_a_loop_over_elements_is_reported_with_its_python_code_and_its_gradients() -> None:
    (piece,) = advice_of(element_loop("select", "sub", "pow"), "elements")
    assert piece.at_most
    assert piece.of_step_percent == pytest.approx(100 * 300 * (5 + 5 + 8 + 2) / 10_000, rel=0.03)
    assert "300 operators on small tensors, 5 µs each" in piece.what
    (piece,) = advice_of(element_loop("select", "sub", "pow", "sum", backward=False), "elements")
    assert piece.of_step_percent == pytest.approx(40, rel=0.03)


@pytest.mark.parametrize(
    "step",
    [
        element_loop("select", "sub", "pow", passes=40),
        element_loop("select", "sub", "item"),  # `synchronisations` has it
        element_loop("add_", "mul_"),  # an update by hand, which `optimizer` has
        element_loop("select", "view"),
        element_loop("select", "sub", backward=False).replace("0-10000", "0-60000"),
        PLAIN,
    ],
    ids=["few", "reads", "in place", "views alone", "little of the step", "no loop"],
)
def test_other_loops_are_no_loops_over_elements(step: str) -> None:
    assert advice_of(step, "elements") == []


@pytest.mark.parametrize(
    ("step_ns", "expected"), [(200.0, [100.0, 25.0, 75.0, 25.0]), (50.0, [50.0, 12.5, 37.5, 12.5])]
)
def test_calls_that_exceed_their_step_are_scaled_to_it_once(step_ns: float, expected: list[float]) -> None:
    """On a busy machine phases were seen to take longer than the step; they were scaled by the square of the share."""

    def call(ns: float) -> HostCall:
        return HostCall("1", None, Level.OP, "op", "aten::a", None, None, None, None, 0, 1, ns, ns, None, None)

    step, forward, backward, inner = call(100.0), call(100.0), call(300.0), call(100.0)
    step.children, backward.children = [forward, backward], [inner]
    _limit_to_step(step, step_ns)
    assert [each.ns for each in (step, forward, backward, inner)] == pytest.approx(expected)


def test_a_step_that_computes_with_doubles_throughout_is_reported() -> None:
    (piece,) = advice_of(PLAIN.replace("dtype=float", "dtype=double"), "casts")
    assert "double precision throughout" in piece.what
    assert piece.changes_numbers is not None


def test_time_between_steps_is_reported_from_a_sixth_of_an_iteration() -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]

    def between_advice(before_ns: float, data_ns: float) -> list[Advice]:
        loop = [
            {
                "step": index,
                "dur_ns": 10_000_000,
                "before_ns": before_ns,
                "data_ns": data_ns,
                "rung": Level.OP if index < 3 else BARE,
            }
            for index in range(20)
        ]
        return list(advise.of(with_loop(trace_of(rows), loop), only=["between"]).advice)

    (piece,) = between_advice(6_000_000.0, 1_000_000.0)
    assert (piece.gain.value, piece.at_most) == (pytest.approx(5.0), True)
    assert between_advice(6_000_000.0, 5_900_000.0) == []
    assert between_advice(1_000_000.0, 0.0) == []
    rows = [row for number in range(3) for row in spans(PLAIN + "backward backward 9900-9950", step=number)]
    (piece,) = between_advice(6_000_000.0, 0.0)
    assert "_foreach_" in piece.do


ANEW, KEPT = '{"workers": 2, "persistent": false}', '{"workers": 2, "persistent": true}'


@pytest.mark.parametrize(
    ("attributes", "usual_ns", "do", "trial"),
    [
        (None, 1e4, "num_workers=2", "num_workers=2"),
        (ANEW, 1e4, "persistent_workers=True, if these are the first batches", None),
        (ANEW, 8e6, "sample; persistent_workers=True, if the 5.26 ms of slow iterations are the first batches", None),
        (KEPT, 1e4, "give the loader more workers, or less work for each sample", None),
    ],
)
def test_a_loader_that_has_workers_is_not_advised_to_have_some(
    attributes: str | None, usual_ns: float, do: str, trial: str | None
) -> None:
    text = PLAIN.replace("step s 0-10000", "step s 0-10000\ndata DataLoader 1-9")
    rows = [
        row._replace(attributes=attributes) if row.kind == "data" else row
        for number in range(3)
        for row in spans(text, step=number)
    ]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": wait_ns + 1e5, "data_ns": wait_ns, "rung": Level.OP if index < 3
         else BARE}
        for index in range(60)
        for wait_ns in [usual_ns + 30e6 if index % 6 == 5 else usual_ns]
    ]  # fmt: skip
    (piece,) = advise.of(with_loop(trace_of(rows), loop), only=["data"]).advice
    assert piece.do.startswith(do) or do in piece.do
    assert ("persistent_workers" in piece.do) is (attributes != KEPT)
    assert piece.trial == trial


def test_a_batch_that_is_made_in_less_time_than_workers_hand_one_over_is_indexed_at_once() -> None:
    """Two workers made a loop with waits of 0.23 ms three times as slow."""
    text = PLAIN.replace("step s 0-10000", "step s 0-10000\ndata DataLoader 1-9")
    rows = [row for number in range(3) for row in spans(text, step=number)]
    loop = [
        {"step": index, "dur_ns": 1e6, "before_ns": 3e5, "data_ns": 3e5, "rung": Level.OP if index < 3 else BARE}
        for index in range(60)
    ]
    (piece,) = advise.of(with_loop(trace_of(rows), loop), only=["data"]).advice
    assert piece.do.startswith("make a whole batch at once")
    assert (piece.trial, piece.gain.value) == (None, pytest.approx(0.3))


@pytest.mark.parametrize("question", ["between", "data"])
def test_a_row_of_the_loop_that_represents_many_steps_counts_as_many(question: str) -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    waits = {"data_ns": 1e6} if question == "data" else {}
    single_rows = [{"step": index, "dur_ns": 1e7, "rung": Level.OP if index < 3 else BARE} for index in range(23)]
    long_row = {"steps": 100, "dur_ns": 1e7, "before_ns": 10e6, **dict.fromkeys(waits, 10e6)}
    merged_rows = [{"step": 23 + 100 * index, **long_row} for index in range(10)]
    loop = [{**entry, "before_ns": 1e6, **waits} for entry in single_rows] + merged_rows
    (piece,) = advise.of(with_loop(trace_of(rows), loop), only=[question]).advice
    assert piece.gain.value == pytest.approx((20 * 1 + 1000 * 10) / 1020)
    assert piece.gain.low <= piece.gain.value <= piece.gain.high
    assert piece.why[0] == "1020 iterations that ran without recording"


@pytest.mark.parametrize(
    ("dtype", "isa", "expected"),
    [
        ("c10::Half", ["avx2", "avx512f", "avx512_bf16"], 1),
        ("c10::Half", ["avx2", "amx_fp16"], 0),
        ("c10::BFloat16", ["avx2"], 1),
        ("c10::BFloat16", ["avx2", "avx512_bf16"], 0),
        ("float", ["avx2"], 0),
    ],
)
def test_16_bit_work_is_reported_if_the_processor_lacks_instructions(dtype: str, isa: list[str], expected: int) -> None:
    report = advice_of(PLAIN.replace("dtype=float", f"dtype={dtype}"), "half-precision", machine={"isa": isa})
    assert len(report) == expected
    for piece in report:
        assert (piece.trial, piece.gain_known, piece.at_most) == ("float32", True, True)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_16_bit_work_inside_operators_of_another_type_or_of_none_counts(phase: str) -> None:
    """Autocast casts inside operators that get float32, and nodes of the backward pass have no type."""
    outer = "op AddmmBackward0 1000-4000" if phase == "backward" else "op aten::linear 1000-4000 dtype=float"
    text = inside(outer, "op aten::to 1000-1500 dtype=float", "op aten::addmm 1500-4000 dtype=c10::BFloat16")
    (piece,) = advice_of(text, "half-precision", machine={"isa": ["avx2"]})
    assert piece.what.startswith("1 operators compute in bfloat16")
    assert piece.gain.value == pytest.approx(2.5)
    assert advice_of(text, "half-precision", machine={"isa": ["avx512_bf16"]}) == []


def test_a_run_without_the_instruction_set_leaves_the_question_unanswered() -> None:
    rows = [row for number in range(3) for row in spans(PLAIN.replace("dtype=float", "dtype=c10::Half"), step=number)]
    report = advise.of(trace_of(rows), max_needs=Needs.TRACE)
    assert "does not have the processor" in report.unanswered["half-precision"]


@pytest.mark.parametrize(
    ("calls", "do"),
    [
        ("gc.collect", "leave it out: memory is reused without it: train.py:9"),
        ("torch.save, ema.state_dict", "write it less often, or a copy of it in another thread: train.py:9"),
        ("self.log_metrics", "report less often"),
        ("copy.deepcopy", "copy the state less often"),
        ("ema.load_state_dict", "copy the state less often"),
        ("make_batch", "prepare the next batch in the background"),
        ("F.log_softmax", "make train.py:9 take less time"),
        ("model, torch.randn, nms", "make train.py:9 take less time"),
        ("f.seek, json.dump, f.flush", "write it less often"),
        ("metrics.items", "make train.py:9 take less time"),
        ("", "make train.py:9 take less time"),
    ],
)
def test_what_to_do_between_steps_follows_from_the_line_that_takes_most(calls: str, do: str) -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": 6e6, "rung": Level.OP if index < 3 else BARE} for index in range(20)
    ]
    lines = [
        {"file": "train.py", "line": 9, "function": "main", "calls": calls, "ns": 15_000_000, "gaps": 3},
        {"file": "train.py", "line": 7, "function": "main", "calls": "", "ns": 1_000_000, "gaps": 3},
    ]
    run = {"between": {"gaps": 3, "ns": 16_000_000, "lines": lines}}
    report = advise.of(with_loop(trace_of(rows, run=run), loop), only=["between"])
    (piece,) = report.advice
    assert any("5 of 6 ms at train.py:9" in why for why in piece.why), piece.why
    assert piece.do.startswith(do)
    assert not any("train.py:7" in why for why in piece.why)


@pytest.mark.parametrize(
    ("inner", "place", "do"),
    [
        ({"line": 31, "calls": "copy.deepcopy", "ns": 9_000_000}, "train.py:31 (called in line 9)", "copy the state"),
        ({"line": 31, "calls": "f", "ns": 9_000_000}, "train.py:31 (called in line 9)", "report less often"),
        ({"file": "kept.py", "line": 3, "ns": 9_000_000}, "kept.py:3 (called in train.py:9)", "report less often"),
        ({"line": 31, "calls": "copy.deepcopy", "ns": 1_000_000}, "train.py:9", "report less often"),
    ],
)
def test_the_line_inside_a_function_is_the_place_and_says_what_to_do(
    inner: dict[str, Any], place: str, do: str
) -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": 6e6, "rung": Level.OP if index < 3 else BARE} for index in range(20)
    ]
    within = {"file": "train.py", "calls": "", **inner}
    line = {"file": "train.py", "line": 9, "function": "main", "calls": "self.log", "ns": 15_000_000, "gaps": 3}
    run = {"between": {"gaps": 3, "ns": 15_000_000, "lines": [{**line, "within": within}]}}
    (piece,) = advise.of(with_loop(trace_of(rows, run=run), loop), only=["between"]).advice
    assert f"5 of 6 ms at {place}" in piece.why[-1]
    assert piece.do.startswith(do)
    assert piece.do.endswith(place)


def test_a_line_takes_no_more_than_the_time_between_steps_that_it_is_a_part_of() -> None:
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": 6e6, "rung": Level.OP if index < 3 else BARE} for index in range(20)
    ]
    line = {"file": "train.py", "line": 9, "function": "main", "calls": "", "ns": 36_000_000, "gaps": 3}
    other = {"file": "train.py", "line": 7, "function": "main", "calls": "", "ns": 3_000_000, "gaps": 3}
    run = {"between": {"gaps": 3, "ns": 39_000_000, "lines": [line, other]}}
    (piece,) = advise.of(with_loop(trace_of(rows, run=run), loop), only=["between"]).advice
    assert any("12 of 13 ms at train.py:9" in why for why in piece.why), piece.why


@pytest.mark.parametrize(
    ("second", "place", "passes"), [(12, "train.py:10-12", 500), (12, "train.py:10-12", 1), (40, None, 1)]
)
def test_lines_near_each_other_count_together_and_are_a_loop_if_they_run_many_times(
    second: int, place: str | None, passes: int
) -> None:
    """A loop of Python over predictions alternates between two lines, and two metrics follow each other: neither line
    has half of the time between steps."""
    rows = [row for number in range(3) for row in spans(f"before b 0-6000\n{PLAIN}", step=number)]
    rows = [row._replace(start_ns=row.start_ns + (6_000_000 if row.kind != "before" else 0)) for row in rows]
    loop = [
        {"step": index, "dur_ns": 1e7, "before_ns": 6e6, "rung": Level.OP if index < 3 else BARE} for index in range(20)
    ]
    share = {10: ("zip, f1_score", 0.42), second: ("", 0.48), 9: ("out.argmax", 0.06), 7: ("", 0.04)}
    lines = [
        {"file": "train.py", "line": line, "calls": calls, "ns": round(of * 72e6), "gaps": 3, "passes": 3 * passes}
        for line, (calls, of) in share.items()
    ]
    trace = with_loop(trace_of(rows, run={"between": {"gaps": 3, "ns": 72_000_000, "lines": lines}}), loop)
    (piece,) = advise.of(trace, only=["between"]).advice
    main = account.of(trace).main
    assert main is not None
    entry = main.host["between steps"]
    assert entry is not None
    assert entry.ms == pytest.approx(6.0)
    if place is None:
        assert "train.py" not in f"{piece.do} {piece.why}"
        assert (entry.place, entry.place_ms) == (f"train.py:{second}", pytest.approx(0.48 * 6))
        return
    is_loop = passes > 1
    assert piece.do.startswith(
        f"compute with operators on whole tensors or arrays instead of the loop at {place}" if is_loop
        else f"make {place} take less time"
    )  # fmt: skip
    assert f"21.6 of 24 ms at {place}" in piece.why[-1]
    # traced lines took four times as long as the time between steps usually does
    assert (entry.place, entry.place_ms) == (f"{place}, zip, f1_score", pytest.approx(0.9 * 6))


def test_lines_without_time_are_no_place() -> None:
    line = {"file": "train.py", "line": 9, "function": "main", "calls": "", "ns": 0, "gaps": 3}
    assert main_lines(Between.of({"gaps": 3, "ns": 0, "lines": [line]})) is None


class _NotSearched(list[HostCall]):
    """Calls that refuse linear searches and slices, since there may be a hundred thousand."""

    def __contains__(self, call: object) -> bool:
        raise AssertionError("searched")

    def __getitem__(self, place: Any) -> Any:
        assert not isinstance(place, slice)
        return super().__getitem__(place)


def test_long_loops_take_time_in_proportion_to_their_length() -> None:
    def call(name: str, index: int, shapes: list[object]) -> HostCall:
        return HostCall(
            str(index), None, Level.OP, "op", name, None, None, None, None, 1000 * index, 1000 * index + 900,
            900.0, 900.0, None, json.dumps(shapes),
        )  # fmt: skip

    reads = [call("aten::item", index, []) for index in range(9)]
    outer = call("step", 0, [])
    outer.children = reads
    assert _with_indexing(outer, _NotSearched(reads), False) == (reads, pytest.approx(8 * 0.0001))
    call_list = [call("aten::mul", 1, [[64, 1], [1, 64]]), call("aten::sum", 2, [[64, 64]])]
    assert _sum_chain(_NotSearched(call_list), 0) == call_list
    assert _sum_chain(_NotSearched(call_list), 1) == []


def test_double_precision_throughout_is_reported_though_backward_nodes_have_no_type() -> None:
    step = """
        step s 0-10000
        forward Net 10-4000
        op aten::addmm 20-3990 dtype=double
        backward loss 4010-9900
        op autograd::engine::evaluate_function 4020-9890
        op AddmmBackward0 4030-9880
        op aten::mm 4040-9870 dtype=double
    """
    (piece,) = advice_of(step, "casts")
    assert piece.what.startswith("double precision throughout: ")
    assert piece.trial == "float32"


def test_the_calls_of_a_step_are_put_in_order_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []
    walk = calls.HostCall.walk

    def counted(call: calls.HostCall) -> Iterator[calls.HostCall]:
        if call.kind == "step" and sys._getframe(1).f_globals["__name__"] == calls.__name__:
            walked.append(call)
        return walk(call)

    monkeypatch.setattr(calls.HostCall, "walk", counted)
    rows = [row for number in range(3) for row in spans(PLAIN, step=number)]
    assert len(advise.of(trace_of(rows), max_needs=Needs.TRACE).answered) > 20
    assert len(walked) == 1
