"""attnfuzz: differential testing and fuzzing of LLM decode-attention kernels.

Importing it loads neither torch nor triton nor hypothesis; each public name is imported when it is first used.
"""

import importlib

# Nothing else is imported here: `python -m attnfuzz` has the working directory first on its path until `__main__` runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from attnfuzz.adapters.engine import Engine as Engine
    from attnfuzz.bundled.own_paged import PagedProblem as PagedProblem
    from attnfuzz.declaration import Kernel as Kernel
    from attnfuzz.declaration import kernel as kernel
    from attnfuzz.numerics.own import attention as attention
    from attnfuzz.numerics.own import rounding as rounding
    from attnfuzz.oracles.own import Run as Run
    from attnfuzz.oracles.own import oracle as oracle
    from attnfuzz.problems.cases import DenseDecodeCase as DenseDecodeCase
    from attnfuzz.problems.cases import LatentDecodeCase as LatentDecodeCase
    from attnfuzz.problems.cases import MaskedAttentionCase as MaskedAttentionCase
    from attnfuzz.problems.cases import MergeStatesCase as MergeStatesCase
    from attnfuzz.problems.cases import PagedAttentionCase as PagedAttentionCase
    from attnfuzz.problems.cases import PagedDecodeCase as PagedDecodeCase
    from attnfuzz.problems.cases import SplitDecodeCase as SplitDecodeCase
    from attnfuzz.problems.declared_numerics import FixedTolerance as FixedTolerance
    from attnfuzz.problems.declared_numerics import Numerics as Numerics
    from attnfuzz.problems.fields import Choice as Choice
    from attnfuzz.problems.fields import Integer as Integer
    from attnfuzz.problems.fields import Integers as Integers
    from attnfuzz.problems.fields import Seed as Seed
    from attnfuzz.problems.own import Expected as Expected
    from attnfuzz.problems.own import Problem as Problem
    from attnfuzz.problems.shapes import TensorSpec as TensorSpec
    from attnfuzz.problems.supports import Supports as Supports
    from attnfuzz.testing import KernelFailure as KernelFailure
    from attnfuzz.testing import check as check
    from attnfuzz.testing import fuzz as fuzz
    from attnfuzz.testing.capture import capture as capture
    from attnfuzz.testing.closeness import assert_close as assert_close
    from attnfuzz.values.draws import numbers as numbers

__version__ = "0.1.0"

_HOMES = {
    "Choice": "attnfuzz.problems.fields",
    "DenseDecodeCase": "attnfuzz.problems.cases",
    "Engine": "attnfuzz.adapters.engine",
    "Expected": "attnfuzz.problems.own",
    "FixedTolerance": "attnfuzz.problems.declared_numerics",
    "Integer": "attnfuzz.problems.fields",
    "Integers": "attnfuzz.problems.fields",
    "Kernel": "attnfuzz.declaration",
    "KernelFailure": "attnfuzz.testing",
    "LatentDecodeCase": "attnfuzz.problems.cases",
    "MaskedAttentionCase": "attnfuzz.problems.cases",
    "MergeStatesCase": "attnfuzz.problems.cases",
    "Numerics": "attnfuzz.problems.declared_numerics",
    "PagedAttentionCase": "attnfuzz.problems.cases",
    "PagedDecodeCase": "attnfuzz.problems.cases",
    "PagedProblem": "attnfuzz.bundled.own_paged",
    "Problem": "attnfuzz.problems.own",
    "Run": "attnfuzz.oracles.own",
    "Seed": "attnfuzz.problems.fields",
    "SplitDecodeCase": "attnfuzz.problems.cases",
    "Supports": "attnfuzz.problems.supports",
    "TensorSpec": "attnfuzz.problems.shapes",
    "assert_close": "attnfuzz.testing.closeness",
    "attention": "attnfuzz.numerics.own",
    "capture": "attnfuzz.testing.capture",
    "check": "attnfuzz.testing",
    "fuzz": "attnfuzz.testing",
    "kernel": "attnfuzz.declaration",
    "numbers": "attnfuzz.values.draws",
    "oracle": "attnfuzz.oracles.own",
    "rounding": "attnfuzz.numerics.own",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'attnfuzz' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
