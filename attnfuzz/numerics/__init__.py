"""Derived error bounds: how far a correct kernel's result can be from the exact one, and not further.

Every rounding that a kernel may make is bounded, and their effects are carried through to the result
(Higham, Accuracy and Stability of Numerical Algorithms, ch. 3). Nothing is fitted: an error above its bound means that
the kernel computed something else. All arguments and results are float64 tensors on any device.
"""

from attnfuzz.numerics.arithmetic import half_smallest_subnormal as half_smallest_subnormal
from attnfuzz.numerics.arithmetic import unit_roundoff as unit_roundoff
from attnfuzz.numerics.bounds import Bound as Bound
from attnfuzz.numerics.bounds import attention_bound as attention_bound
from attnfuzz.numerics.bounds import error_ratio as error_ratio
from attnfuzz.numerics.bounds import merge_bound as merge_bound
