"""masked_attention: what each kind of mask lets a query see, in numbers, memory, draws and words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

import attnfuzz
from attnfuzz.cases.facets.sequences import keep_sequences
from attnfuzz.cases.supported import translate, why_unsupported
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import MaskedAttentionCase, decode_case, encode_case
from attnfuzz.problems.masks import ALL_HIDDEN, Mask
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant
from attnfuzz.strategies import cases

SUPPORTS = Supports(layouts=("NHD",), variants=("soft_cap", "sinks"))
MASKS = {
    "causal": Mask(),
    "full": Mask(kind="full"),
    "tree": Mask(kind="tree", seqs=((-1, -1, 0, 1), (-1, 0, 0))),
    "pages": Mask(kind="pages", seqs=((1,), (0,))),
    "bits": Mask(kind="bits", seqs=((5, ALL_HIDDEN), (0,))),
    "chunks": Mask(kind="chunks", seqs=((4,), (5,))),
}


def case_of(kind: str, **changes: Any) -> MaskedAttentionCase:
    fields: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
    lengths = {"seq_lens": (9, 6, 3), "query_lens": (4, 3, 1)}
    return MaskedAttentionCase(**{**fields, **lengths, "mask": MASKS[kind], **changes})


def tables(case: MaskedAttentionCase) -> list[str]:
    return ["".join(map(str, row)) for row in case.rows_seen]


def attend(inputs: Any, *, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, by the flat mask that kernels get."""
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    starts = inputs.cu_seqlens_q.tolist()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        count = starts[seq + 1] - starts[seq]
        first = int(inputs.mask_indptr[seq])
        seen = inputs.mask[first : first + count * length]
        seen = seen.view(length, count).T if transposed else seen.view(count, length)
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)].long()
        k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (inputs.k_cache, inputs.v_cache))
        for j in range(count):
            row = starts[seq] + j
            for head in range(inputs.q.shape[1]):
                scores = inputs.scale * (k[seen[j], head // group] @ inputs.q[row, head].double())
                scores = scores if inputs.soft_cap is None else inputs.soft_cap * (scores / inputs.soft_cap).tanh()
                values = v[seen[j], head // group]
                if inputs.sinks is not None:
                    scores = torch.cat((scores, inputs.sinks[head : head + 1].double()))
                    values = torch.cat((values, values.new_zeros(1, values.shape[1])))
                if len(scores) and bool(scores.isfinite().any()):
                    out[row, head] = (scores.softmax(0) @ values).to(out.dtype)
                    lse[row, head] = scores.logsumexp(0)
    return out, lse


@attnfuzz.kernel("masked_attention", supports=SUPPORTS)
def right(inputs: Any) -> Any:
    """The definition."""
    return attend(inputs)


@attnfuzz.kernel("masked_attention", supports=SUPPORTS)
def transposed(inputs: Any) -> Any:
    """The mask read with keys before queries."""
    return attend(inputs, transposed=True)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("causal", ["111111000", "111111100", "111111110", "111111111", "111100", "111110", "111111", "111"]),
        ("full", ["111111111"] * 4 + ["111111"] * 3 + ["111"]),
        ("tree", ["111111000", "111110100", "111111010", "111110101", "111100", "111110", "111101", "111"]),
        ("pages", ["111100000", "111100000", "111100000", "111100001", "000000", "000010", "000011", "111"]),
        ("bits", ["010111111", "000000000", "010111111", "000000000", "111111", "111111", "111111", "010"]),
        ("chunks", ["000011000", "000011100", "000011110", "000000001", "111100", "111110", "000001", "111"]),
    ],
)
def test_each_kind_of_mask_says_which_keys_are_seen(kind: str, rows: list[str]) -> None:
    """Kernels would be judged by another mask than the one that the case is told to have."""
    assert tables(case_of(kind)) == rows


@pytest.mark.parametrize("kind", list(MASKS))
def test_a_right_kernel_passes_every_oracle(kind: str) -> None:
    """An oracle or a relation would object to a kernel that does what the mask says."""
    without = ("guard_page", "page_relocation")  # which take processes of their own
    oracles = tuple(name for name in DEFAULT_ORACLES if name not in without)
    verdict = judge(right, case_of(kind), device="cpu", oracles=oracles, relations="all")
    assert verdict.failure is None, verdict.failure


def test_a_transposed_mask_is_found() -> None:
    """A mask that is read in the wrong order would pass, or be blamed on the tokens that it shows."""
    failure = judge(transposed, case_of("tree"), device="cpu").failure
    assert failure is not None
    assert failure.oracle == "accuracy"
    assert "the mask is read with keys before query tokens" in failure.message


def test_a_mask_follows_the_sequences_that_are_kept() -> None:
    """Where a sequence is dropped, others would see other keys, and the failure would be lost."""
    for kind in MASKS:
        case = case_of(kind)
        kept = keep_sequences(case, [1])
        assert kept is not None
        assert tables(kept) == tables(case)[4:7]


ONE_TREE = Supports(layouts=("NHD",), masks=("causal", "tree"), mask_per_sequence=False)


@given(cases("masked_attention", supports=ONE_TREE))
def test_a_kernel_with_one_tree_for_the_batch_is_given_no_other(case: MaskedAttentionCase) -> None:
    """vLLM's kernel would be reported for trees that nobody can hand to it."""
    assert why_unsupported(ONE_TREE, {}, case) is None
    assert len(case.mask.seqs) <= 1


def test_sequences_with_one_mask_are_told_from_those_with_several() -> None:
    """A saved case of several trees would fail on vLLM's kernel, and one of one tree could not lose a sequence."""
    several = case_of("tree")
    assert why_unsupported(ONE_TREE, {}, several) == (
        "mask.seqs=((-1, -1, 0, 1), (-1, 0, 0)) differ, but the kernel declares mask_per_sequence=False"
    )
    first_and_third = keep_sequences(several, (0, 2))
    assert first_and_third is not None
    assert first_and_third.mask.seqs == ((-1, -1, 0, 1),)
    assert why_unsupported(ONE_TREE, {}, first_and_third) is None


@given(cases("masked_attention", supports=Supports(empty_sequences=False)))
def test_drawn_cases_are_supported_and_read_back(case: MaskedAttentionCase) -> None:
    """A kernel that never gives a row without keys would be asked for one, or a saved case would be another one."""
    assert why_unsupported(Supports(empty_sequences=False), {}, case) is None
    assert decode_case("masked_attention", encode_case(case)) == case
    assert all(1 in row for row in case.rows_seen)


def test_a_query_that_sees_nothing_is_told_and_expected_to_be_empty() -> None:
    """Kernels would be allowed NaN where every key is hidden."""
    case = case_of("bits")
    problem = problem_of(case)
    expected = problem.reference(case, problem.values(case, "cpu", SUPPORTS))
    assert expected.out[1].eq(0).all()
    assert expected.lse[1].eq(-torch.inf).all()
    assert problem.length_words(case, 1) == [
        "token 1 of the batch is query 1 of sequence 0 and sees none of 9 keys (mask: bits)"
    ]


def test_no_other_problem_has_such_a_mask() -> None:
    """Replay would put a case to a kernel that computes something else, or end in an error."""
    assert translate(case_of("tree"), "paged_attention", SUPPORTS, {}) is None
    decode = attnfuzz.PagedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3,), query_lens=(1,), scale=0.25, block_size=4,
        variant=Variant(window=2),
    )  # fmt: skip
    assert translate(decode, "masked_attention", SUPPORTS, {}) is None


def test_positions_have_no_meaning_under_a_mask() -> None:
    """Cases would ask for windows and slopes, of which no engine says what they mean there."""
    with pytest.raises(ValueError, match="must be left out in masked_attention"):
        case_of("full", variant=Variant(window=3))


def test_a_mask_that_is_taken_for_a_causal_one_is_named() -> None:
    """A reader would look for a key that is dropped where the kernel does not know trees at all."""

    @attnfuzz.kernel("masked_attention", supports=SUPPORTS)
    def causal(inputs: Any) -> Any:
        tables = "".join(tables_of_batch).encode()
        inputs.mask.copy_(torch.frombuffer(bytearray(tables), dtype=torch.uint8) == ord("1"))
        return attend(inputs)

    tables_of_batch = tables(case_of("causal"))
    failure = judge(causal, case_of("tree"), device="cpu", oracles=("accuracy",)).failure
    assert failure is not None
    assert failure.cause == "mask"
    assert "taken for a causal one" in failure.message


def test_a_row_that_sees_nothing_is_told_with_the_mistake_about_its_mask() -> None:
    """A reader would be sent to a sequence that is not empty, or look for what is done about rows without keys."""

    @attnfuzz.kernel("masked_attention", supports=SUPPORTS)
    def all_seen(inputs: Any) -> Any:
        inputs.mask.fill_(True)
        return attend(inputs)

    failure = judge(all_seen, case_of("pages"), device="cpu", oracles=("accuracy",)).failure
    assert failure is not None
    assert failure.message.endswith("expected 0.0; the mask is not applied")
