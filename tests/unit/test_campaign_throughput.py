"""attnfuzz.campaign.counts: no case is lost however long a campaign runs, and rates are those of now."""

from __future__ import annotations

import math

from attnfuzz.campaign.counts import Throughput


def test_no_case_is_lost_when_intervals_double() -> None:
    """The area under the curve is the number of cases, after a minute and after a day."""
    throughput = Throughput()
    for at_s in range(0, 90_000, 10):
        throughput.add("0", at_s + 0.5, 7)
        throughput.add("1", at_s + 0.5, 3)
    assert {device: sum(counts) for device, counts in throughput.counts.items()} == {"0": 63_000, "1": 27_000}
    assert all(len(counts) <= 240 for counts in throughput.counts.values())
    assert throughput.interval_s * 240 >= 90_000


def test_cases_stay_where_they_were_when_intervals_double() -> None:
    """A pause after the first minute must still be seen there after an hour."""
    throughput = Throughput()
    throughput.add("", 59.0, 100)
    throughput.add("", 1000.0, 1)
    place = throughput.counts[""].index(100)
    assert place * throughput.interval_s <= 59.0 < (place + 1) * throughput.interval_s


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    """A GPU that has stopped would go on at the average of its better days."""
    throughput = Throughput()
    for at_s in range(100):
        throughput.add("0", float(at_s), 50)
        if at_s < 50:
            throughput.add("1", float(at_s), 50)
    rates = throughput.rates(99.0)
    assert math.isclose(rates["0"], 55.0, rel_tol=0.1)
    assert rates["1"] == 0.0


def test_the_first_seconds_are_not_taken_for_ten() -> None:
    """A campaign of five seconds would show half its rate."""
    throughput = Throughput()
    for at_s in (1.0, 2.0, 3.0, 4.0):
        throughput.add("", at_s, 10)
    assert math.isclose(throughput.rates(4.0)[""], 10.0)


def test_a_later_campaign_is_counted_when_it_ran() -> None:
    """The page of two campaigns would show the cases of both in the first minute."""
    first, later = Throughput(), Throughput()
    first.add("", 1.0, 5)
    later.add("", 2.0, 7)
    first.add_later(later, 10.0)
    assert (first.counts[""][1], first.counts[""][12]) == (5, 7)
