"""Who is whose child, and by which evidence. Times in µs; indentation on the left is time, on the right parents."""

from __future__ import annotations

import json
import random
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xsp.correlate import parents
from xsp.correlate.arrays import Spans
from xsp.correlate.evidence import TOLERANCE_NS, correlate
from xsp.schema import Kind, Level, Rule, Span
from xsp.testing import spans, tree


def draw(text: str) -> str:
    """Correlate in an order that says nothing, and draw."""
    found = spans(text)
    random.Random(1).shuffle(found)
    return tree(found)


def by_name(text: str) -> dict[str, Span]:
    return {span.name: span for span in correlate(spans(text))}


def expect(text: str) -> str:
    return dedent(text).strip("\n")


# --- containment ------------------------------------------------------------------------------------------


def test_modules_nest_and_ops_belong_to_the_innermost_module() -> None:
    assert draw("""
        step train          0-100
        forward Net         10-90
        module net          10-90
        module net.a        20-40
        op aten::linear     21-39
        op aten::addmm      25-35
        module net.b        50-80
        op aten::relu       55-60
        op aten::add        82-85
        op aten::zero_      92-95
    """) == expect("""
        step train
          forward Net
            module net
              module net.a
                op aten::linear
                  op aten::addmm
              module net.b
                op aten::relu
              op aten::add
          op aten::zero_
    """)


def test_a_module_called_twice_and_one_that_calls_itself_have_keys_of_their_own() -> None:
    step = """
        step s       0-100
        module net   0-100
        module net.a 10-20
        module net.a 30-60
        module net.a 40-50
    """
    rows = correlate(spans(step))
    assert [(row.name, row.layer_index) for row in rows if row.level == Level.LAYER] == [
        ("net", 0), ("net.a", 1), ("net.a", 2), ("net.a", 3),
    ]  # fmt: skip
    assert rows[4].parent_id == rows[3].span_id
    assert len({row.key for row in rows}) == len(rows)


def test_equal_intervals_nest_by_level_and_modules_by_depth() -> None:
    # A module's call is reported when it ends, so the inner one comes first.
    inner, outer = spans("module net.0 10-20 depth=1\nmodule net 10-20 depth=0")
    rows = correlate([inner, outer, *spans("op aten::mm 10-20\nforward Net 10-20\nstep s 10-20")])
    assert [row.name for row in rows] == ["s", "Net", "net", "net.0", "aten::mm"]
    assert [row.parent_id for row in rows[1:]] == [row.span_id for row in rows[:-1]]


def test_a_user_span_stands_between_the_step_and_the_forward_pass_in_it() -> None:
    assert draw("""
        step s       0-100 span_id=aa
        user predict 5-95  span_id=bb parent_id=aa
        forward Net  10-90
    """) == expect("""
        step s
          user predict
            forward Net
    """)


@pytest.mark.parametrize("modules", ["", "module net 10-90\nmodule net.a 20-40\n"])
def test_a_user_span_in_a_module_is_found_in_it_and_has_the_same_key_without_it(modules: str) -> None:
    step = "step s 0-100 span_id=aa\nforward Net 10-90\nuser head 50-70 span_id=bb parent_id=aa\n"
    without, rows = by_name(step), by_name(modules + step)
    assert rows["head"].parent_id == rows["net" if modules else "s"].span_id
    assert rows["head"].key == without["head"].key


def test_a_model_span_of_another_thread_belongs_to_the_step_and_deeper_ones_are_orphans() -> None:
    rows = by_name("""
        step s       0-100
        forward Net  10-90 thread=2
        module net   10-90 thread=2
        op aten::mm  20-30 thread=3
    """)
    assert (rows["Net"].parent_id, rows["Net"].parent_rule) == (rows["s"].span_id, Rule.EXPLICIT)
    assert rows["net"].parent_id == rows["Net"].span_id
    assert (rows["aten::mm"].parent_id, rows["aten::mm"].parent_rule) == (None, None)


def test_a_user_span_around_the_step_is_its_parent_and_nothing_is_lost() -> None:
    assert draw("""
        user epoch   0-100
        step s       10-90
        forward Net  20-80
    """) == expect("""
        user epoch
          step s
            forward Net
    """)


def test_an_op_belongs_to_its_layer_although_its_clock_is_a_little_off() -> None:
    assert draw("""
        step s         0-100
        module net     10-20
        op aten::early 9.6-15
        op aten::late  15.1-20.4
    """) == expect("""
        step s
          module net
            op aten::early
            op aten::late
    """)


def test_operators_that_a_librarys_call_runs_on_its_own_thread_lie_in_it() -> None:
    rows = by_name("""
        step s                0-100
        module net            10-90
        op c10d::allgather    20-30 span_id=00000000000000aa collector=torchops
        call gloo:all_gather  35-60 thread=2 parent_id=00000000000000aa collector=torchops
        op aten::copy_        40-50 thread=2 collector=torchops
        op aten::select       42-45 thread=2 collector=torchops
        op aten::other        46-48 thread=2 collector=another
        op aten::late         70-80 thread=2 collector=torchops
    """)
    assert rows["aten::copy_"].parent_id == rows["gloo:all_gather"].span_id
    assert rows["aten::copy_"].layer_id == rows["net"].span_id
    assert rows["aten::select"].parent_id == rows["aten::copy_"].span_id
    assert rows["aten::late"].parent_id is None


# --- spans without a thread -------------------------------------------------------------------------------


def test_a_primitive_without_a_thread_belongs_to_the_one_op_that_is_under_way() -> None:
    rows = by_name("""
        step s           0-100
        module net       10-90
        op aten::conv2d  20-60
        op aten::mkldnn  25-50
        primitive conv   30-45
        op aten::relu    70-80 thread=2
    """)
    assert rows["conv"].parent_id == rows["aten::mkldnn"].span_id
    assert rows["conv"].parent_rule == Rule.CONTAINMENT


def test_a_primitive_during_two_ops_is_an_orphan_that_names_its_candidates() -> None:
    rows = by_name("""
        step s           0-100
        op aten::conv2d  20-60
        primitive conv   30-45
        op aten::matmul  10-80 thread=2
    """)
    assert (rows["conv"].parent_id, rows["conv"].parent_rule) == (None, None)
    candidates = json.loads(rows["conv"].attributes or "{}")["candidates"]
    assert sorted(candidates) == sorted(rows[name].key or "" for name in ("aten::conv2d", "aten::matmul"))


def test_a_primitive_is_found_although_its_op_begins_just_before_the_module() -> None:
    rows = by_name("""
        step s           0-100
        module net       10-90
        op aten::conv2d  9.6-60
        primitive conv   9.65-9.75
    """)
    assert rows["conv"].parent_id == rows["aten::conv2d"].span_id


def test_a_primitive_is_found_although_the_next_module_begins_just_after_it() -> None:
    rows = by_name("""
        step s           0-100
        module net.a     10-30.3
        op aten::conv2d  20-30.3
        primitive conv   29.8-30.2
        module net.b     30.4-60
    """)
    assert rows["conv"].parent_id == rows["aten::conv2d"].span_id


def test_spans_of_no_thread_alone_are_orphans_but_for_the_parts_of_the_step() -> None:
    rows = by_name("step s 0-100 thread=None\nforward Net 1-90 thread=None\nprimitive conv 30-45")
    assert (rows["Net"].parent_id, rows["conv"].parent_id) == (rows["s"].span_id, None)


def test_an_operator_around_a_shallower_span_is_a_candidate_for_what_has_no_thread() -> None:
    rows = by_name("""
        step s           0-100
        op Checkpoint    7-56
        module net       14-17
        primitive conv   25-51
    """)
    assert rows["conv"].parent_id == rows["Checkpoint"].span_id


# --- evidence that is stronger than time ------------------------------------------------------------------


def test_backward_ops_belong_to_the_layer_of_their_forward_op() -> None:
    # `aten::empty` and `aten::view` peeked number 7 before `aten::addmm` made it; AccumulateGrad has none.
    assert draw("""
        step train                      0-100
        forward Net                     0-40
        module net                      0-40
        op aten::empty                  1-1.8 sequence_nr=7
        module net.a                    2-20
        op aten::linear                 3-19  sequence_nr=7
        op aten::view                   4-5   sequence_nr=7
        op aten::addmm                  6-18  sequence_nr=7
        module net.b                    22-38
        op aten::relu                   23-37 sequence_nr=8
        backward backward               50-95
        op autograd::AddmmBackward0     70-80 sequence_nr=7 forward_thread=1 phase=backward thread=2
        op AddmmBackward0               71-79 sequence_nr=7 forward_thread=1 phase=backward thread=2
        op aten::mm                     72-78 thread=2
        op autograd::ReluBackward0      60-65 sequence_nr=8 forward_thread=1 phase=backward thread=2
        op torch::AccumulateGrad        85-90 phase=backward thread=2
    """) == expect("""
        step train
          forward Net
            module net
              op aten::empty
              module net.a
                op aten::linear
                  op aten::view
                  op aten::addmm
                op autograd::AddmmBackward0
                  op AddmmBackward0
                    op aten::mm
              module net.b
                op aten::relu
                op autograd::ReluBackward0
          backward backward
            op torch::AccumulateGrad
    """)


def test_what_runs_inside_a_backward_op_is_of_the_backward_phase() -> None:
    rows = by_name("""
        step train 0-100
        module net 0-40 phase=forward
        op aten::mm 5-10 sequence_nr=1
        op MmBackward0 60-80 sequence_nr=1 forward_thread=1 phase=backward
        op aten::t 65-70
    """)
    assert rows["aten::mm"].phase == "forward"
    assert (rows["MmBackward0"].parent_rule, rows["aten::t"].phase) == (Rule.SEQUENCE, "backward")


def test_a_kernel_takes_the_parent_of_its_launch_wherever_on_the_timeline_it_ran() -> None:
    rows = by_name("""
        step s           0-100
        module net.a     0-20
        op aten::mm      1-10
        launch cudaLaunchKernel 5-8 correlation_id=42
        module net.b     20-60
        kernel sgemm     30-50 correlation_id=42
        kernel lonely    55-58 correlation_id=43
    """)
    assert (rows["sgemm"].parent_id, rows["sgemm"].parent_rule) == (rows["aten::mm"].span_id, Rule.CORRELATION)
    assert rows["lonely"].parent_id is None


def test_a_step_keeps_the_caller_that_another_tracer_named() -> None:
    (step,) = correlate(spans("step s 0-10", parent_id="00f067aa0ba902b7"))
    assert (step.parent_id, step.parent_rule) == ("00f067aa0ba902b7", Rule.EXPLICIT)


# --- what follows from the parents ------------------------------------------------------------------------


def test_allocations_are_folded_into_all_spans_around_them_on_their_thread() -> None:
    rows = by_name("""
        step s        0-100
        module net    10-90
        module net.a  20-40
        op aten::mm   25-35
        alloc alloc   30-30 alloc_bytes=100
        alloc alloc   60-60 alloc_bytes=11
        op aten::add  50-70 thread=2
    """)
    assert {name: row.alloc_bytes for name, row in rows.items()} == {
        "s": 111, "net": 111, "net.a": 100, "aten::mm": 100,
        "aten::add": None,  # nobody saw its thread's allocations
    }  # fmt: skip


def test_where_a_device_is_used_its_memory_counts_and_the_hosts_does_not() -> None:
    rows = by_name("""
        step s           0-100
        module on_both   10-40
        alloc alloc      20-20 alloc_bytes=1000 device=0
        alloc alloc      21-21 alloc_bytes=77
        alloc alloc      22-22 alloc_bytes=500 device=1
        module on_host   50-80
        alloc alloc      60-60 alloc_bytes=33
    """)
    assert {name: row.alloc_bytes for name, row in rows.items()} == {"s": 1500, "on_both": 1500, "on_host": 0}
    assert rows["s"].attributes == '{"alloc_devices": [0, 1]}'


def test_only_the_innermost_statement_of_operations_is_kept() -> None:
    rows = by_name("""
        step s              0-100
        op aten::linear     10-90 flops=800 flops_source=shapes
        op aten::addmm      20-60 flops=800 flops_source=shapes
        op aten::mm         92-99 flops=5
    """)
    assert {row.name: (row.flops, row.flops_source) for row in rows.values() if row.kind == Kind.OP} == {
        "aten::linear": (None, None), "aten::addmm": (800, "shapes"), "aten::mm": (5, None),
    }  # fmt: skip


STEP = """
    step s              0-100
    forward Net         10-90
    module net          10-90
    module net.a        20-40
    module net.a        50-70
"""
OPS = "op aten::conv 21-39\nop aten::conv 51-69\nop aten::add 80-85\n"
PRIMITIVES = "primitive reorder 22-25\nprimitive conv 26-38\n"


@pytest.mark.parametrize("deeper", ["", OPS, OPS + PRIMITIVES])
def test_keys_are_the_same_in_each_step_whatever_deeper_levels_are_on(deeper: str) -> None:
    everything = {(row.start_ns, row.level, row.name): row.key for row in correlate(spans(STEP + OPS + PRIMITIVES))}
    later = correlate(row._replace(start_ns=row.start_ns + 10**9) for row in spans(STEP + deeper))
    assert [row.key for row in later] == [everything[row.start_ns - 10**9, row.level, row.name] for row in later]


# --- against brute force ----------------------------------------------------------------------------------

CHOICES = [Level.APPLICATION, Level.LAYER, Level.OP, Level.RUNTIME]
KINDS = {Level.APPLICATION: Kind.USER, Level.LAYER: Kind.MODULE, Level.OP: Kind.OP, Level.RUNTIME: Kind.CALL}


@st.composite
def one_thread(draw: st.DrawFn, thread: int) -> list[Span]:
    """Properly nested intervals, at least 2 µs apart: a random walk that opens and closes spans."""
    now, opened, done = 0, [], []
    for move in draw(st.lists(st.sampled_from([*CHOICES, None, None, None]), max_size=30)) + [None] * 30:
        now += draw(st.sampled_from([2_000, 3_000, 50_000]))
        if move is not None:
            opened.append((move, now))
        elif opened:
            level, start = opened.pop()
            name = f"{thread}.{start}"
            kind = KINDS[level].value
            done.append(Span(level=level, kind=kind, name=name, start_ns=start, dur_ns=now - start, thread=thread))
    return done


def brute_force(span: Span, others: list[Span]) -> str | None:
    """Return the name of the shortest span around this one on its thread that is no deeper than it.

    What a user named may be in a module, too.
    """
    deepest = Level.LAYER if span.kind == Kind.USER else span.level
    around = [
        o
        for o in others
        if o is not span and o.thread == span.thread and o.level <= deepest
        and o.start_ns <= span.start_ns and span.end_ns <= o.end_ns
    ]  # fmt: skip
    return min(around, key=lambda o: o.dur_ns).name if around else None


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(one_thread(1), one_thread(2), st.integers(-TOLERANCE_NS + 1, TOLERANCE_NS - 1), st.randoms())
def test_containment_is_what_brute_force_finds_also_with_clocks_that_differ(
    first: list[Span], second: list[Span], jitter: int, order: random.Random
) -> None:
    exact = first + second
    expected = {span.name: brute_force(span, exact) for span in exact}
    # Ops and what is below them come from one source, modules and user spans from another.
    seen = [s._replace(start_ns=s.start_ns + jitter) if s.level >= Level.OP else s for s in exact]
    order.shuffle(seen)
    rows = correlate(seen)
    names = {row.span_id: row.name for row in rows}
    assert {row.name: names.get(row.parent_id) for row in rows} == expected
    assert all((row.parent_rule == Rule.CONTAINMENT) == (row.parent_id is not None) for row in rows)
    places = {row.span_id: place for place, row in enumerate(rows)}
    assert all(places[row.parent_id] < places[row.span_id] for row in rows if row.parent_id in places)


def test_a_hundred_thousand_spans_back_to_back_look_back_together() -> None:
    count = 100_000  # one after another they would look at five thousand million
    place, zero = np.arange(count + 1), np.zeros(count + 1, np.int64)
    spans = Spans(number=place, start=place * 10, end=place * 10 + 10, level=zero + 40, max_outer_level=zero + 40,
                  process=zero, thread_index=zero, nesting=zero, identity=zero, phase=zero,
                  figure_bits=zero)  # fmt: skip
    spans.level[0] = spans.max_outer_level[0] = Level.MODEL
    spans.end[0] = 10 * count + 10
    assert parents.find(spans, 0).parent.tolist() == [-1] + [0] * count
