"""attnfuzz.config_rules: every key has a rule whose own example keeps it."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from attnfuzz.config import Settings
from attnfuzz.config_rules import RULES


@pytest.mark.parametrize("key", RULES)
def test_the_example_in_the_remedy_is_valid(key: str) -> None:
    """Whoever does what the error says would get the next error."""
    value = tomllib.loads(f"{key} = {RULES[key].example}")[key]
    assert RULES[key].convert(value) is not None


def test_every_key_is_a_setting() -> None:
    """A key that is valid but has no place to go could not be used."""
    assert set(RULES) == {field.name for field in msgspec.structs.fields(Settings)} - {"profile", "file"}
