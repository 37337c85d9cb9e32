from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa3_models.errors import UsageError
from sa3_runtime.windows import split


@given(
    total=st.integers(1, 4096),
    window=st.integers(12, 300).map(lambda n: 2 * n),
    margin=st.integers(0, 5),
)
def test_windows_cover_everything_once_with_their_margins(
    total: int, window: int, margin: int
) -> None:
    """CASES 13: the overlap is never smaller than the receptive field."""
    windows = split(total, window, margin)
    assert [w.first for w in windows[1:]] == [w.last for w in windows[:-1]]
    assert (windows[0].first, windows[-1].last) == (0, total)
    for w in windows:
        assert w.start % 2 == 0
        assert 0 <= w.start <= w.first < w.last <= w.start + w.length <= total
        assert w.start == 0 or w.first - w.start >= margin
        assert w.start + w.length == total or w.start + w.length - w.last >= margin
    if total > window:
        assert {w.length for w in windows[:-1]} == {window}
        assert windows[-1].length == window - total % 2


def test_a_short_sequence_is_one_window() -> None:
    assert [(w.start, w.length) for w in split(128, 128, 3)] == [(0, 128)]
    assert [(w.start, w.length) for w in split(1, 128, 3)] == [(0, 1)]


def test_cuts_lie_in_the_middle_of_the_overlap() -> None:
    first, second = split(20, 14, 2)
    assert (first.start, second.start) == (0, 6)
    assert first.last == (6 + 14) // 2


@pytest.mark.parametrize(("window", "margin"), [(13, 2), (8, 4), (8, 3)])
def test_a_window_that_can_not_work_is_refused(window: int, margin: int) -> None:
    with pytest.raises(UsageError, match="even and larger"):
        split(100, window, margin)
