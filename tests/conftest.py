"""Set up the test run: Triton's interpreter, and shapes checked in annotated signatures."""

from __future__ import annotations

import os

from jaxtyping import install_import_hook

pytest_plugins = ["pytester"]

# Read when triton is imported: here kernels are interpreted on every machine, executors choose for themselves.
os.environ["TRITON_INTERPRET"] = "1"

# Kernels are left out: the hook would decorate JIT functions, whose source Triton compiles.
CHECKED_MODULES = ["attnfuzz.problems", "attnfuzz.values", "attnfuzz.numerics", "attnfuzz.memory", "attnfuzz.oracles"]
install_import_hook(CHECKED_MODULES, "beartype.beartype")
