"""The user's default device and dtype neither break attnfuzz nor change what it draws, says or shrinks to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.explaining.explain import explain_case
from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.judging.runner import Runner
from attnfuzz.memory.patterns import bits
from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import Case, MergeStatesCase, PagedAttentionCase, PagedDecodeCase, Problem
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import KEY_RECIPES, LSE_KINDS, STATE_RECIPES, VALUE_RECIPES, Needle, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant
from attnfuzz.verdict import Timing, Verdict

T = TypeVar("T")
Defaults = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Defaults] = {
    "meta": lambda: torch.device("meta"),  # whatever is made there by mistake has no numbers, as if on a wrong GPU
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
}
KERNELS = {
    "dense_eager": "dense",
    "paged_eager": "paged",
    "split_k_partials_eager": "split",
    "paged_attention_eager": "queries",
    "merge_states_eager": "states",
    "merge_many_th": "states",
}


def same_everywhere(look: Callable[[], T], name: Callable[[T], Any] = lambda seen: seen) -> T:
    """What is seen without defaults, which must be the same under each of them; ``name`` makes it comparable."""
    expected = look()
    for defaults in DEFAULTS.values():
        with defaults():
            seen = look()
        assert name(seen) == name(expected)
    return expected


def verdicts(found: list[Verdict]) -> list[Verdict]:
    return [msgspec.structs.replace(verdict, timing=Timing()) for verdict in found]


def bundled(name: str, case: Case) -> tuple[Kernel, Case]:
    (kernel,) = load_kernels(name)
    options = {option: choices[0] for option, choices in kernel.declaration.options.items()}
    layout = {"lse_layout": "TH"} if name.endswith("_th") else {}
    return kernel, msgspec.structs.replace(case, options=options, **layout)


def hard(case: Case) -> list[Case]:
    """With what takes tensors of its own: variants, needles, an 8-bit cache."""
    if not isinstance(case, PagedDecodeCase):
        return [case]
    values = Values(keys="falling", values="normal", needles=(Needle(seq=2, position=3, kv_head=1),), seed=9)
    sinks: dict[str, Any] = {} if case.problem == "split_decode" else {"sinks": "high"}
    changed: list[dict[str, Any]] = [
        {"variant": Variant(window=3, alibi="geometric", **sinks), "values": values},
        {"kv": QuantisedKv(dtype="float8_e4m3fn", per="head", scales="scattered"), "head_size": 16},
    ]
    return [msgspec.structs.replace(case, **fields) for fields in changed]


def numbers(value: Any) -> Any:
    """Of all tensors in it device, dtype and bits, which compare as they are; NaN does not."""
    if isinstance(value, Tensor):
        return str(value.device), value.dtype, tuple(value.shape), bits(value.contiguous()).tolist()
    if dataclasses.is_dataclass(value):
        return [numbers(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [numbers(part) for part in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.by_day("paged_eager", "merge_many_th")
def test_verdicts_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """A suite whose conftest sets a default device would see attnfuzz fail, or a right kernel be accused."""
    kernel, case = bundled(name, request.getfixturevalue(KERNELS[name]))
    seen = same_everywhere(
        lambda: [judge(kernel, one, device="cpu", relations="all") for one in hard(case)], name=verdicts
    )
    assert [verdict.failure for verdict in seen] == [None] * len(seen)
    assert all(verdict.error_ratio > 0 for verdict in seen)


@pytest.mark.parametrize("name", ["paged_eager", "merge_states_eager"])
def test_verdicts_on_many_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """A campaign would judge otherwise than a single check."""
    kernel, case = bundled(name, request.getfixturevalue(KERNELS[name]))
    seen = same_everywhere(
        lambda: judge_batch(kernel, [case, *hard(case)], device="cpu", relations=None), name=verdicts
    )
    assert [verdict.failure for verdict in seen] == [None] * len(seen)


def test_interpreted_kernels_are_the_same(paged: PagedDecodeCase) -> None:
    """Triton's interpreter, its repairs or the wrappers of the bundled kernels would make tensors somewhere else."""
    kernel, case = bundled("paged_split_k", paged)
    (seen,) = same_everywhere(lambda: [judge(kernel, case, device="cpu", relations=())], name=verdicts)
    assert seen.failure is None


@pytest.mark.parametrize("fixture", ["dense", "paged", "split", "queries"])
def test_numbers_of_all_recipes_are_the_same(fixture: str, request: pytest.FixtureRequest) -> None:
    """Saved cases would be rebuilt with other numbers, or not at all."""
    case = request.getfixturevalue(fixture)
    recipes: list[Any] = [*zip(KEY_RECIPES, itertools.cycle(VALUE_RECIPES)), ("normal", "large")]
    values = [Values(keys=keys, values=of_v, seed=i) for i, (keys, of_v) in enumerate(recipes)]
    check_numbers([msgspec.structs.replace(one, values=each) for one in hard(case)[-1:] for each in values])
    check_numbers(hard(case))


def test_states_of_all_kinds_are_the_same(states: MergeStatesCase) -> None:
    """As for the other problems, with numbers for LSEs."""
    pairs: Any = tuple(itertools.product(LSE_KINDS, repeat=2))
    check_numbers([msgspec.structs.replace(states, lse_pairs=pairs, outputs=recipe) for recipe in STATE_RECIPES])


def check_numbers(cases: Sequence[Case]) -> None:
    problem = problem_of(cases[0])
    together = same_everywhere(lambda: problem.contents(cases, "cpu", Supports()), name=numbers)
    alone = same_everywhere(lambda: [problem.values(case, "cpu", Supports()) for case in cases], name=numbers)
    assert numbers([contents.values for contents in together]) == numbers(alone)
    pairs = [*zip(cases, alone, strict=True)]
    same_everywhere(lambda: [problem.reference(case, values) for case, values in pairs], name=numbers)
    allocator = PlainAllocator("cpu")
    same_everywhere(
        lambda: [problem.build(case, allocator, Supports(), values) for case, values in pairs], name=numbers
    )


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "a token too few": ("paged", {"length": lambda n: max(0, n - 1)}),
    "a token too many": ("dense", {"length": lambda n: n + 1 if n else 0}),
    "another head": ("queries", {"kv_head": lambda head, group: 0}),
    "scale": ("split", {"score": lambda scores: 1.5 * scores}),
    "weights": ("states", {"weights": lambda scores: torch.full_like(scores, 1 / len(scores))}),
    "base": ("states", {"lse": lambda scores: scores.logsumexp(0) * 1.5}),
}
PROBLEMS: dict[str, Problem] = {
    "dense": "dense_decode",
    "paged": "paged_decode",
    "split": "split_decode",
    "queries": "paged_attention",
    "states": "merge_states",
}


@pytest.mark.night
@pytest.mark.parametrize("mistake", MISTAKES)
def test_failures_are_told_in_the_same_words(mistake: str, plant: Any, request: pytest.FixtureRequest) -> None:
    """A diagnosis or an explanation would break, or name another mistake."""
    fixture, bug = MISTAKES[mistake]
    fields: dict[str, dict[str, Any]] = {
        "split": {"seq_lens": (3, 0, 5), "num_splits": 2},
        "queries": {"seq_lens": (4, 0, 5), "query_lens": (2, 0, 5)},
    }
    case = msgspec.structs.replace(request.getfixturevalue(fixture), **fields.get(fixture, {}))
    check_words(plant(PROBLEMS[fixture], **bug), case)


@pytest.mark.night
def test_a_slope_of_another_head_is_told_in_the_same_words(paged: PagedDecodeCase) -> None:
    """Distances are integers: times a slope they would be rounded to the default dtype."""
    (right,) = load_kernels("paged_eager")

    def exchanged(inputs: Any) -> Any:
        return right(dataclasses.replace(inputs, alibi_slopes=inputs.alibi_slopes.flip(0)))

    case = msgspec.structs.replace(paged, variant=Variant(alibi="geometric"))
    assert "slope is that of query head" in check_words(Kernel(exchanged, right.declaration), case)


def check_words(kernel: Kernel, case: Case) -> str:
    failure = same_everywhere(lambda: judge(kernel, case, device="cpu").failure)
    assert failure is not None
    oracle = failure.oracle
    told = same_everywhere(lambda: explain_case(kernel, case, device="cpu", seconds=60, oracle=oracle))
    assert told.lines
    assert not [line for line in told.lines if "could not explain" in line]
    return failure.message


@pytest.mark.night
def test_a_failure_shrinks_to_the_same_case(plant: Any, queries: PagedAttentionCase) -> None:
    """A finding would be saved as another case, or not shrink at all."""
    kernel = plant("paged_attention", length=lambda n: n - (n > 3))

    def fails(case: Case) -> bool:
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",)).failure
        return failure is not None and "dropped" in failure.message

    small: Any = same_everywhere(lambda: minimise(queries, fails, supports=kernel.declaration.supports, options={}))
    assert small.seq_lens == (4,)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.by_day("meta", "float16")
def test_check_in_this_process(name: str, paged: PagedDecodeCase, plant: Any) -> None:
    """The call that test suites make would fail for reasons of its own."""
    one_head = plant("paged_decode", kv_head=lambda head, group: 0)
    with DEFAULTS[name]():
        attnfuzz.check(plant("paged_decode"), paged, device="cpu", isolated=False)
        with pytest.raises(attnfuzz.KernelFailure, match="KV head 0"):
            attnfuzz.check(one_head, paged, device="cpu", isolated=False)


@pytest.mark.parametrize("name", DEFAULTS)
def test_kernels_go_on_seeing_the_defaults(name: str, plant: Any, paged: PagedDecodeCase) -> None:
    """A kernel that relies on them would be tested under others than it runs under."""
    seen = set()

    def look(inputs: Any) -> None:
        made = torch.empty(1)
        seen.add((str(made.device), str(made.dtype).removeprefix("torch.")))

    with DEFAULTS[name]():
        verdict = judge(plant("paged_decode", before=look), paged, device="cpu", relations="all")
    assert verdict.failure is None
    assert seen == {(name if name == "meta" else "cpu", "float32" if name == "meta" else name)}


def test_a_module_may_set_them(paged: PagedDecodeCase) -> None:
    """Importing a kernel whose module sets defaults would break the executor that judges it."""
    with Runner(device="cpu") as runner:
        right, wrong = runner.declarations([str(Path(__file__).with_name("defaulting_kernels.py"))])
        assert runner.judge(right, paged, relations="all").failure is None
        failure = runner.judge(wrong, paged, relations="all", inquire=True).failure
        assert failure is not None
        assert "token 4 (page 0, offset 4) of sequence 0 is dropped" in failure.message
        explanation = runner.explain(wrong, paged, seconds=60, oracle="accuracy")
        assert explanation is not None
        assert any("token 4 (page 0, offset 4) has weight 0, expected" in line for line in explanation.lines)
