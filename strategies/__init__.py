"""Hypothesis strategies for hard inputs of decode-attention kernels; ``cases`` puts the parts together."""

from attnfuzz.strategies.cases import case_lists as case_lists
from attnfuzz.strategies.cases import cases as cases
from attnfuzz.strategies.formats import draw_formats as draw_formats
from attnfuzz.strategies.sizes import CPU_SIZES as CPU_SIZES
from attnfuzz.strategies.sizes import GPU_SIZES as GPU_SIZES
from attnfuzz.strategies.sizes import Sizes as Sizes
