"""Hypothesis strategies for hard inputs of decode-attention kernels; ``cases`` puts the parts together."""

from attnfuzz.strategies.cases import case_lists as case_lists
from attnfuzz.strategies.cases import cases as cases
from attnfuzz.strategies.formats import draw_formats as draw_formats
from attnfuzz.strategies.heads import gqa_heads as gqa_heads
from attnfuzz.strategies.heads import head_sizes as head_sizes
from attnfuzz.strategies.launch import option_choices as option_choices
from attnfuzz.strategies.launch import split_counts as split_counts
from attnfuzz.strategies.lengths import seq_lens as seq_lens
from attnfuzz.strategies.lse import lse_pairs as lse_pairs
from attnfuzz.strategies.needles import needles as needles
from attnfuzz.strategies.pages import block_sizes as block_sizes
from attnfuzz.strategies.pages import page_maps as page_maps
from attnfuzz.strategies.quantised_kv import quantised_kvs as quantised_kvs
from attnfuzz.strategies.sizes import CPU_SIZES as CPU_SIZES
from attnfuzz.strategies.sizes import GPU_SIZES as GPU_SIZES
from attnfuzz.strategies.sizes import Sizes as Sizes
from attnfuzz.strategies.strides import strides as strides
from attnfuzz.strategies.values import scales as scales
from attnfuzz.strategies.values import values as values
from attnfuzz.strategies.variants import variants as variants

__all__ = [
    "CPU_SIZES",
    "GPU_SIZES",
    "Sizes",
    "block_sizes",
    "case_lists",
    "cases",
    "draw_formats",
    "gqa_heads",
    "head_sizes",
    "lse_pairs",
    "needles",
    "option_choices",
    "page_maps",
    "quantised_kvs",
    "scales",
    "seq_lens",
    "split_counts",
    "strides",
    "values",
    "variants",
]
