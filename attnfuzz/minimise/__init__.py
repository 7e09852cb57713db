"""Reducing a failing case to the smallest one that still fails. Torch-free.

``minimise`` knows what a case means: it drops sequences, moves lengths to the next boundary, rescales pages and lengths
together. Hypothesis only sees choices, and needs many more runs of a kernel that may take seconds to fail.
"""

from attnfuzz.minimise.reduction import minimise as minimise
from attnfuzz.minimise.reduction import simplifications as simplifications
from attnfuzz.minimise.size import size_key as size_key

__all__ = ["minimise", "simplifications", "size_key"]
