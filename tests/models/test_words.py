"""Sizes and times in words."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sa3_models.words import duration, size

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@given(st.integers(0, 10**12 - 10**9))
def test_a_size_is_right_to_three_digits_and_never_in_powers_of_ten(count):
    number, unit = size(count).split()
    assert re.fullmatch(r"\d+(\.\d+)?", number)
    assert abs(float(number) * UNITS[unit] - count) <= 0.005 * count + 0.5


@given(st.floats(0, 1e6))
def test_a_time_is_right_to_its_smallest_unit(seconds):
    words = duration(seconds)
    factors = {"h": 3600, "min": 60, "s": 1}
    pairs = re.findall(r"([\d.]+) (h|min|s)", words)
    total = sum(float(number) * factors[unit] for number, unit in pairs)
    step = 0.1 if seconds < 10 else factors[pairs[-1][1]]
    assert abs(total - seconds) <= step
