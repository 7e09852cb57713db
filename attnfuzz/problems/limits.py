"""How much memory a case needs, known before anything is allocated. Torch-free, integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.block_table import num_blocks, used_blocks
from attnfuzz.problems.module import Case, module_of
from attnfuzz.problems.open_cases import OpenCase, implementation_of
from attnfuzz.problems.shapes import ITEMSIZE, strided_layout, strides_of, tensor_specs

DEFAULT_LIMIT_BYTES = 1 << 30
LIST_LIMIT_BYTES = 128 << 20
"""Of what Python keeps as lists: that many take seconds to make, where tensors of the same size take none."""
HASH_CHUNK_ELEMENTS = 1 << 20
"""Values are drawn this many at a time (or one token at a time), so that 64-bit hash words stay a small part."""

_LISTED_NUMBER = 8 + 32

_COPIES_OF_OPEN = 8
"""Of all tensors of an open problem's case: those of two runs, one for the reference, and that in float64."""

BOUND_CHUNK_ELEMENTS = 1 << 22
"""The error bound looks at as many query heads at a time as give this many numbers, at least one."""


class CaseTooLarge(ValueError):  # noqa: N818 - says what the case is, as StopIteration does
    """The tensors of a case would not fit in the memory that a case may take."""


def tensor_nbytes(case: Case) -> int:
    """Bytes of all inputs and outputs, stride gaps included."""
    total = 0
    for name, spec in tensor_specs(case).items():
        itemsize = ITEMSIZE[spec.dtype]
        total += strided_layout(spec.shape, strides_of(case, name), itemsize).storage_elements * itemsize
    return total


def case_nbytes(case: Case) -> int:
    """Bytes for ``case``: inputs and outputs, logical values, and float64 work of the reference and of the error bound.

    Tensors are exact, the work is what was measured, within a factor of 2. Copies that oracles keep come on top. Of an
    open problem nothing is known where it is not imported: executors find out.
    """
    if not isinstance(case, OpenCase):
        return tensor_nbytes(case) + module_of(case.problem).nbytes(case)
    return 0 if implementation_of(case.problem) is None else _COPIES_OF_OPEN * tensor_nbytes(case)


def list_nbytes(case: Case) -> int:
    """Bytes for what is no tensor at first: lengths, rows, pages in their order, the block table.

    An entry of a list takes 8 bytes, and a number that is not small 32 of its own. The block table is held twice: row
    by row, and as one list on its way into a tensor.
    """
    if not isinstance(case, AttentionCase):
        return 0
    pages = table = 0
    if isinstance(case, PagedDecodeCase):
        pages = used_blocks(case)
        if case.pages.order == "shuffled" or case.pages.taken:  # spare ones too, with a key for each
            pages = 2 * num_blocks(case)
        entry = 16 if case.pages.padding != "wrong_page" else 16 + _LISTED_NUMBER
        table = entry * case.num_seqs * case.max_blocks_per_seq
    return 2 * _LISTED_NUMBER * (case.num_seqs + case.num_rows + pages) + table


def check_size(case: Case, limit: int = DEFAULT_LIMIT_BYTES) -> None:
    """Raise CaseTooLarge if ``case`` needs more than ``limit`` bytes, or lists of more than `LIST_LIMIT_BYTES`."""
    needed = case_nbytes(case)
    if needed > limit:
        raise CaseTooLarge(
            f"the case needs {_readable(needed)} ({needed} bytes) but the limit is {_readable(limit)}; "
            "shorten its sequences, lower its heads, head size or pages, or raise the memory limit"
        )
    check_lists([case])


def check_lists(cases: Iterable[Case]) -> None:
    """Raise CaseTooLarge if the lists of all ``cases`` together take more than they may."""
    listed = sum(map(list_nbytes, cases))
    if listed > LIST_LIMIT_BYTES:
        raise CaseTooLarge(
            f"lengths, pages and block tables take {_readable(listed)} as lists but the limit is "
            f"{_readable(LIST_LIMIT_BYTES)}; lower the sequences, table columns, pages or query tokens"
        )


def attention_nbytes(case: AttentionCase) -> int:
    """Bytes of an attention case beside those of its tensors."""
    return list_nbytes(case) + _logical_values(case) + _attention_work(case)


def _logical_values(case: AttentionCase) -> int:
    queries = case.num_rows * case.num_q_heads * case.head_size
    token = case.num_kv_heads * max(case.head_size, case.value_size)
    tokens = sum(case.seq_lens)
    hash_words = 3 * 8 * max(token, min(tokens * token, HASH_CHUNK_ELEMENTS))
    keys_and_values = tokens * case.num_kv_heads * (case.head_size + case.value_size)
    return ITEMSIZE[case.dtype] * (queries + keys_and_values) + hash_words + 2 * 8 * tokens


def _attention_work(case: AttentionCase) -> int:
    """Expected result; K, V and scores of the longest sequence in float64; a few intermediates of the error bound."""
    expected = 2 * case.num_rows * case.num_q_heads * (case.value_size + 1)
    longest = max(case.seq_lens)
    head = longest * max(case.head_size, case.value_size)
    reference = 2 * case.num_kv_heads * head + 6 * case.num_q_heads * longest
    bound = 6 * min(case.num_q_heads * head, max(head, BOUND_CHUNK_ELEMENTS))
    return 8 * (expected + reference + bound)


def _readable(nbytes: int) -> str:
    power = min(5, max(0, int(math.log2(max(1, nbytes))) // 10))
    return f"{nbytes / (1 << 10 * power):.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"
