"""All operators by name, and what each is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from attnfuzz.mutation.operators import addresses, control, launches, masks, softmax
from attnfuzz.mutation.source import Change, Function

__all__ = ["KERNEL_OPERATORS", "LAUNCH_OPERATORS", "OPERATOR_NAMES", "changes"]

Operator = Callable[[Function], Iterator[Change]]

KERNEL_OPERATORS: Mapping[str, Operator] = {
    "mask_term": masks.mask_term,
    "mask_dropped": masks.mask_dropped,
    "comparison": masks.comparison,
    "bound": masks.bound,
    "other": masks.other,
    "masked_value": masks.masked_value,
    "swap_strides": addresses.swap_strides,
    "other_stride": addresses.other_stride,
    "index": addresses.index,
    "div_mod": addresses.div_mod,
    "rounding": addresses.rounding,
    "int64": addresses.int64,
    "initial_value": softmax.initial_value,
    "rescale": softmax.rescale,
    "update": softmax.update,
    "exp_base": softmax.exp_base,
    "min_max": softmax.min_max,
    "sign": softmax.sign,
    "scale": softmax.scale,
    "precision": softmax.precision,
    "axis": softmax.axis,
    "normalisation": softmax.normalisation,
    "range_bound": control.range_bound,
    "guard": control.guard,
    "store": control.store,
}
"""For functions that Triton compiles."""

LAUNCH_OPERATORS: Mapping[str, Operator] = {
    "grid_order": launches.grid_order,
    "launch_arguments": launches.launch_arguments,
    "launch_condition": launches.launch_condition,
    "launch_strides": launches.launch_strides,
}
"""For functions that launch them."""

OPERATOR_NAMES = (*KERNEL_OPERATORS, *LAUNCH_OPERATORS)


def changes(function: Function) -> Iterator[tuple[str, Change]]:
    """Every change that an operator makes to a function, with the operator's name."""
    operators: Mapping[str, Operator] = {}
    if function.is_kernel:
        operators = KERNEL_OPERATORS
    elif launches.is_launch_code(function):
        operators = LAUNCH_OPERATORS
    for name, operator in operators.items():
        yield from ((name, change) for change in operator(function))
