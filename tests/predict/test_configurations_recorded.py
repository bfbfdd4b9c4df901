"""Configurations are recorded with real processes, and what was measured before is gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import predict_configurations as configurations
import pytest


def test_configurations_are_drawn_over_all_factors_the_number_of_processes_too() -> None:
    drawn = configurations.draw_configurations(300, 1)
    assert len({json.dumps(each) for each in drawn}) == 300
    assert {(each["threads"], each["processes"]) for each in drawn} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert all(set(each) == {"kind", *configurations.FACTORS} for each in drawn)


def test_a_line_that_was_cut_off_is_measured_again_and_the_next_one_stands_on_its_own(tmp_path: Path) -> None:
    place = tmp_path / "turns.jsonl"
    place.write_text('{"key": "a", "round": 0}\n{"key": "b", "rou')
    assert configurations.read_turns(place) == [{"key": "a", "round": 0}]
    with place.open("a") as file:
        file.write('{"key": "c", "round": 0}\n')
    assert [each["key"] for each in configurations.read_turns(place)] == ["a", "c"]


@pytest.mark.slow
def test_two_real_processes_take_a_turn_and_end_with_the_program() -> None:
    each = next(
        each for each in configurations.draw_configurations(60, 1) if each["kind"] == "mlp" and each["batch"] <= 16
    )
    with configurations.RankProcesses(2) as ranks:
        rows = [ranks.turn({**each, "processes": 2}, True) for _ in range(2)]
    assert all(row["step_s"] > 0 and row["mparameters"] == rows[0]["mparameters"] > 0 for row in rows)
    assert all(process.poll() is not None for process in ranks.processes)
