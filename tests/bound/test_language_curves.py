"""Curves of language models: planted coefficients are found, holes are none, ceilings are those computed by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from xsp.bench.environment import Environment
from xsp.bench.plan import overheads, specs
from xsp.bench.spec import Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.bound import experts, language, languagetext, polynomials
from xsp.bound.experts import Active, Stack
from xsp.cli import main
from xsp.device import ceilings
from xsp.device.ceilings import Ceiling
from xsp.device.machine import cpu_model
from xsp.errors import ModelError, UsageError
from xsp.graph import sources, work
from xsp.graph.node import Call, Graph, Node, NodeKind, Tensor

HERE = Environment({"cpu": "a cpu", "cores": 2, "torch": "2"})
CPU = Ceiling("a cpu", {"fp32": 1e10}, {}, 1e9, "measured")
LENGTHS = (16, 32, 48, 64)
GPT2 = "transformers:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64"
MIXTRAL = (
    "transformers:mixtral?num_hidden_layers=1&hidden_size=32&intermediate_size=64&num_attention_heads=4"
    "&num_key_value_heads=2&head_dim=8&vocab_size=64"
)
MISTRAL = MIXTRAL.replace("mixtral", "mistral") + "&sliding_window=32"

# --- polynomials ----------------------------------------------------------------------------------------------


def test_planted_coefficients_are_found() -> None:
    at = (64, 128, 256, 512)
    found = polynomials.fit(at, [5000 + 20 * n + 0.3 * n * n for n in at], [1.0] * 4, 2)
    assert found.coefficients == pytest.approx((5000, 20, 0.3), rel=1e-6)
    assert found.at(1024) == pytest.approx(5000 + 20 * 1024 + 0.3 * 1024**2)


def test_no_coefficient_is_negative() -> None:
    found = polynomials.fit((1, 2, 3, 4), [10.0, 9.0, 8.0, 7.0], [1.0] * 4, 2)
    assert min(found.coefficients) >= 0
    assert polynomials.fit((1, 2, 3), [0.0, 0.0, 0.0], [0.0] * 3, 1).at(5) == 0
    with pytest.raises(ValueError, match="degree 2"):
        polynomials.fit((1, 2), [1.0, 2.0], [0.1, 0.1], 2)


def test_the_interval_holds_the_planted_value_nearly_always() -> None:
    at, drawn, held = (64, 128, 256, 512), random.Random(1), 0
    for _ in range(200):
        noisy = [(9000 + 30 * n) * (1 + drawn.gauss(0, 0.03)) for n in at]
        found = polynomials.fit(at, noisy, [0.06 * each for each in noisy], 1)
        held += abs(found.at(1024) - (9000 + 30 * 1024)) <= found.half(1024)
    assert held >= 180


def test_one_curve_is_above_another_from_where_they_cross() -> None:
    rising = polynomials.fit((1, 2, 3), [2.0, 4.0, 6.0], [0.1] * 3, 1)
    found = polynomials.crossing(rising, polynomials.constant(100, 10))
    assert found is not None
    assert found.n == pytest.approx(50, rel=1e-3)
    assert found.low < 50 < found.high
    assert polynomials.crossing(polynomials.ZERO, polynomials.constant(1, 0)) is None


# --- experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 2), (4, 8 * (1 - 0.75**4)), (10_000, 8)])
def test_distinct_experts_are_those_of_the_formula(tokens, expected) -> None:
    assert experts.distinct(8, 2, tokens) == pytest.approx(expected)


def test_distinct_experts_are_those_of_a_drawn_routing() -> None:
    drawn = random.Random(0)
    seen = [len({each for _ in range(6) for each in drawn.sample(range(16), 3)}) for _ in range(2000)]
    assert experts.distinct(16, 3, 6) == pytest.approx(sum(seen) / len(seen), rel=0.02)


def test_a_skew_needs_fewer_experts_and_one_token_always_as_many_as_it_chooses() -> None:
    found = [experts.distinct(64, 8, 16, skew) for skew in (0.0, 0.5, 1.0, 2.0)]
    assert found == sorted(found, reverse=True)
    assert experts.distinct(64, 8, 1, 2.0) == pytest.approx(8)
    assert experts.distinct(4, 4, 3) == 4


@pytest.mark.parametrize("skew", [500.0, 2000.0, 1e308])
@pytest.mark.parametrize(("chosen", "expected"), [(2, 2), (1, 1), (2.5, 2 + (1 - 0.5**10))])
def test_with_a_large_skew_all_tokens_choose_the_same_experts(skew: float, chosen: float, expected: float) -> None:
    assert experts.distinct(8, chosen, 10, skew) == pytest.approx(expected)


def test_a_product_of_groups_reads_the_matrices_that_rows_are_routed_to() -> None:
    stack, rows = Tensor("float32", (8, 32, 64)), Tensor("float32", (1, 32))
    call = Call("aten::_grouped_mm", (("self", rows), ("mat2", stack)), (Tensor("float32", (1, 64)),))
    assert work.bytes_of(Node(call, "", NodeKind.COMPUTE)) == 32 * 64 * 4 + 32 * 4 + 64 * 4


def test_the_groups_of_a_timed_product_end_with_all_rows() -> None:
    pytest.importorskip("torch")
    from xsp.bench import inputs

    rows, ends = Tensor("float32", (6, 4)), Tensor("int32", (4,))
    call = Call("aten::_grouped_mm", (("self", rows), ("mat2", Tensor("float32", (4, 4, 4))), ("offs", ends)))
    (made,) = inputs.Values().storage([ends], inputs.rule(call, "offs", 0))
    assert made.tolist() == [1, 3, 4, 6]


def test_decoding_is_compute_bound_from_the_batch_that_is_computed_by_hand() -> None:
    graph = type("Graph", (), {"settings": {"dtype": "float32"}})()
    dense = Active(1_000_000, (), 10_000, 0)
    # 1e6 + b * 1e4 bytes at 1e9 B/s against b * 1e6 FLOPs at 1e10 FLOP/s: b * (100 - 10) us >= 1000 us
    assert experts.compute_bound(dense, work.Total(1_000_000, 0), 1, graph, CPU) == 12
    assert experts.compute_bound(replace(dense, state=200_000), work.Total(1_000_000, 0), 1, graph, CPU) is None
    assert experts.compute_bound(dense, work.Total(1_000_000, 1), 1, graph, CPU) is None
    routed = Active(0, (Stack(8, 2, 1_000_000),), 0, 0)
    assert routed.weights(1) == pytest.approx(250_000)
    assert experts.compute_bound(routed, work.Total(1_000_000, 0), 1, graph, CPU) == 10  # 9 need 925 kB, 10 need 944 kB


# --- curves of models -----------------------------------------------------------------------------------------


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timings:
    """Timings of no call yet, and ceilings of this machine."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(language, "graphs", SimpleNamespace(of=captured_once))
    ceilings.store({cpu_model() or "cpu": CPU})
    return Timings.open(tmp_path / "timings", HERE)


def timed(spec, ns: float) -> Timing:
    figures = {"trimmed_ns": ns, "low_ns": ns * 0.99, "high_ns": ns * 1.01, "samples": 9, "taken_ns": 1}
    return replace(untimed(spec), status=Status.OK, environment=HERE.hash, **figures)


def keys_of(call: Call) -> int:
    """Return the number of tokens that an attention or a concatenation is over; 0 of other calls."""
    if call.op == "aten::scaled_dot_product_attention":
        return call.inputs[1].shape[2]
    return call.outputs[0].shape[2] if call.op == "aten::cat" and len(call.outputs[0].shape) == 4 else 0


@cache
def captured(spec: str, phase: str, n: int, batch: int, seed: int) -> Graph:
    return sources.of(spec, batch=batch, seed=seed, **{phase: n})


def captured_once(spec: str, *, batch: int, seed: int, **phased: int) -> Graph:
    """Return the graph of a step; nine of them make a curve, and the tests ask for the same ones again."""
    ((phase, n),) = phased.items()
    return captured(spec, phase, n, batch, seed)


def plant(known: Timings, spec: str, lengths=LENGTHS, *, but: str = "") -> None:
    """Give all calls 1 us; attention of decoding 10 ns a token, of reading 2 ns a pair; calls of reading 5 ns a row."""
    planted = [timed(each, 0.0) for each in overheads(1)]
    for phase in ("decode", "prefill"):
        for n in lengths:
            for each, _ in specs(captured(spec, phase, n, 1, 0), threads=1):
                call = each.block.calls[0]
                attends = call.op == "aten::scaled_dot_product_attention"
                if call.op == but:
                    continue
                ns = 1000.0
                if phase == "decode":
                    ns += 10 * keys_of(call) if attends else 0
                elif attends:
                    ns += 2 * n * n
                elif call.op == "aten::addmm":
                    ns += 5 * n
                planted.append(timed(each, ns))
    known.add(planted)


@pytest.mark.slow
def test_curves_have_the_coefficients_that_were_planted(known) -> None:
    plant(known, GPT2)
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    calls = len(found.decode.points[0].graph.computing)
    assert found.decode.total.coefficients[:2] == pytest.approx((1000 * calls, 20), rel=1e-3)
    assert found.decode.total.at(128) == pytest.approx(1000 * calls + 20 * 128, rel=1e-3)
    reading = found.prefill
    addmm = sum(node.call.op == "aten::addmm" for node in reading.points[0].graph.computing)
    assert reading.attention.coefficients[2] == pytest.approx(4, rel=1e-2)
    assert reading.non_attention.coefficients[1] == pytest.approx(5 * addmm, rel=1e-2)
    truth = 1000 * len(reading.points[0].graph.computing) + 5 * addmm * 128 + 4 * 128**2
    assert reading.total.at(128) == pytest.approx(truth, rel=1e-2)
    assert found.framework == ""


@pytest.mark.slow
def test_attention_overtakes_where_the_planted_curves_cross(known) -> None:
    plant(known, GPT2)
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    constant = 1000 * (found.decode.calls - 6)  # two layers write keys and values, and attend
    assert found.decode.attention_crossing.n == pytest.approx((constant - 6000) / 20, rel=0.02)


def test_calls_that_do_not_depend_on_the_length_are_timed_once(known) -> None:
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    assert found.decode.calls - found.decode.shared_calls == 6  # of each layer keys, values and attention
    one = len({spec.key for spec, _ in specs(found.decode.points[0].graph, threads=1)})
    assert found.decode.distinct_calls <= one + 2 * (len(LENGTHS) - 1)


def test_without_timings_there_are_ceilings_and_no_figure_is_zero(known) -> None:
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    assert found.decode.total is None
    assert found.decode.reason == "no call is timed"
    assert [each.ns for each in found.decode.points] == [None] * 4
    assert all(each.ceiling_ns > 0 for each in found.decode.points)
    told = languagetext.as_json(found)
    assert told["decode"]["coefficients_ns"] is None
    assert told["decode"]["points"][0]["ns"] is None


def test_below_95_percent_there_is_no_curve_but_a_reason(known) -> None:
    plant(known, GPT2, but="aten::addmm")
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    assert found.decode.total is None
    assert "timings are known for" in found.decode.reason
    partial = language.of(GPT2, LENGTHS, timings=known, threads=1, partial=True)
    assert partial.decode.total is not None
    assert partial.decode.omitted_calls > 0
    assert "≥" in languagetext.page(partial, GPT2)


@pytest.mark.slow
def test_a_window_that_slides_within_the_range_makes_no_curve(known) -> None:
    plant(known, MISTRAL)
    found = language.of(MISTRAL, LENGTHS, timings=known, threads=1)
    assert found.decode.total is None
    assert "window" in found.decode.reason or "different operators" in found.decode.reason
    assert found.cache_crossing is None
    below = language.of(MISTRAL, (8, 16, 24), timings=known, threads=1)
    assert below.cache_crossing is not None


@pytest.mark.slow
def test_of_experts_the_expected_share_is_active(known) -> None:
    found = language.of(MIXTRAL, LENGTHS, timings=known, threads=1, batch=2)
    active = found.decode.points[0].active
    assert {(each.experts, each.per_token) for each in active.stacks} == {(8, 2)}
    each = 3 * 32 * 64 * 4  # gate, up and down of one expert
    assert sum(stack.bytes for stack in active.stacks) == 8 * each
    assert active.weights(2) - active.dense == pytest.approx(each * 8 * (1 - 0.75**2))
    reading = found.prefill.points[0].active
    assert {stack.per_token for stack in reading.stacks} == {2}
    assert "each token chooses 2 of 8 experts, 3.5 distinct" in " ".join(languagetext.page(found, MIXTRAL).split())


def test_the_cache_and_the_weights_have_the_bytes_that_are_counted_by_hand(known) -> None:
    found = language.of(GPT2, LENGTHS, timings=known, threads=1)
    active = found.decode.points[0].active
    assert active.state == 2 * 2 * 15 * 32 * 4
    width = 32
    of_layer = 4 * width + 3 * width * width + 3 * width + width * width + width + 8 * width * width + 5 * width
    everything = 64 * width + width + 2 * of_layer + 2 * width  # the table is the head too; of positions one row
    assert active.dense == 4 * everything


@pytest.mark.parametrize(
    ("lengths", "found"), [((64, 512), (64, 128, 256, 512)), ((8, 16, 24), (8, 16, 24)), ((2, 4), (2, 3, 4))]
)
def test_four_lengths_lie_between_two(lengths, found) -> None:
    assert language.spaced_lengths(lengths) == found


@pytest.mark.parametrize("lengths", [(8,), (8, 8), (1, 64), (2, 3)])
def test_lengths_that_make_no_curve_are_refused(lengths) -> None:
    with pytest.raises(UsageError, match="64:1024"):
        language.spaced_lengths(lengths)


@pytest.mark.slow
def test_the_command_shows_curves_within_80_columns_and_as_json(known, capsys, tmp_path) -> None:
    plant(known, GPT2)
    command = ["bound", GPT2, "--decode", "16:64", "--timings", str(tmp_path / "timings")]
    assert main([*command, "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if GPT2 not in line) <= 80
    assert "first token" in shown
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert main([*command, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["tokens"] for each in told["decode"]["points"]] == [16, 25, 40, 64]
    assert main(["bound", GPT2, "--decode", "16:64", "--train"]) == 2
    for more in (["--sequence", "64"], ["--size", "n=3"]):
        capsys.readouterr()
        assert main(["bound", GPT2, "--decode", "16:64", *more]) == 2
        assert f"{more[0]}: cannot be used with the curves" in capsys.readouterr().err
    assert main([*command, "--batch", "2", "--threads", "1"]) == 0
    assert f"--batch 2 --decode 16:64 --threads 1 --timings {tmp_path / 'timings'} --fill" in capsys.readouterr().out
    assert main(["bound", GPT2, "--decode", "16", "--measure", "1s"]) == 2


@pytest.mark.slow
def test_steps_are_measured_in_turns_and_the_threads_of_torch_are_as_before(known) -> None:
    import torch

    before = torch.get_num_threads()
    found = language.of(GPT2, (4, 8, 12), timings=known, threads=1, measure=0.01)
    assert torch.get_num_threads() == before
    steps = [each.measured for curve in found.curves for each in curve.points]
    assert all(each is not None and len(each.rounds) >= 5 and each.ns > 0 for each in steps)
    assert "Measured steps" in languagetext.page(found, GPT2)
    drawn = [series.name for part in languagetext.section(found).parts for series in getattr(part, "series", ())]
    assert "measured" in drawn


def test_a_model_that_generates_no_text_has_no_curves(known) -> None:
    with pytest.raises(ModelError, match="not a causal language model"):
        language.of("transformers:vit", timings=known)


@pytest.mark.slow
def test_the_curves_of_a_language_model_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import standin

    standin.install(tmp_path / "site", monkeypatch)
    folder = tmp_path / "timings"
    model = "transformers:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=64"
    options = {"device": "standin:0", "timings": folder}
    with pytest.raises(UsageError, match="--measure and --threads are of the processor: omit them, or --device"):
        language.of(model, (8, 32), measure=5.0, **options)
    found = language.of(model, (8, 32), fill=60.0, **options)
    assert found.settings["device"] == standin.PRODUCT
    assert all(point.ns is not None and point.coverage.is_complete for point in found.decode.points)
    calls = len(found.decode.points[0].graph.computing)
    assert found.decode.points[0].ns >= calls * standin.LAUNCH_NS
    assert found.ceilings.name == standin.PRODUCT
    page = languagetext.page(found, model, "--decode 8:32 --device standin:0")
    assert f"timings of {standin.PRODUCT}" in page
    assert "--measure" not in page
