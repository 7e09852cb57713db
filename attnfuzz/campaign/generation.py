"""One round: a run of Hypothesis through its public interface, as a source of cases.

Hypothesis never sees a failure. A failing case ends the round, because shrinking is done by `attnfuzz.minimise`, which
knows what simpler means for a case and can be stopped at any time; so there is nothing to replay and nothing flaky.
A round is short, since one run begins with the smallest cases (a tenth of ``max_examples``) and then mutates its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy

__all__ = ["DRAWS_PER_ROUND", "derive_seed", "run_round"]

DRAWS_PER_ROUND = 100

T = TypeVar("T")


class _RoundOver(KeyboardInterrupt):
    """Ends a run: Hypothesis passes a KeyboardInterrupt on at once and takes it for no failure."""


def run_round(
    strategy: SearchStrategy[T],
    visit: Callable[[T], bool],
    *,
    seed_value: int,
    until: float,
    max_draws: int = DRAWS_PER_ROUND,
) -> None:
    """Draw values for ``visit`` until it returns False, ``until`` on the monotonic clock or ``max_draws``.

    What ``visit`` raises is raised here, unseen by Hypothesis.
    """
    raised: list[BaseException] = []

    # deriving the seed from the round makes each a different sample, and one that can be drawn again
    @seed(seed_value)
    @settings(
        max_examples=max_draws,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(strategy)
    def draw(value: T) -> None:
        try:
            go_on = time.monotonic() < until and visit(value)
        except BaseException as error:  # handed to the caller below
            raised.append(error)
            raise _RoundOver from error
        if not go_on:
            raise _RoundOver

    try:
        draw()
    except _RoundOver:
        if raised:
            raise raised[0] from None


def derive_seed(*parts: object) -> int:
    """A 64-bit seed that depends on all of ``parts``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
