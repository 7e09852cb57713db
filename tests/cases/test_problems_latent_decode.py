"""latent_decode: V is a part of K, in numbers, memory, declarations, relations and words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given

import attnfuzz
from attnfuzz.cases.supported import translate, why_unsupported
from attnfuzz.declaration import Kernel
from attnfuzz.explaining.explain import explain_case
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.judge import judge
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import LatentDecodeCase, case_from_builtins
from attnfuzz.problems.combinations import settled
from attnfuzz.problems.recipes import KEY_RECIPES, VALUE_RECIPES, Needle, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies import cases

SUPPORTS = Supports(dtypes=("float16", "bfloat16", "float32"))


def case_of(**changes: Any) -> LatentDecodeCase:
    fields: dict[str, Any] = {"num_q_heads": 3, "head_size": 24, "v_head_size": 16, "scale": 0.25, "block_size": 4}
    return LatentDecodeCase(**{**fields, "seq_lens": (9, 0, 5), **changes})


def attend(
    inputs: Any, width: int | None = None, first: int = 0, *, unscaled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, with ``width`` columns scored, others ``unscaled``, and V read from column ``first`` on."""
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)].long()
        rows = inputs.kv_cache[pages].flatten(0, 1)[:length].double()
        scores = inputs.scale * (inputs.q[seq].double()[:, :width] @ rows[:, :width].T)
        if unscaled:
            rank = inputs.v_head_size
            scores += (1 - inputs.scale) * (inputs.q[seq].double()[:, rank:] @ rows[:, rank:].T)
        if length:
            values = rows[:, first : first + inputs.v_head_size]
            out[seq], lse[seq] = (scores.softmax(-1) @ values).to(out.dtype), scores.logsumexp(-1).float()
    return out, lse


@attnfuzz.kernel("latent_decode", supports=SUPPORTS)
def right(inputs: Any) -> Any:
    """The definition."""
    return attend(inputs)


@attnfuzz.kernel("latent_decode", supports=SUPPORTS)
def reads_v_behind(inputs: Any) -> Any:
    """V begins where the part of the key for the position does."""
    return attend(inputs, first=inputs.q.shape[-1] - inputs.v_head_size)


@attnfuzz.kernel("latent_decode", supports=SUPPORTS)
def scores_latents_only(inputs: Any) -> Any:
    """The part of the key for the position is not scored."""
    return attend(inputs, width=inputs.v_head_size)


@attnfuzz.kernel("latent_decode", supports=SUPPORTS)
def scales_latents_only(inputs: Any) -> Any:
    """Products of the part of the key for the position are added as they are."""
    return attend(inputs, unscaled=True)


@pytest.mark.by_day
@pytest.mark.parametrize("keys", KEY_RECIPES)
@pytest.mark.parametrize("values", VALUE_RECIPES)
def test_a_right_kernel_passes_every_oracle_on_all_numbers(keys: Any, values: Any) -> None:
    """A relation that changes V alone would blame kernels for the keys that it has changed with it."""
    case = case_of(values=Values(keys=keys, values=values, seed=1))
    without: tuple[OracleName, ...] = ("guard_page", "page_relocation")  # which take processes of their own
    oracles = tuple(name for name in DEFAULT_ORACLES if name not in without)
    verdict = judge(right, case, device="cpu", oracles=oracles, relations="all")
    assert verdict.failure is None, verdict.failure


def test_v_is_a_view_of_the_first_columns_of_the_cache() -> None:
    """A kernel would be handed two copies, and a wrong offset between them would never show."""
    case = case_of(strides={"kv_cache": "outer_gap"})
    inputs = problem_of(case).build(case, Arena("cpu", poison="nan", prefill="nan", capacity=1 << 16), SUPPORTS, None)
    assert inputs.kv_cache.shape == (5, 4, 24)
    assert inputs.k_cache.data_ptr() == inputs.v_cache.data_ptr() == inputs.kv_cache.data_ptr()
    assert inputs.k_cache.shape == (5, 4, 1, 24)
    assert inputs.v_cache.shape == (5, 4, 1, 16)
    assert not inputs.kv_cache.is_contiguous()


def test_needles_are_set_where_v_is_not() -> None:
    """A needle's key would overwrite the value that names its token, and boundary bugs would not be told."""
    case = case_of(values=Values(needles=(Needle(seq=0, position=8, kv_head=0),)))
    values = problem_of(case).values(case, "cpu", SUPPORTS)
    assert torch.equal(values.k[..., :16], values.v)
    scores = case.scale * (values.q[0].double() @ values.k[:9, 0].double().T)
    assert bool((scores.argmax(-1) == 8).all())
    assert bool((scores[:, 8] > scores[:, 7] + 10).all())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"v_head_size": 32}, "v_head_size=32 must be at most head_size=24"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must be between 1 and 1"),
        ({"layout": "HND"}, "layout='HND' and kv=None must be left out in latent_decode"),
        ({"strides": {"k_cache": "outer_gap"}}, "latent_decode has no such tensor"),
    ],
)
def test_what_no_such_cache_has_is_refused(fields: dict[str, Any], sentence: str) -> None:
    """A file could name a case whose tensors cannot be made, and would fail far from where it is wrong."""
    written = {**msgspec.to_builtins(case_of()), **fields}
    with pytest.raises(ValueError, match=sentence):
        case_from_builtins("latent_decode", written)


@pytest.mark.parametrize(
    ("supports", "sizes"),
    [
        (Supports(head_sizes=(576,), v_head_sizes=(512,)), {(576, 512)}),
        (Supports(head_sizes=(40, 64), v_head_sizes=(32, 64)), {(40, 32), (64, 32), (64, 64)}),
        (Supports(where=({"head_size": 48, "v_head_size": 32},)), {(48, 32)}),
    ],
)
def test_declared_sizes_go_together_as_far_as_v_fits(supports: Supports, sizes: set[tuple[int, int]]) -> None:
    """A kernel of one pair would be asked for others, or a declaration with several would be refused."""
    table = settled("latent_decode", supports, {}).combinations
    assert {(k, v) for one in table for k in one["head_size"] for v in one["v_head_size"]} == sizes


def test_a_declaration_without_room_for_v_is_refused() -> None:
    """Nothing would be drawn, and the search would end without a word."""
    with pytest.raises(ValueError, match="declare sizes of V that some head size has room for"):
        attnfuzz.kernel("latent_decode", supports=Supports(head_sizes=(64,), v_head_sizes=(128,)))


@given(cases("latent_decode"))
def test_drawn_cases_have_a_part_of_the_key_that_is_not_v(case: LatentDecodeCase) -> None:
    """Whatever a kernel does with the rest of the key would stay untested, though it declares nothing else."""
    assert case.num_kv_heads == 1
    assert 0 < case.value_size < case.head_size


def test_no_other_problem_has_such_a_case() -> None:
    """Replay would put a case to a kernel that computes something else."""
    assert translate(case_of(), "paged_decode", Supports(), {}) is None
    assert translate(case_of(), "latent_decode", Supports(), {}) is not None
    assert why_unsupported(Supports(head_sizes=(576,), v_head_sizes=(512,)), {}, case_of()) is not None


@pytest.mark.parametrize(
    ("kernel", "cause", "words"),
    [
        (reads_v_behind, "value_columns", "V is read from columns 8-23 of the cache"),
        (scores_latents_only, "score_columns", "columns 16-23 of the cache are left out of the scores"),
        (scales_latents_only, "score_columns", "columns 16-23 of the cache are not multiplied by the scale"),
    ],
)
def test_which_columns_are_mistaken_is_told(kernel: Kernel, cause: str, words: str) -> None:
    """An engineer would be told that tokens are dropped, or that scores are wrong, and look in the wrong place."""
    failure = judge(kernel, case_of(values=Values(keys="normal", values="normal", seed=2)), device="cpu").failure
    assert failure is not None
    assert failure.cause == cause
    assert words in failure.message


def test_weights_are_read_off_only_where_scores_stay() -> None:
    """Unit vectors in place of V would change the keys, and the weights told would be those of another case."""
    told = explain_case(right, case_of(), device="cpu", seconds=60)
    (line,) = told.lines
    assert line.startswith("every weight is right, and so is the LSE")
    drawn = explain_case(right, case_of(values=Values(keys="normal")), device="cpu", seconds=60)
    assert drawn.lines[0].startswith("V is a part of the keys that the queries are multiplied with")
