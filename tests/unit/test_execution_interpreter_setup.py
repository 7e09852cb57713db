"""attnfuzz.execution.interpreter_setup: what is done to Triton's interpreter, and where."""

from __future__ import annotations

import pytest

from attnfuzz.execution import interpreter_setup


@pytest.mark.parametrize(("interpreted", "done"), [("1", 3), ("0", 0), (None, 0)])
def test_only_kernels_that_are_interpreted_need_it(
    interpreted: str | None, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors on a GPU would import the interpreter for nothing, or those on a CPU judge by one that is wrong."""
    called: list[str] = []
    for name in ("install_fast_patching", "install_shortcuts", "install_repairs"):
        monkeypatch.setattr(interpreter_setup, name, lambda name=name: called.append(name))
    if interpreted is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    interpreter_setup.set_up_interpreter()
    assert len(set(called)) == done
