"""paged_attention: what a case may say, what a kernel gets of it, and what must come out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnfuzz.cases.features import features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.reference import attention_reference
from attnfuzz.inputs.registry import problem_of
from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase, decode_case, encode_case
from attnfuzz.problems.limits import case_nbytes
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.values import attention_values
from tests.common.named_features import words


def case(**more: Any) -> PagedAttentionCase:
    fields: dict[str, Any] = {
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "head_size": 8,
        "scale": 0.5,
        "block_size": 4,
        "dtype": "float32",
    }
    fields |= {"seq_lens": (7, 2, 0, 5, 3), "query_lens": (3, 1, 0, 0, 3), "values": Values(keys="normal", seed=2)}
    return PagedAttentionCase(**fields | more)


def test_rows_are_query_tokens_with_limits_of_their_own() -> None:
    """References, bounds and words about a result all count on these numbers."""
    one = case()
    assert one.num_rows == 7
    assert list(one.row_seqs) == [0, 0, 0, 1, 4, 4, 4]
    assert one.row_lens == (5, 6, 7, 2, 1, 2, 3)
    assert [list(one.rows_of(seq)) for seq in range(5)] == [[0, 1, 2], [3], [], [], [4, 5, 6]]
    assert one.cu_seqlens_q == (0, 3, 4, 4, 4, 7)


def test_a_kernel_gets_what_the_case_says() -> None:
    """A wrapper would be tested on other lengths or bounds than those that the result is compared for."""
    one = case(query_slack=2, seq_slack=9, strides={"cu_seqlens_q": "every_other"})
    inputs = problem_of(one).build(one, PlainAllocator(), Supports())
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 4, 4, 4, 7]
    assert inputs.cu_seqlens_q.stride() == (2,)
    assert inputs.seq_lens.tolist() == [7, 2, 0, 5, 3]
    assert (inputs.max_query_len, inputs.max_seq_len) == (5, 16)
    assert inputs.q.shape == inputs.out.shape == (7, 2, 8)
    assert inputs.lse.shape == (7, 2)


def test_padding_tokens_are_rows_that_nobody_has() -> None:
    """A kernel that takes the rows of q for query tokens would pass here and fail under a server's CUDA graphs."""
    one = case(padding_tokens=3)
    inputs = problem_of(one).build(one, PlainAllocator(), Supports())
    assert inputs.q.shape == inputs.out.shape == (10, 2, 8)
    assert inputs.lse.shape == (10, 2)
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 4, 4, 4, 7]
    assert inputs.q[:7].isfinite().all()
    assert inputs.q[7:].isnan().all()
    assert attention_reference(one, attention_values(one)).out.shape == (7, 2, 8)


def test_the_reference_is_masked_attention() -> None:
    """Everything would be measured against something else than causal attention."""
    one = case(pages=Pages(shared_blocks=1))
    values = attention_values(one)
    expected = attention_reference(one, values)
    first = 0
    for seq, (length, count) in enumerate(zip(one.seq_lens, one.query_lens, strict=True)):
        k, v = (part[:, 0].double() for part in values.sequence(seq))
        mask = torch.ones(count, length).tril(length - count).bool()  # the last query sees everything
        for head in range(2):
            scores = (values.q[first : first + count, head].double() @ k.T * 0.5).masked_fill(~mask, -math.inf)
            rows = slice(first, first + count)
            torch.testing.assert_close(expected.out[rows, head], scores.softmax(-1) @ v)
            torch.testing.assert_close(expected.lse[rows, head], scores.logsumexp(-1))
        first += count


def test_decode_is_the_special_case_of_one_query_each() -> None:
    """A kernel for both would be held to two different answers."""
    one = case(seq_lens=(7, 2, 5), query_lens=(1, 1, 1))
    fields = {name: getattr(one, name) for name in PagedDecodeCase.__struct_fields__}
    decode = PagedDecodeCase(**fields)
    values, of_decode = attention_values(one), attention_values(decode)
    assert torch.equal(values.q, of_decode.q)
    assert torch.equal(attention_reference(one, values).out, attention_reference(one, of_decode).out)


def test_without_causality_each_token_sees_its_whole_sequence() -> None:
    """References, bounds and kernels would disagree about an encoder's tokens."""
    one = case(causal=False)
    assert one.row_lens == (7, 7, 7, 2, 3, 3, 3)
    assert not problem_of(one).build(one, PlainAllocator(), Supports()).causal
    values = attention_values(one)
    k, v = (part[:, 0].double() for part in values.sequence(0))
    weights = (values.q[:3, 0].double() @ k.T * 0.5).softmax(-1)
    torch.testing.assert_close(problem_of(one).reference(one, values).out[:3, 0], weights @ v)


def test_no_kernel_is_given_what_is_not_causal_unless_it_declares_so() -> None:
    """A saved case would be blamed on every kernel that is causal alone."""
    assert "non_causal=False" in str(why_unsupported(Supports(), {}, case(causal=False)))
    assert why_unsupported(Supports(non_causal=True), {}, case(causal=False)) is None


def test_that_a_case_is_not_causal_stays_only_where_it_matters() -> None:
    """A finding would name a mask that has nothing to do with the bug, or lose the one that has."""
    supports = Supports(non_causal=True)
    one = case(causal=False)
    assert "non-causal" in words(features(one))

    def has_several(one: Any) -> bool:
        return bool(max(one.query_lens) > 1)

    found: Any = minimise(one, has_several, supports=supports, options={})
    assert (found.causal, found.query_lens) == (True, (2,))

    def sees_ahead(one: Any) -> bool:
        return not one.causal and max(one.query_lens) > 1

    found = minimise(one, sees_ahead, supports=supports, options={})
    assert (found.causal, found.seq_lens, found.query_lens) == (False, (2,), (2,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_lens": (3, 1)}, r"len\(query_lens\)=2 must be len\(seq_lens\)=5"),
        ({"query_lens": (3, 3, 0, 0, 3)}, r"query_lens\[1\]=3 must be between 0 and 2"),
        ({"query_lens": (-1, 1, 0, 0, 3)}, r"query_lens\[0\]=-1 must be between 0 and 7"),
        ({"query_lens": (0, 0, 0, 0, 0)}, r"sum\(query_lens\)=0 must be between 1 and"),
        ({"query_slack": -1}, r"query_slack=-1 must be between 0"),
        ({"seq_slack": -1}, r"seq_slack=-1 must be between 0"),
        ({"padding_tokens": -1}, r"padding_tokens=-1 must be between 0"),
    ],
)
def test_what_is_no_case(fields: Any, message: str) -> None:
    """A saved file with a slip would be run as something else, or fail deep inside a kernel."""
    with pytest.raises(ValueError, match=message):
        case(**fields)


def test_files_hold_all_of_it() -> None:
    """A finding could not be replayed."""
    one = case(query_slack=1, seq_slack=2, padding_tokens=3, values=Values(needles=(Needle(0, 5, 0),)))
    assert decode_case("paged_attention", encode_case(one)) == one
    assert b"slack" not in encode_case(case())
    assert b"padding" not in encode_case(case())


def test_more_query_tokens_need_more_memory() -> None:
    """A case of a long prompt would be allocated before anybody counts."""
    small, large = (case(seq_lens=(4096,), query_lens=(n,)) for n in (1, 4096))
    assert case_nbytes(large) - case_nbytes(small) >= 2 * 4095 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"seq_lens": (1,), "query_lens": (1,)}, set()),
        ({"seq_lens": (3,), "query_lens": (1,)}, {"context"}),
        ({"seq_lens": (3,), "query_lens": (3,)}, {"query_len>1"}),
        ({"seq_lens": (1, 1), "query_lens": (0, 1)}, {"no query", "ragged queries"}),
        ({"seq_lens": (1,), "query_lens": (1,), "seq_slack": 1}, {"slack"}),
        ({"seq_lens": (1,), "query_lens": (1,), "padding_tokens": 1}, {"padding tokens"}),
    ],
)
def test_features_of_queries(fields: Any, found: set[str]) -> None:
    """Bugs that need prefill, context or idle sequences would be told apart by chance only."""
    of_queries = {"context", "query_len>1", "no query", "ragged queries", "slack", "padding tokens"}
    assert words(features(case(**fields))) & of_queries == found


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, None),
        ({"max_query_len": 3}, None),
        ({"max_query_len": 2}, "the case has max_query_len=3, but the kernel declares at most 2"),
        ({"max_seq_len": 6}, "the case has max_seq_len=7, but the kernel declares at most 6"),
    ],
)
def test_what_a_kernel_supports(limits: Any, said: str | None) -> None:
    """A kernel for decode would be blamed for prefill."""
    assert why_unsupported(Supports(**limits), {}, case()) == said


def test_a_sequence_without_queries_is_a_contract() -> None:
    """A kernel that never meets one would be blamed for it."""
    one = case(seq_lens=(3, 2), query_lens=(3, 0))
    said = why_unsupported(Supports(empty_sequences=False), {}, one)
    assert said == "query_lens[1]=0, but the kernel declares empty_sequences=False"
