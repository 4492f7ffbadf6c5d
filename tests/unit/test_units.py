"""Times and sizes as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.units import distinct_sizes, format_bytes, format_duration


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0 ns"), (412, "412 ns"), (1_500, "1.5 us"), (12_345_678, "12.3 ms"), (999_700_000, "1 s"),
        (1_195_730_000, "1.2 s"), (119_000_000_000, "119 s"), (200_000_000_000, "3.33 min"),
        (3_123_000_000_000, "52 min"), (7_200_000_000_000, "2 h"), (-2_500_000, "-2.5 ms"),
    ],
)  # fmt: skip
def test_a_duration_has_three_digits_and_the_unit_that_suits_it(ns, words):
    assert format_duration(ns) == words


@given(st.floats(-1e18, 1e18))
def test_no_duration_is_written_with_an_exponent(ns):
    assert "e" not in format_duration(ns)


def test_sizes_are_decimal_as_bandwidths_are():
    assert [format_bytes(each) for each in (-1, 999, 1000, 2.5e6, 80e9, 3e15)] == [
        "unknown", "999 B", "1.0 kB", "2.5 MB", "80.0 GB", "3000.0 TB",
    ]  # fmt: skip


def test_sizes_that_would_read_the_same_have_more_digits():
    sizes = [1_058_304, 1_057_280, 131_072, 131_072, -1]
    assert distinct_sizes(sizes) == ["1.058 MB", "1.057 MB", "131.1 kB", "131.1 kB", "unknown"]
