"""Checks of a strategy's arguments: each error names the value and the rule."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["check_bounds", "check_int", "check_one_of", "check_sizes"]


def check_int(name: str, value: object, *, low: int, high: int) -> None:
    """Raise ValueError unless ``value`` is an integer from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be an integer from {low} to {high}")


def check_bounds(name: str, least: int, most: int, *, low: int, high: int) -> None:
    """Check ``min_<name>`` and ``max_<name>`` and their order."""
    check_int(f"min_{name}", least, low=low, high=high)
    check_int(f"max_{name}", most, low=low, high=high)
    if least > most:
        raise ValueError(f"min_{name}={least!r} must not exceed max_{name}={most!r}; lower the one or raise the other")


def check_sizes(name: str, values: object, *, high: int, may_be_empty: bool = False) -> None:
    """Raise ValueError unless ``values`` is a tuple of integers from 1 to ``high``."""
    if not isinstance(values, tuple) or not (values or may_be_empty):
        raise ValueError(f"{name}={values!r} must be a {'' if may_be_empty else 'non-empty '}tuple of integers")
    for i, value in enumerate(values):
        check_int(f"{name}[{i}]", value, low=1, high=high)


def check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {tuple(allowed)}")
