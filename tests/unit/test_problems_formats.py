"""attnfuzz.problems.formats: what is compiled for a case, and nothing that a kernel reads at run time."""

from __future__ import annotations

import msgspec
import pytest

from attnfuzz.problems.cases import CASE_TYPES, PROBLEMS, Case, Problem
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports

AT_RUN_TIME = {
    "seq_lens", "scale", "values", "pages", "extra_rows", "num_tokens", "lse_pairs", "outputs", "seed", "lse_layout",
    "query_lens", "query_slack", "seq_slack", "padding_tokens", "mask",
    "causal",  # a kernel may well compile for it: for twice as many formats, of the few that declare non_causal
}  # fmt: skip


def simplest(problem: Problem) -> Case:
    return simplest_case(problem, Supports(), {"tile": (16, 32)})


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_field_of_a_case_is_part_of_its_format_or_read_at_run_time(problem: Problem) -> None:
    """A new field that nobody thought of here would be drawn freely, and compiled for each value."""
    fields = {*CASE_TYPES[problem].__struct_fields__}
    assert fields - AT_RUN_TIME == fields & {*Format.__struct_fields__}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_format_survives_the_way_to_another_worker(problem: Problem) -> None:
    """Formats that one worker has compiled are drawn from by all."""
    found = format_of(simplest(problem))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Format) == found
    assert found.options == {"tile": 16}


def test_cases_that_differ_at_run_time_share_a_format() -> None:
    """A working set is worth what is drawn around each of its formats."""
    case = simplest("paged_decode")
    other = msgspec.structs.replace(case, seq_lens=(5, 7), scale=0.5, values=Values(seed=3))
    strided = msgspec.structs.replace(case, strides={"v_cache": "offset", "q": "offset"})
    same = msgspec.structs.replace(case, strides={"q": "offset", "v_cache": "offset"})
    assert format_key(format_of(case)) == format_key(format_of(other))
    assert format_key(format_of(case)) != format_key(format_of(strided))
    assert format_key(format_of(strided)) == format_key(format_of(same))
