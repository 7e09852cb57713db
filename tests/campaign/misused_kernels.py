"""Kernels that never give a result, each for a mistake that people make when they write their first."""
# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

import sys

import torch

import attnfuzz
from attnfuzz.kernels import eager

SMALL = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,))


def right(inputs):
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("dense_decode", supports=SMALL, options={"num_splits": (1, 2)})
def misspelt(inputs, num_split):
    return right(inputs)


@attnfuzz.kernel("dense_decode", supports=SMALL, options={"num_splits": (1, 2)})
def without_options(inputs):
    return right(inputs)


@attnfuzz.kernel("dense_decode", supports=SMALL)
def separate_tensors(q, k, v, seq_lens):
    return eager.dense_decode(q, k, v, seq_lens, 1.0)


@attnfuzz.kernel("dense_decode", supports=SMALL)
def other_name(inputs):
    return right(inputs), inputs.seq_len


@attnfuzz.kernel("dense_decode", supports=SMALL)
def elsewhere(inputs):
    return right(inputs)[0] + torch.zeros(1).cuda()


@attnfuzz.kernel("dense_decode", supports=SMALL)
def lse_elsewhere(inputs):
    out, lse = right(inputs)
    return out, torch.empty_like(lse, device="meta")  # which no machine lacks, as it may lack a GPU


@attnfuzz.kernel("dense_decode", supports=SMALL)
def out_elsewhere(inputs):
    return torch.empty_like(inputs.out, device="meta")


@attnfuzz.kernel("dense_decode", supports=SMALL)
def lse_of_long_elsewhere(inputs):
    out, lse = right(inputs)
    return out, lse if inputs.k.shape[1] < 8 else torch.empty_like(lse, device="meta")


@attnfuzz.kernel("dense_decode", supports=SMALL)
def swapped(inputs):
    return right(inputs)[::-1]


@attnfuzz.kernel("dense_decode", supports=SMALL)
def in_float64(inputs):
    return right(inputs)[0].double()


@attnfuzz.kernel("dense_decode", supports=SMALL)
def flattened(inputs):
    return right(inputs)[0].flatten(1)


@attnfuzz.kernel("dense_decode", supports=SMALL)
def leaves(inputs):
    sys.exit(3)


@attnfuzz.kernel("dense_decode", supports=SMALL)
def fine(inputs):
    return right(inputs)


@attnfuzz.kernel("paged_decode", supports=SMALL)
def of_three_pages(inputs):
    third_page = inputs.block_table[:, 2]
    assert third_page is not None
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout")
    return eager.paged_decode(**{name: getattr(inputs, name) for name in names})


@attnfuzz.kernel("dense_decode", supports=SMALL)
def sometimes(inputs):
    if inputs.q.shape[0] > 1:
        return inputs.seq_len
    return right(inputs)
