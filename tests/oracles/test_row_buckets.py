"""Buckets of rows: everything is in one, and neither padding nor memory exceeds its limit."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from attnfuzz.trials.row_batches import Bucket, RowBlockSize, buckets

SIZES = st.builds(
    RowBlockSize,
    num_tokens=st.integers(1, 300),
    head_size=st.sampled_from([1, 16, 80, 256]),
    group=st.integers(1, 8),
    num_rows=st.integers(1, 8),
)


def elements(size: RowBlockSize) -> int:
    return size.num_tokens * size.head_size * size.group * size.num_rows


def padded(bucket: Bucket) -> int:
    return bucket.row_elements * bucket.num_rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(SIZES, max_size=40), st.integers(0, 100_000), st.integers(1, 2_000_000))
def test_every_block_fits_its_bucket(sizes: list[RowBlockSize], most_padding: int, most_elements: int) -> None:
    """A sequence would be cut off or left out, or a batch would take more time or memory than was meant."""
    found = buckets(sizes, most_padding=most_padding, most_elements=most_elements)
    assert sorted(itertools.chain.from_iterable(bucket.blocks for bucket in found)) == list(range(len(sizes)))
    for bucket in found:
        own = [sizes[block] for block in bucket.blocks]
        assert bucket.num_rows == sum(size.num_rows for size in own)
        for field in ("num_tokens", "head_size", "group"):
            assert getattr(bucket, field) == max(getattr(size, field) for size in own)
        assert padded(bucket) - sum(map(elements, own)) <= most_padding * (len(own) - 1)
        assert padded(bucket) <= max(most_elements, elements(own[0]))


def test_equal_sizes_share_a_bucket_without_any_padding() -> None:
    """Sequences of one size would each pay for the launches of a bucket."""
    sizes = [RowBlockSize(7, 16, 2, 4), RowBlockSize(300, 64, 1, 1), RowBlockSize(7, 16, 2, 1)]
    found = buckets(sizes, most_padding=0, most_elements=10**9)
    assert [bucket.blocks for bucket in found] == [[1], [0, 2]]


def test_the_bucket_with_least_padding_is_taken() -> None:
    """Short sequences would be padded to long ones although there are others of their size."""
    sizes = [RowBlockSize(100, 16, 1, 1), RowBlockSize(50, 16, 1, 1), RowBlockSize(49, 16, 1, 1)]
    found = buckets(sizes, most_padding=16 * 49, most_elements=10**9)
    assert [bucket.blocks for bucket in found] == [[0], [1, 2]]
