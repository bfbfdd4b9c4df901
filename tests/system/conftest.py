"""Whole programs are slow, but for one of each sort: `make test` runs these, `make test-all` the others."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ESSENTIAL = (
    "test_the_steps_of_an_ordinary_program_are_those_that_its_user_counts[epochs.py]",
    "test_an_empty_profile_says_at_its_end_why[no_module.py-options0]",
    "test_a_program_ends_as_it_does_without[an exception]",
    "test_a_program_goes_on_without_a_profile_where_the_disk_refuses_from_the_start",
    "test_a_run_that_is_being_written_is_not_replaced",
    "test_a_program_that_was_killed_before_its_run_began_blocks_nothing",
    "test_a_difference_would_be_found",
    "test_results_are_the_same_to_the_last_bit[torchvision:squeezenet1_1-training]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not essential; a test that is named here and is gone is an error, so the list stays true."""
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        if not item.name.startswith(ESSENTIAL):
            item.add_marker(pytest.mark.slow)
