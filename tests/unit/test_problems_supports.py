"""What a kernel declares is checked when it is declared."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz


@pytest.mark.parametrize("name", ["empty_sequences", "deterministic", "batch_invariant", "graph_replay"])
def test_promises_are_true_or_false(name: str) -> None:
    """ "no" would count as a promise, and the kernel be blamed for not keeping it."""
    promise: dict[str, Any] = {name: "no"}
    with pytest.raises(ValueError, match=rf"Supports\({name}='no'\): must be True or False"):
        attnfuzz.Supports(**promise)


def test_a_graph_is_promised_by_those_only_who_say_so() -> None:
    """Kernels that wait for the device, as many do, would all fail."""
    assert not attnfuzz.Supports().graph_replay


@pytest.mark.parametrize("sizes", ["some", (), (0,), (2048,), [64], None])
def test_sizes_of_v_are_equal_any_or_numbers(sizes: Any) -> None:
    """Cases would be drawn for a kernel by a word that means nothing."""
    with pytest.raises(ValueError, match=r"Supports\(v_head_sizes"):
        attnfuzz.Supports(v_head_sizes=sizes)
