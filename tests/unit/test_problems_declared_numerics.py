"""What a kernel may declare about its arithmetic."""

from __future__ import annotations

import sys
from subprocess import run
from typing import Any

import msgspec
import pytest

from attnfuzz.problems.declared_numerics import Numerics


def test_undeclared_means_the_loosest_but_not_tf32() -> None:
    """A kernel that declares nothing must not be reported for rounding its weights, nor excused for TF32."""
    assert (Numerics().probabilities, Numerics().partials, Numerics().matmul) == ("input", "input", "tensor_core")


@pytest.mark.parametrize("field", ["probabilities", "partials", "matmul"])
def test_unknown_values_are_refused_with_the_choices(field: str) -> None:
    """A misspelt declaration must not silently mean something else."""
    wrong: dict[str, Any] = {field: "fp32"}
    with pytest.raises(ValueError, match=rf"Numerics: {field}='fp32' must be one of '\w+'"):
        Numerics(**wrong)


def test_a_declaration_survives_json_and_unknown_fields_do_not() -> None:
    """Declarations cross a pipe as JSON; a field from another version must be an error, not be dropped."""
    declared = Numerics(probabilities="float32", matmul="tf32")
    assert msgspec.json.decode(msgspec.json.encode(declared), type=Numerics) == declared
    with pytest.raises(msgspec.ValidationError, match="unknown field `accumulator`"):
        msgspec.json.decode(b'{"accumulator": "float16"}', type=Numerics)


def test_declarations_do_not_import_torch() -> None:
    """The driver and the command line read declarations and must start without loading torch."""
    code = "import sys, attnfuzz.problems.declared_numerics; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
