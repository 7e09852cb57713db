"""The numbers in a case's tensors: exact in the case's dtype, and the same bits on every machine and device.

``attention`` fills q, K and V of the attention problems, ``states`` the two states of merge_states. Every number is
a small integer from ``attnfuzz.problems.hashing`` or from a formula, times a power of two: nothing is ever rounded.
"""

from attnfuzz.values.attention import LogicalAttention as LogicalAttention
from attnfuzz.values.attention import attention_values as attention_values
from attnfuzz.values.draws import numbers as numbers
from attnfuzz.values.states import LogicalStates as LogicalStates
from attnfuzz.values.states import merge_values as merge_values
