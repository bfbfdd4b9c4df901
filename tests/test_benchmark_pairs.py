"""The reference of the benchmarks: what pairs of processes say, and programs that read their own clock."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import unrecorded_steps
from parts import apart, lockstep, pairs
from parts.apart import Bare, Profiled, Program, Runner, Stated
from parts.pairs import Pair

from xsp.errors import XspError


def said(own_ms: float, wall_s: float = 5.0, others: float = 0.0, **kinds: tuple[int, float]) -> Bare:
    """Return what a process of 100 iterations said."""
    return Bare(
        iterations=100,
        wall_s=wall_s,
        before_s=2.0,
        loop_s=own_ms / 10,
        after_s=0.5,
        used_s=0.1,
        kinds=kinds or {"training": (100, own_ms / 10)},
        others=others,
    )


def pair_of(own_ms: float, low_ms: float, stated_ms: float, high_ms: float, others: float = 0.0) -> Pair:
    figure = (stated_ms / 1e3, low_ms / 1e3, high_ms / 1e3)
    return Pair(said(own_ms), Profiled(said(own_ms, 6.0, others), {"training": Stated(figure)}, 20.0, 1.0))


def test_a_pair_compares_what_is_stated_with_the_programs_own() -> None:
    pair = pair_of(10.0, 10.1, 10.2, 10.3)
    assert pair.ratio("training") == pytest.approx(1.02)
    assert pair.loop_ratio() == pytest.approx(1.02)
    assert not pair.covers("training")
    assert pair_of(10.0, 9.9, 10.2, 10.3).covers("training")
    assert pair.whole() == pytest.approx(1.2)
    assert pair.added_s() == pytest.approx(1.0)
    assert pair.ratio("inference") is None
    assert not pair.covers("inference")


def test_an_interval_around_another_process_shows_what_the_machine_allows() -> None:
    pair = pair_of(10.0, 9.9, 12.0, 12.1)  # the figure is wrong; around a process that took the same, it covers
    assert pair.covers_other(said(10.0), "training")
    assert not pair.covers_other(said(13.0), "training")


def test_several_kinds_have_their_own_iteration_and_add_up_to_the_loop() -> None:
    bare = said(3.0, discriminator=(60, 0.12), generator=(40, 0.18))
    stated = {"discriminator": Stated((0.002, None, None)), "generator": Stated((0.0045, None, None))}
    pair = Pair(bare, Profiled(bare, stated))
    assert bare.own_s("discriminator") == pytest.approx(0.002)
    assert pair.ratio("generator") == pytest.approx(1.0)
    assert pair.loop_ratio() == pytest.approx(1.0)
    assert Pair(bare, Profiled(bare, {"generator": stated["generator"]})).loop_ratio() is None
    assert not pair.covers("generator"), "a figure without an interval covers nothing"


def test_disturbed_pairs_are_left_out_where_enough_are_left() -> None:
    quiet, loud = pair_of(1, 1, 1, 1), pair_of(1, 1, 1, 1, others=1.0)
    assert pairs.undisturbed([loud, quiet, quiet, quiet]) == [quiet] * 3
    assert pairs.undisturbed([loud, quiet, quiet]) == [loud, quiet, quiet]


def test_a_pair_survives_its_file() -> None:
    pair = pair_of(10.0, 9.9, 10.2, 10.3)
    assert Pair.from_stored(pair.as_stored()) == pair


def test_verdicts_are_certain_only_where_the_interval_says_so() -> None:
    def verdict(*ratios: float) -> str:
        return pairs.verdict(pairs.turns.Figure(*ratios), 0.010)

    assert verdict(1.01, 1.0, 1.015) == "met"
    assert verdict(1.01, 0.9, 1.02) == "met?"
    assert verdict(1.05, 1.04, 1.06) == "missed"
    assert verdict(1.05, 1.01, 1.06) == "missed?"
    assert verdict(math.nan, math.nan, math.nan) == "none"
    assert pairs.verdict(pairs.turns.Figure(1.04, 1.03, 1.045), 0.0005) == "met", "short iterations may differ by 5 %"


def test_kinds_are_matched_by_phase_and_number() -> None:
    epochs = said(1.0, training=(80, 1.0), validation=(20, 1.0))
    assert apart._matched(epochs, [(0, True, 70), (1, True, 10), (2, False, 20)]) == {
        "training": [0, 1],
        "validation": [2],
    }
    gan = said(1.0, discriminator=(66, 1.0), generator=(33, 1.0))
    assert apart._matched(gan, [(0, True, 72), (1, True, 36)]) == {"discriminator": [0], "generator": [1]}


def test_kinds_that_are_one_for_the_program_are_weighed_by_their_steps() -> None:
    rows = [(0, 90, 10.0, 9.0, 11.0), (1, 10, 20.0, 19.0, 21.0), (2, 5, None, None, None)]
    assert apart._mean_iteration(rows) == pytest.approx((0.011, 0.010, 0.012))
    assert apart._mean_iteration([(0, 50, 10.0, 9.0, 11.0), (1, 50, None, None, None)]) is None


def test_iterations_are_compared_by_what_was_seen_of_them() -> None:
    bare = Bare(20, 1, 0, 1, 0, 1, {}, 0, steps=[(0.010, 0.009)] * 20)
    other = Bare(20, 1, 0, 1, 0, 1, {}, 0, steps=[(0.020, 0.018)] * 10 + [(0.011, 0.009)] * 10)
    seen = [lockstep.Seen("after")] * 10 + [lockstep.Seen("steady", 0.001)] * 10
    compared = lockstep.compare(bare, other, seen)
    assert compared["after"].cpu == pytest.approx(2.0)
    assert compared["steady"].time == pytest.approx(1.1)
    assert compared["steady"].corrected == pytest.approx(1.0)


def test_each_program_exists() -> None:
    import bare

    programs = [*bare.ON_PROCESSOR, *bare.ON_DEVICE, *unrecorded_steps.PROGRAMS]
    assert {program.command.split()[0] for program in programs} <= {path.name for path in apart.PROGRAMS.glob("*.py")}
    for group in (bare.ON_PROCESSOR, bare.ON_DEVICE):
        assert len({program.name for program in group}) == len(group) >= 14
    assert set(bare.QUICK) <= {program.name for program in bare.ON_PROCESSOR}
    assert set(bare.QUICK_ON_DEVICE) <= {program.name for program in bare.ON_DEVICE}


@pytest.mark.slow
def test_two_processes_of_a_program_run_the_same_number_of_iterations() -> None:
    pytest.importorskip("torch")
    runner = Runner(seconds=0.5)
    program = Program("sleep", "mlp.py --width 8 --depth 1 --sleep-ms 5")
    first, profiled = runner.bare(program), runner.profiled(program)
    assert first.iterations == profiled.said.iterations == runner.counts["sleep"]
    assert first.own_s("inference") >= 0.005
    assert first.before_s > 0
    assert first.after_s > 0
    assert first.wall_s == pytest.approx(first.before_s + first.loop_s + first.after_s, rel=0.5)
    stated = profiled.stated["inference"].iteration
    assert stated is not None
    assert stated[0] >= 0.005


@pytest.mark.slow
def test_two_processes_take_turns() -> None:
    pytest.importorskip("torch")
    runner = Runner(seconds=0.3)
    program = Program("sleep", "mlp.py --width 8 --depth 1 --sleep-ms 2")
    runner.bare(program)

    def run(more: object) -> Bare:
        return runner.bare(program, list(more))  # type: ignore[call-overload]

    both = lockstep.in_turns(run, run)
    assert len(both[0].steps) == len(both[1].steps) >= runner.counts["sleep"]
    assert both[0].loop_s > 1.9 * 0.002 * runner.counts["sleep"], "each waits while the other sleeps"


@pytest.mark.slow
def test_a_process_whose_partner_fails_goes_on_alone_and_the_error_is_said() -> None:
    pytest.importorskip("torch")
    runner, program = Runner(seconds=0.3), Program("tiny", "mlp.py --width 8 --depth 1")
    runner.bare(program)

    def fails(more: object) -> Bare:
        raise XspError("it ended at once")

    with pytest.raises(XspError, match="it ended at once"):
        lockstep.in_turns(fails, lambda more: runner.bare(program, more))


def test_a_program_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise KeyError('nothing')")
    monkeypatch.setattr(apart, "PROGRAMS", tmp_path)
    with pytest.raises(XspError, match="KeyError: 'nothing'"):
        Runner().bare(Program("fails", "fails.py"))


def test_a_wrong_name_is_an_error_that_names_the_others() -> None:
    script = Path(apart.__file__).parents[1] / "bare.py"
    done = subprocess.run([sys.executable, script, "--only", "nothing"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "there are tiny inference" in done.stderr
