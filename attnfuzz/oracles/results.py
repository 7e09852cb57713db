"""What a kernel returned, by name, checked for shape, dtype and device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ResultError", "named_results"]


_PLAIN = (Tensor, torch.nn.Parameter)


class ResultError(Exception):
    """What the kernel returned cannot be a result; the message names what is wrong and what was expected."""


def named_results(returned: object, inputs: Any, names: tuple[str, ...], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Those of the results `names` that are `wanted`, the first of them; what was not returned is taken from `inputs`.

    Raises `ResultError`.
    """
    given = {name: getattr(inputs, name) for name in wanted}
    parts = _parts(returned, names)
    results = given | {name: part for name, part in zip(wanted, parts, strict=False) if part is not None}
    return {name: _checked(name, result, given[name]) for name, result in results.items()}


def _parts(returned: object, names: tuple[str, ...]) -> Sequence[object]:
    if returned is None or (isinstance(returned, Tensor) and names):
        return (returned,)
    if isinstance(returned, tuple | list) and 1 <= len(returned) <= len(names):
        return returned
    if len(names) != 2:
        raise ResultError(
            f"the kernel returned {returned!r:.80}; it must return {', '.join(names) or 'nothing'}, or None after "
            f"writing into {', '.join(f'inputs.{name}' for name in names) or 'its inputs'}"
        )
    shown = f"{type(returned).__name__} of {len(returned)}" if isinstance(returned, tuple | list) else repr(returned)
    raise ResultError(
        f"the kernel returned {shown[:80]}; it must return ({names[0]}, {names[1]}), only {names[0]}, "
        f"or None after writing into inputs.{names[0]} and inputs.{names[1]}"
    )


def _checked(name: str, result: object, given: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or not issubclass(type(result), Tensor):  # __class__ may be the kernel's code
        raise ResultError(f"the kernel returned {result!r:.80} as {name}; it must be a tensor")
    if type(result) not in _PLAIN:
        raise ResultError(
            f"{name} is a {type(result).__name__:.80}, a subclass of torch.Tensor, which may compute what it holds "
            "only when somebody looks; return a plain tensor"
        )
    if result.shape != given.shape:
        raise ResultError(f"{name} has shape {tuple(result.shape)}; it must have {tuple(given.shape)}")
    if result.dtype != given.dtype and not (name == "partial_out" and result.dtype is torch.float32):
        raise ResultError(f"{name} has dtype {_short(result.dtype)}; it must have {_short(given.dtype)}")
    if result.device.type != given.device.type:
        raise ResultError(f"{name} is on {result.device}; it must be on {given.device}")
    return result.detach()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
