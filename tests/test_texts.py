"""Figures with units as text, and back."""

from __future__ import annotations

import pytest

from xsp import texts


def test_times_have_three_digits_and_the_unit_that_fits() -> None:
    assert [texts.ms_text(ms) for ms in (None, 0, 0.33e-6, 0.0123, 0.9996, 1.2345, 123.4, 43_425.0)] == [
        "–", "0 ns", "0.33 ns", "12.3 µs", "1.00 ms", "1.23 ms", "123 ms", "43.4 s",
    ]  # fmt: skip
    assert [texts.ns_text(ns) for ns in (999.4, 999.6, -2.5e6)] == ["999 ns", "1.00 µs", "-2.50 ms"]
    assert texts.seconds_text(0.0025) == "2.50 ms"


def test_bytes_have_three_digits_and_a_binary_unit() -> None:
    assert [texts.size_text(size) for size in (0, 700, 1 << 16, 102_550_000, 1020 << 20, 5 << 30)] == [
        "0 B", "700 B", "64 KiB", "97.8 MiB", "1020 MiB", "5 GiB",
    ]  # fmt: skip


def test_amounts_shares_and_numbers() -> None:
    assert [texts.amount(value, "B") for value in (None, 999, 4_089_000_000)] == ["–", "999 B", "4.09 GB"]
    assert [texts.share_text(share) for share in (0.0, 0.126, 25.0)] == ["0 %", "13 %", "2,500 %"]
    assert texts.share_text(0.1264, 1) == "12.6 %"
    assert (texts.percent_of(1, 4), texts.percent_of(None, 4), texts.percent_of(1, 0)) == (25, None, None)
    assert [texts.short_number(value) for value in (0.01234, 12.34, 12_345.6, 1e12)] == [
        "0.0123", "12.3", "12,346", "1e+12",
    ]  # fmt: skip
    assert [texts.number(value) for value in (0.0123, 1.5, 1234.5, 123_456, 1e8)] == [
        "0.0123", "1.500", "1234", "123,456", "1e+08",
    ]  # fmt: skip


def test_a_long_text_is_cut_to_its_width() -> None:
    assert [texts.cut("linear", width) for width in (6, 5, 1)] == ["linear", "line…", "l…"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("2m", 120), ("1.5 h", 5400), ("90", 90), ("5ms", 0.005), ("5µs", 5e-6), ("0", 0)]
    + [(text, None) for text in ("", "-1s", "2 days", "s", "1e400", "٣s")],
)
def test_durations_are_read_with_their_unit(text: str, seconds: float | None) -> None:
    assert texts.parse_seconds(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 1 << 26), ("25 MB", 25_000_000), ("4096", 4096), ("1.5GiB", 3 << 29), ("2tib", 2 << 40)]
    + [(text, None) for text in ("", "0", "-1", "8Gi", "1e6", "9" * 400)],
)
def test_sizes_are_read_with_their_unit(text: str, nbytes: int | None) -> None:
    assert texts.parse_bytes(text) == nbytes
