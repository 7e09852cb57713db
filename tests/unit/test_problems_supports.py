"""What a kernel declares is checked when it is declared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import attnfuzz
from attnfuzz.problems.supports import Supports


@pytest.mark.parametrize("name", ["empty_sequences", "deterministic", "batch_invariant", "graph_replay"])
def test_promises_are_true_or_false(name: str) -> None:
    """ "no" would count as a promise, and the kernel be blamed for not keeping it."""
    promise: dict[str, Any] = {name: "no"}
    with pytest.raises(ValueError, match=rf"Supports\({name}='no'\): must be True or False"):
        attnfuzz.Supports(**promise)


@pytest.mark.parametrize("declared", [{"empty_state_outputs": "nan"}, {"empty_state_lse": "-inf"}, {"strides": "gaps"}])
def test_contracts_are_one_of_a_few_words(declared: dict[str, Any]) -> None:
    """A misspelt contract would be held to be the default."""
    with pytest.raises(ValueError, match=rf"Supports\({next(iter(declared))}="):
        attnfuzz.Supports(**declared)


def test_what_was_saved_before_a_field_came_is_read() -> None:
    """A campaign begun with an older version could not be resumed."""
    new = {"empty_state_outputs", "empty_state_lse"}
    saved = {
        name: value for name, value in msgspec.to_builtins(attnfuzz.Supports(strides="any")).items() if name not in new
    }
    assert msgspec.convert(saved, attnfuzz.Supports) == attnfuzz.Supports(strides="any")


def test_a_graph_is_promised_by_those_only_who_say_so() -> None:
    """Kernels that wait for the device, as many do, would all fail."""
    assert not attnfuzz.Supports().graph_replay


@pytest.mark.parametrize("sizes", ["some", (), (0,), (2048,), [64], None])
def test_sizes_of_v_are_equal_any_or_numbers(sizes: Any) -> None:
    """Cases would be drawn for a kernel by a word that means nothing."""
    with pytest.raises(ValueError, match=r"Supports\(v_head_sizes"):
        attnfuzz.Supports(v_head_sizes=sizes)


def test_a_default_that_is_passed_is_a_promise() -> None:
    """Who writes down that sequences may be empty would have it inferred that they may not."""
    said = Supports(empty_sequences=True, dtypes=("float16",))
    assert [said.leaves_open(name) for name in ("empty_sequences", "dtypes", "strides")] == [False, False, True]
    assert said.declared() == {"dtypes": ("float16",), "empty_sequences": True}
    copied = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(said, lse="none")), type=Supports)
    assert not copied.leaves_open("empty_sequences")
    assert Supports().declared() == {}
