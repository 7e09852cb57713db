"""Set up the test run: Triton's interpreter, and shapes checked wherever a signature states them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

import attnfuzz

pytest_plugins = ["pytester"]

# Read when triton is imported: here kernels are interpreted on every machine, executors choose for themselves.
# `TRITON_INTERPRET=0 pytest tests/kernels` compiles them for a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; threads of tiny tensors only get in their way

# `nohup` and a shell's `&` have signals ignored; what tests start would ignore them too, but inherits no handler.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)

# Processes that tests start, and those of other folders above all, import the attnfuzz that is tested, whatever the
# environment's own paths name first.
_ROOT = os.fspath(Path(attnfuzz.__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *(path for path in _PATHS if path not in ("", _ROOT))])


def pytest_configure() -> None:
    """Refuse to test another attnfuzz than the one beside the tests, which would pass for it."""
    root, found = Path(__file__).resolve().parents[1], Path(attnfuzz.__file__).resolve().parent
    if found != (root / "attnfuzz").resolve():
        raise pytest.UsageError(
            f"these tests are of {root / 'attnfuzz'}, but `import attnfuzz` finds {found}; "
            f"set PYTHONPATH={root}, or install that one: pip install -e {root}"
        )


def _modules_with_shapes() -> Iterator[str]:
    """Only these are checked: beartype draws random numbers, which functions that strategies call may not."""
    package = Path(attnfuzz.__file__).parent
    for path in package.rglob("*.py"):
        if "from jaxtyping import" in path.read_text(encoding="utf-8"):
            yield ".".join((package.name, *path.relative_to(package).with_suffix("").parts))


install_import_hook(list(_modules_with_shapes()), "beartype.beartype")
