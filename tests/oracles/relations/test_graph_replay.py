"""Graphs that are replayed with other contents, and what these are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

import attnfuzz
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.triage.contract_gaps import with_remedy
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration, Kernel, load_kernels
from attnfuzz.inputs.registry import problem_of
from attnfuzz.oracles import exception
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.oracles.relations import graph_replay
from attnfuzz.oracles.relations.catalogue import chosen
from attnfuzz.oracles.relations.graph_replay import GRAPH_REPLAY, MOST_BYTES, CapturedCall, contents_of, with_room
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import (
    PROBLEMS,
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.strategies import cases
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure

KERNELS = Path(__file__).with_name("shape_keeping_kernels.py")
Freeze = Callable[[Any], Any]

KEPT = attnfuzz.Supports(graph_replay=True)
KEPT_ROUGHLY = attnfuzz.Supports(graph_replay=True, deterministic=False)


class StandIn(CapturedCall):
    """Runs the kernel at each replay, on `inputs` of which something may be as it was at the capture."""

    def __init__(self, kernel: Kernel, case: Case, inputs: Any, pool: Any) -> None:
        self.kernel, self.inputs = kernel, inputs
        self.pool = [self] if pool is None else [*pool, self]
        self.results = dict(zip(problem_of(case).results, kernel(inputs), strict=True))

    def replay(self, words: str) -> None:
        del words
        for result, found in zip(self.results.values(), self.kernel(self.inputs), strict=True):
            result.copy_(found)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failure | None]:
    """What the relation says of a kernel whose graph has frozen what `freeze` makes of its inputs."""

    def check(kernel: Kernel, case: Case, freeze: Freeze = lambda inputs: inputs) -> Failure | None:
        @contextmanager
        def captured(kernel: Kernel, case: Case, inputs: Any, *, pool: Any = None) -> Iterator[StandIn]:
            yield StandIn(kernel, case, freeze(inputs), pool)

        monkeypatch.setattr(graph_replay, "captured_call", captured)
        return GRAPH_REPLAY.check(Trial(kernel, case, device="cpu", tolerance="bound"))

    return check


@pytest.mark.by_day
@pytest.mark.parametrize("problem", ["dense", "paged", "split", "states", "queries"])
@pytest.mark.parametrize("supports", [KEPT, KEPT_ROUGHLY], ids=["bits", "bounds"])
def test_a_graph_that_freezes_nothing_is_left_alone(
    problem: str, supports: attnfuzz.Supports, checked: Any, plant: Any, request: pytest.FixtureRequest
) -> None:
    """A right kernel would be accused."""
    case: Case = request.getfixturevalue(problem)
    assert checked(plant(case.problem, supports=supports), case) is None


def test_frozen_lengths_are_told_in_words(checked: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """A grid worked out on the host would pass: it is right in each eager call."""
    failure = checked(plant("paged_decode", supports=KEPT), paged, with_frozen("seq_lens"))
    assert (failure.oracle, failure.kind) == ("graph_replay", "bits")
    assert failure.message.startswith("out[seq 0, head 0, dim 0] is ")
    assert " in an eager call, but " in failure.message
    assert failure.message.endswith(
        "when the graph is replayed with seq_lens shortened from [5, 0, 21] to [2, 0, 10]: the bits must be equal"
    )
    assert failure.details[-1].startswith("look for what is frozen when the graph is captured: a grid or a")


def test_a_frozen_table_is_found(checked: Any, plant: Any, paged: PagedDecodeCase) -> None:
    """Sequences that a server has moved to other pages would get the numbers of whoever has their old ones."""
    assert checked(plant("paged_decode", supports=KEPT), paged, with_frozen("block_table")) is not None


def test_a_batch_with_fewer_query_tokens_than_rows_is_replayed(
    checked: Any, plant: Any, queries: PagedAttentionCase
) -> None:
    """Servers pad batches to the size of a graph: a kernel that keeps the number of query tokens would pass."""
    alike = msgspec.structs.replace(queries, seq_lens=(5, 7, 11), query_lens=(3, 3, 3))
    kernel = plant("paged_attention", supports=KEPT, length=lambda n: max(n, 0))
    assert checked(kernel, alike) is None
    failure = checked(kernel, alike, with_frozen("cu_seqlens_q"))
    assert (failure.oracle, failure.kind) == ("graph_replay", "bits")
    assert "when the graph is replayed with query_lens shortened from [3, 3, 3] to [1, 1, 1]" in failure.message


def test_a_kernel_that_promises_no_bits_is_held_to_its_bounds(checked: Any, plant: Any, dense: DenseDecodeCase) -> None:
    """Any kernel with atomic additions would be accused, or none of them found."""
    failure = checked(plant("dense_decode", supports=KEPT_ROUGHLY), dense, with_frozen("seq_lens"))
    assert (failure.oracle, failure.kind) == ("graph_replay", "out")
    assert failure.message.endswith("times the error bound")
    assert failure.error_ratio > 1


def test_what_eager_calls_leave_behind_is_seen(checked: Any, plant: Any, dense: DenseDecodeCase) -> None:
    """A buffer that a longer call has allocated anew is no longer the one that the graph reads."""
    replays = []

    class SpoiledLater(StandIn):
        def replay(self, words: str) -> None:
            super().replay(words)
            replays.append(words)
            if len(replays) == 5:  # four contents, then the first one again
                self.results["out"].zero_()

    kernel = plant("dense_decode", supports=KEPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "StandIn", SpoiledLater)
        failure = checked(kernel, dense)
    assert len(replays) == 5
    assert "replayed with what it was captured with, after calls on other contents" in failure.message


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (0, "replayed with what it was captured with, after a second one over the same memory"),
        (1, "replayed with a smaller batch, as the second one over the same memory"),
    ],
)
def test_a_second_graph_over_the_same_memory_spoils_neither(
    spoiled: int, words: str, checked: Any, plant: Any, dense: DenseDecodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers capture a graph for each size, and a workspace that both use may belong to one of them."""
    pools: list[list[StandIn]] = []

    class Spoiling(StandIn):
        def replay(self, words: str) -> None:
            super().replay(words)
            pools.append(self.pool)
            longest = max(pools, key=len)
            if len(longest) > 1 and self is longest[spoiled]:
                self.results["out"].zero_()

    monkeypatch.setitem(globals(), "StandIn", Spoiling)
    failure = checked(plant("dense_decode", supports=KEPT), dense)
    assert failure is not None
    assert words in failure.message


def test_what_fails_of_a_kernel_that_says_nothing_is_a_question(
    checked: Any, plant: Any, paged: PagedDecodeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only kernels that promise it would be replayed, and kernels that were never meant for it be told as broken."""
    monkeypatch.setattr(graph_replay, "waits_for_the_device", lambda *call: False)
    failure = checked(plant("paged_decode"), paged, with_frozen("seq_lens"))
    assert failure.remedy == {"graph_replay": False}
    assert not checked(plant("paged_decode", supports=KEPT), paged, with_frozen("seq_lens")).remedy
    monkeypatch.setattr(graph_replay, "waits_for_the_device", lambda *call: True)
    assert checked(plant("paged_decode"), paged, with_frozen("seq_lens")) is None


def test_the_declaration_that_answers_the_question_ends_it(plant: Any, paged: PagedDecodeCase) -> None:
    """A question would be asked again when its answer has been pasted, or be a finding for good."""
    failure = Failure(oracle="graph_replay", kind="bits", message="", remedy={"graph_replay": False})
    declaration = plant("paged_decode").declaration
    finding = Finding("", declaration, paged, failure, 0.0, shrunk_s=0.0, failed=1, runs=1)
    with_remedy(finding)
    assert finding.remedy is not None
    assert finding.remedy.declared() == {"graph_replay": False}
    assert finding.is_question


def test_what_may_be_captured_is_tried(plant: Any, paged: PagedDecodeCase) -> None:
    """Kernels that nobody captures would fail, and so would every kernel where there are no graphs."""
    never = attnfuzz.Supports(graph_replay=False)
    asked = ((KEPT, "cuda", True), (KEPT, "cpu", False), (None, "cuda", True), (never, "cuda", False))
    for supports, device, judges in asked:
        declaration = plant("paged_decode", supports=supports).declaration
        for relations in ("all", ("graph_replay",)):
            names = {one.name for one in chosen(declaration, paged, DEFAULT_ORACLES, relations, device=device)}
            assert ("graph_replay" in names) is judges


@pytest.mark.parametrize("fatal", [True, False])
def test_a_process_in_which_a_capture_failed_is_given_up(fatal: bool) -> None:
    """The next capture would end it, and another case would be blamed."""
    raised = KernelRaised(RuntimeError("operation not permitted"), "nan", "cannot be captured", fatal=fatal)
    verdict = exception.verdict(raised, ("exception",))
    assert verdict.failure is not None
    assert verdict.fatal is fatal


def with_frozen(name: str) -> Freeze:
    """A copy at capture of what the graph should read at each replay."""
    return lambda inputs: replace(inputs, **{name: getattr(inputs, name).clone()})


def test_what_eager_calls_have_kept_as_well_is_seen_in_a_fresh_kernel(checked: Any, dense: DenseDecodeCase) -> None:
    """A grid that the first call of a shape decides is as wrong in an eager call, and both would agree."""
    (kernel,) = load_kernels(f"{KERNELS}:grid_by_shape")
    failure = checked(kernel, dense)
    assert (failure.oracle, failure.kind) == ("graph_replay", "out")
    assert " before any other call, but " in failure.message
    assert " when the graph is replayed with seq_lens grown from [5, 0, 21] to [" in failure.message
    assert "and in an eager call after that: " in failure.message


def test_a_kernel_that_is_wrong_by_itself_is_not_blamed_on_a_graph(
    checked: Any, plant: Any, dense: DenseDecodeCase
) -> None:
    """Every bug of longer sequences would be found twice, the second time with a wrong cause."""
    assert checked(plant("dense_decode", supports=KEPT, length=lambda n: min(n, 40)), dense) is None


SIZES = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 8, "scale": 0.25}
DENSE = DenseDecodeCase(**SIZES, seq_lens=(5, 0, 300), extra_rows=1)  # type: ignore[arg-type]  # ints and a float
PAGED = PagedDecodeCase(**SIZES, seq_lens=(5, 0, 21, 8), block_size=8)  # type: ignore[arg-type]  # as above
SHARED = msgspec.structs.replace(PAGED, pages=Pages(shared_blocks=2, order="reversed", padding="garbage"))
NEEDLES = msgspec.structs.replace(PAGED, values=Values(needles=(Needle(2, 20, 0),)))
QUERIES = PagedAttentionCase(**SIZES, seq_lens=(5, 0, 21, 8), query_lens=(5, 0, 2, 1), block_size=8)  # type: ignore[arg-type]  # as above
SPLIT = SplitDecodeCase(**SIZES, seq_lens=(1,), block_size=16, num_splits=3)  # type: ignore[arg-type]  # as above


def declared(case: Case, **limits: object) -> Declaration:
    supports = attnfuzz.Supports(graph_replay=True, **limits)  # type: ignore[arg-type]  # any limit
    return Declaration(name="kernel", problem=case.problem, supports=supports)


@pytest.mark.parametrize(
    "case",
    [DENSE, PAGED, SHARED, NEEDLES, SPLIT, QUERIES],
    ids=["dense", "paged", "shared", "needles", "split", "queries"],
)
def test_contents_have_the_shapes_that_were_captured(case: DenseDecodeCase | PagedDecodeCase) -> None:
    """A graph knows one address and one shape for each tensor; other ones would not be what it reads."""
    captured = with_room(declared(case), case)
    first, *others = contents_of(declared(case), captured)
    assert first.case == captured
    assert getattr(captured, "seq_lens", None) == case.seq_lens
    for content in others:
        assert tensor_specs(content.case) == tensor_specs(captured), content.words
        assert isinstance(content.case, AttentionCase)
        assert content.case.values.seed != case.values.seed


# A mask has the size of its lengths, and graphs of it are not replayed.
@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one != "masked_attention"])
@pytest.mark.parametrize("limits", [{}, {"empty_sequences": False, "max_seq_len": 100}], ids=["all", "limited"])
def test_contents_of_drawn_cases_are_what_a_kernel_takes(problem: Problem, limits: dict[str, Any]) -> None:
    """A case with an odd recipe would end in an error, or in contents that the kernel has not declared to support."""
    supports = attnfuzz.Supports(graph_replay=True, unused_table_entries="garbage", **limits)
    declaration = Declaration(name="kernel", problem=problem, supports=supports)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(cases(problem, supports=supports))
    def hold(case: Case) -> None:
        captured = with_room(declaration, case)
        for content in contents_of(declaration, captured):
            assert tensor_specs(content.case) == tensor_specs(captured)
            assert supports_case(supports, {}, content.case)

    hold()


def test_lengths_shrink_grow_and_become_empty() -> None:
    """What a server does with a captured graph would not be tried."""
    words = [content.words for content in contents_of(declared(PAGED), with_room(declared(PAGED), PAGED))]
    assert words == [
        "with what it was captured with",
        "with seq_lens shortened from [5, 0, 21, 8] to [2, 0, 10, 4]",
        "with seq_lens grown from [5, 0, 21, 8] to [74, 64, 106, 80]",
        "with seq_lens padded from [5, 0, 21, 8] to [5, 0, 0, 0]",
        "with seq_lens=[5, 0, 21, 8] on other pages",
    ]


def test_what_a_kernel_does_not_take_is_not_replayed() -> None:
    """A kernel would be blamed for lengths that it has declared not to support."""
    case = msgspec.structs.replace(PAGED, seq_lens=(1, 5, 21))
    declaration = declared(case, empty_sequences=False, max_seq_len=30)
    lengths = [
        one.case.seq_lens
        for one in contents_of(declaration, with_room(declaration, case))
        if isinstance(one.case, AttentionCase)
    ]
    assert lengths == [(1, 5, 21), (1, 2, 10), (30, 30, 30), (1, 5, 21)]


def test_without_room_sequences_shrink_only() -> None:
    """A case too large to be made larger would be replayed on memory that it does not have, or not at all."""
    words = " ".join(content.words for content in contents_of(declared(PAGED), PAGED))
    assert "shortened" in words
    assert "padded" in words
    assert "grown" not in words


def test_room_is_bounded() -> None:
    """Capturing a case of a few megabytes would take a multiple of what the case may."""
    case = msgspec.structs.replace(DENSE, seq_lens=(4000,) * 16, head_size=16)
    assert tensor_nbytes(case) < MOST_BYTES
    assert with_room(declared(case), case) == case
    assert num_blocks(with_room(declared(PAGED), PAGED)) > num_blocks(PAGED)  # type: ignore[arg-type]  # it is paged


def test_states_to_merge_change_their_kinds() -> None:
    """Branches on whether a state is empty, taken on the host, would stay those of the capture."""
    case = MergeStatesCase(num_q_heads=2, head_size=8, num_tokens=3, lse_pairs=(("finite", "-inf"), ("high", "low")))
    pairs = [one.case.lse_pairs for one in contents_of(declared(case), case) if isinstance(one.case, MergeStatesCase)]
    assert pairs == [case.lse_pairs, (("-inf", "finite"), ("low", "high")), (("-inf", "-inf"),)]
    assert len(contents_of(declared(case, empty_sequences=False), case)) == 2


def test_long_lists_of_lengths_are_cut() -> None:
    """A message about a large batch would fill the screen."""
    case = msgspec.structs.replace(PAGED, seq_lens=(2,) * 40)
    assert contents_of(declared(case), case)[1].words == (
        "with seq_lens shortened from [2, 2, 2, 2, 2, 2, 2, 2, ...] to [1, 1, 1, 1, 1, 1, 1, 1, ...]"
    )


def test_a_graph_without_padding_tokens_is_replayed_without() -> None:
    """A kernel that takes each row of q for a query token, and says so, would be called wrong."""
    captured = with_room(declared(QUERIES), QUERIES)
    unpadded = contents_of(declared(QUERIES, padding_tokens=False), captured)
    assert {getattr(content.case, "padding_tokens", None) for content in unpadded} == {0}
    padded = contents_of(declared(QUERIES), captured)
    assert [content.words for content in padded if getattr(content.case, "padding_tokens", 0) > 0] == [
        "with query_lens shortened from [5, 0, 2, 1] to [1, 0, 1, 1]",
        "with the last 2 of 4 sequences, which keep their lengths, as padding",
        "with the last 2 of 4 sequences, which are empty, as padding",
    ]


def test_query_tokens_move_to_other_sequences_within_frozen_bounds() -> None:
    """The grid of a graph is made for so many tokens, and its bounds are numbers that no replay can change."""
    captured = with_room(declared(QUERIES), QUERIES)
    assert isinstance(captured, PagedAttentionCase)
    contents = [content.case for content in contents_of(declared(QUERIES), captured)]
    found = [case for case in contents if isinstance(case, PagedAttentionCase)]
    assert {(case.num_query_slots, case.max_query_len, case.max_seq_len) for case in found} == {
        (8, captured.max_query_len, captured.max_seq_len)
    }
    assert {case.query_lens for case in found} == {(5, 0, 2, 1), (1, 2, 0, 5), (1, 0, 1, 1), (5, 0, 0, 0)}
    assert max(max(case.seq_lens) for case in found) > 21
