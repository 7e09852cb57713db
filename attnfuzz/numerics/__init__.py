"""Derived error bounds: how far a correct kernel's result can be from the exact one, and not further.

Every rounding that a kernel may make is bounded, and their effects are carried through to the result
(Higham, Accuracy and Stability of Numerical Algorithms, ch. 3). Nothing is fitted: an error above its bound means that
the kernel computed something else. All arguments and results are float64 tensors on any device.
"""

from attnfuzz.numerics.attention import attention_bound as attention_bound
from attnfuzz.numerics.bound import Bound as Bound
from attnfuzz.numerics.error_ratio import error_ratio as error_ratio
from attnfuzz.numerics.merge import merge_bound as merge_bound
from attnfuzz.numerics.units import half_smallest_subnormal as half_smallest_subnormal
from attnfuzz.numerics.units import unit_roundoff as unit_roundoff

__all__ = ["Bound", "attention_bound", "error_ratio", "half_smallest_subnormal", "merge_bound", "unit_roundoff"]
