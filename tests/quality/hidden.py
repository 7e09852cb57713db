"""Cases that show nothing: `python -m tests.quality.hidden` counts those whose bound lets a doubled output pass.

Scores that are too large err by so much that any mixture of values is within the bound. Counted are cases as a search
draws them for the bundled kernels, with the bounds of a GPU, where threads may hold copies of a score. A sink may take
all weight of a row, whose output is 0 then, doubled or not: such cases are left out.
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import torch

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.cases import DenseDecodeCase, PagedAttentionCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES, Sizes
from attnfuzz.testing.loading import load_here
from attnfuzz.trials.expectations import expectations
from tests.common.drawing import drawn_cases

KERNELS = ("dense_naive", "paged_naive", "paged_split_k", "paged_grouped", "paged_attention_v2", "split_k_partials",
           "paged_attention_q_block", "paged_attention_segments")  # fmt: skip
SIZES: dict[str, Sizes] = {"CPU": CPU_SIZES, "GPU": GPU_SIZES}
Attention = DenseDecodeCase | PagedDecodeCase | SplitDecodeCase | PagedAttentionCase
_AT_ONCE = 8
_MOST_NUMBERS = 2_000_000
"""Of tokens x query heads x head size: larger cases take seconds each."""


def hidden(name: str, sizes: Sizes, count: int, *, declared: bool = False) -> Iterator[tuple[Attention, bool]]:
    """Up to `count` cases of the kernel `name` with numbers in their result, and whether each hides a doubled output.

    `declared`: with the numerics that the kernel declares, and else with none.
    """
    declaration = load_here(name).declaration
    declaration = declaration if declared else msgspec.structs.replace(declaration, numerics=Numerics())
    drawn = [case for case in _drawn(declaration, sizes, count) if _numbers(case) <= _MOST_NUMBERS]
    for start in range(0, len(drawn), _AT_ONCE):
        part = drawn[start : start + _AT_ONCE]
        requests = [(declaration, case, problem_of(case).values(case, "cpu", declaration.supports)) for case in part]
        found = expectations(requests, tolerance="bound", one_copy=False)
        for case, expectation in zip(part, found, strict=True):
            out = expectation.expected.out.abs()
            if bool((out > 0).any()):
                yield case, bool((out <= expectation.bound.out).all())


def _drawn(declaration: Declaration, sizes: Sizes, count: int) -> Sequence[Attention]:
    supports, options = declaration.supports, declaration.options
    drawn = drawn_cases(declaration.problem, count, supports=supports, options=options, sizes=sizes)
    return [case for case in drawn if case.variant.sinks is None]


def _numbers(case: Attention) -> int:
    return sum(case.seq_lens) * case.num_q_heads * max(case.head_size, case.value_size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.hidden", description=__doc__)
    parser.add_argument("--cases", type=int, default=800, help="of each kernel and each of both sizes")
    count = parser.parse_args().cases
    today = datetime.date.today().isoformat()
    print(f"`python -m tests.quality.hidden --cases {count}`, torch {torch.__version__}, {today}\n")
    print("| sizes | declared | cases | hide a doubled output | by recipe of keys |")
    print("|---|---|---:|---:|---|")
    for device, sizes in SIZES.items():
        for declared in (False, True):
            total, by_recipe = 0, Counter[str]()
            for name in KERNELS:
                for case, is_hidden in hidden(name, sizes, count, declared=declared):
                    total += 1
                    by_recipe[case.values.keys] += is_hidden
            recipes = ", ".join(f"{recipe} {number}" for recipe, number in by_recipe.items() if number)
            print(
                f"| {device} | {'yes' if declared else 'no'} | {total} | {by_recipe.total()} | {recipes} |", flush=True
            )


if __name__ == "__main__":
    main()
