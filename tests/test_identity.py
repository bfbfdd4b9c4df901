"""Rank, host and process of a run, as launchers state them in the environment."""

from __future__ import annotations

import pytest

from xsp import identity


@pytest.mark.parametrize(
    ("text", "rank"), [("3", 3), ("0", 0), ("", 7), ("-1", 7), ("1.5", 7), (" 2", 7), ("²", 7), ("٣", 7), ("one", 7)]
)
def test_a_rank_is_a_decimal_number_in_ascii_digits_and_otherwise_the_default(text: str, rank: int) -> None:
    assert identity.number_from({"LOCAL_RANK": text}, "LOCAL_RANK", 7) == rank


def test_a_process_whose_launcher_states_no_ranks_is_rank_0_of_1() -> None:
    own = identity.of_this_process({})
    assert (own.rank, own.local_rank, own.world_size, own.shared) == (0, 0, 1, False)
