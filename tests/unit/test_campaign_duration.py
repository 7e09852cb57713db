"""attnfuzz.campaign.stopping: budgets as people write them."""

from __future__ import annotations

import pytest

from attnfuzz.campaign.stopping import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1h1m1s", 3661), ("0.5s", 0.5), (" 2m ", 120)]
)
def test_documented_forms_are_understood(text: str, seconds: float) -> None:
    """A budget read wrongly makes a campaign end early or run all night."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10x", "10", "s", "-5s", "0s", "1m1h", "1 m", "1e3s", "9999999h", "inf"])
def test_anything_else_is_refused_with_its_value(text: str) -> None:
    """Guessing a unit would be worse than asking."""
    with pytest.raises(ValueError, match=r"such as 90s, 10m or 1h30m") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.8s"), (9.96, "10.0s"), (42.4, "42s"), (59.7, "1m00s"), (545, "9m05s"), (5400, "1h30m")],
)
def test_durations_are_shown_to_a_readers_precision(seconds: float, text: str) -> None:
    """Progress lines with nine digits, or without a unit, cannot be read at a glance."""
    assert format_duration(seconds) == text
