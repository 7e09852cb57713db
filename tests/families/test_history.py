"""`attnfuzz.families.History`: what a scheduler does is there in what is drawn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attnfuzz
from attnfuzz.families.history import History, _batches
from attnfuzz.strategies import cases
from tests.unit.drawing import drawn_from


@attnfuzz.kernel(History())
def nothing(inputs: Any) -> None:
    pass


def test_what_a_scheduler_does_is_drawn() -> None:
    """Backends would be asked about plain batches only, whatever the fields are called."""
    met: set[str] = set()
    for case in drawn_from(cases(nothing.declaration.problem), draws=300):
        batches = _batches(case)
        for before, after in pairwise(batches):
            of = {one.request: one for one in before}
            for one in after:
                old = of.get(one.request)
                if old is None:
                    met |= {"arrives"}
                    continue
                met |= {"decodes"} if one.start == old.start + old.new else set()
                met |= {"rejects"} if old.start < one.start < old.start + old.new else set()
                met |= {"is computed anew"} if one.start < old.start else set()
                met |= {"loses pages"} if one.pages[: len(old.pages)] != old.pages else set()
                met |= {"reads in chunks"} if old.start == 0 and 1 < one.new == old.new else set()
        for batch in batches:
            first = batch[0]
            met |= {"shares"} if any(one.start and one.pages[:1] == first.pages[:1] for one in batch[1:]) else set()
            slots = [page for one in batch for page in one.pages[one.start // case.block_size :]]
            assert len(slots) == len(set(slots))  # no two requests write one page
    assert met == {
        "arrives", "decodes", "rejects", "is computed anew", "loses pages", "reads in chunks", "shares"
    }  # fmt: skip


def test_a_token_of_an_output_is_told() -> None:
    """Nobody would know which request a wrong row is of."""
    problem: Any = nothing.declaration.problem
    case = problem.case_type(prompts=(3, 5), num_steps=2, block_size=4)
    assert History().where_is(case, "out1", (1, 0, 0)) == "step 1: new token 0 of request 1, which has 5 in the cache"
