"""Numbers, elements and ranges in messages."""

from __future__ import annotations

import pytest

from attnfuzz.problems.wording import element, number, numbers, plural, ranges, ratio, shape_of


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (12, "12.0"),
        (0.0049, "0.0049"),
        (1e-30, "1e-30"),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (1 / 3, "0.333333"),
    ],
)
def test_number(value: float, words: str) -> None:
    """A float would look like an index, or fill the line with digits."""
    assert number(value) == words


@pytest.mark.parametrize(("value", "words"), [(1.234, "1.23"), (912.4, "912"), (39242.6, "39243"), (3.7e36, "3.7e+36")])
def test_ratio(value: float, words: str) -> None:
    """An error of a thousand bounds would be given to the last digit, or one of two bounds without any."""
    assert ratio(value) == words


def test_two_numbers_that_differ_look_different() -> None:
    """Such as "lse is 2.625 in one run and 2.625 in the next" would be no reason to believe that they differ."""
    assert numbers(2.625, 2.6250002) == ("2.625", "2.6250002")
    assert numbers(2.0, 3.0) == ("2.0", "3.0")


def test_ranges() -> None:
    """Hundreds of elements would be listed one by one."""
    assert ranges([5, 0, 1, 2, 2, 9]) == "0-2, 5, 9"
    assert ranges(range(0, 40, 2), most=3) == "0, 2, 4, ..."
    assert ranges([]) == ""


def test_other_words() -> None:
    """Messages would not read as sentences."""
    assert element("out", ("seq", "head"), (0, 3)) == "out[seq 0, head 3]"
    assert (plural(1, "token"), plural(2, "token")) == ("1 token", "2 tokens")
    assert shape_of("float16", (2, 3)) == "float16 [2, 3]"
