"""Users' problems over a paged cache: what `attnfuzz.PagedProblem` writes, reads and says."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.explaining.explain import explain_case
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.judge import judge
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.report.findings import one_line
from attnfuzz.strategies.decisions import Decisions
from attnfuzz.verdict import Failure

PAGE = Path(__file__).parents[2] / "docs" / "own_problems.md"
(EXAMPLE,) = re.findall(r"```python\n(# streaming.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
EXAMPLE = EXAMPLE.replace("seq // 2", "seq")  # right
LAYOUTS = ("NHD", "HND", "packed", "interleaved")


class Read(attnfuzz.PagedProblem):
    """Nothing but the cache, and an output."""

    layout = attnfuzz.Choice(LAYOUTS)

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {**self.cache(case), "out": attnfuzz.TensorSpec((1,), "float32", "output")}

    def write(self, case: Any, tensors: Any) -> None:
        self.write_cache(case, tensors)


READ = Read()


def cases(count: int, **fields: Any) -> list[Any]:
    described = attnfuzz.kernel(READ)(lambda inputs: None).declaration.problem
    assert isinstance(described, OpenProblem)
    drawn = []
    for seed in range(count):
        decisions = Decisions(Random(seed).randbytes(described.decisions))
        found = {name: field.decide(decisions.part(field.decisions)) for name, field in described.fields.items()}
        drawn.append(described.case_type(**found | fields))
    return drawn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_is_written_once_and_read_through_the_table(layout: str) -> None:
    """The reference would read other keys than the kernel, or a dead slot would not be dead."""
    for case in cases(25, layout=layout):
        tensors = problem_of(case).filled(case, Supports())
        k, v = READ.cached(case, tensors)
        table = tensors["block_table"].tolist()
        size = case.block_size
        slots = {(table[s][t // size], t % size) for s, length in enumerate(case.lengths) for t in range(length)}
        of_slot = case.num_kv_heads * case.head_size
        caches = [tensor for name, tensor in tensors.items() if name.endswith("_cache")]
        assert sum(int(one.isfinite().sum()) for one in caches) == 2 * len(slots) * of_slot
        assert [tuple(one.shape) for one in k] == [(n, case.num_kv_heads, case.head_size) for n in case.lengths]
        assert [tuple(one.shape) for one in v] == [tuple(one.shape) for one in k]
        shared = size * case.shared_pages
        for seq, length in enumerate(case.lengths):
            for name, one in (("k", k[seq]), ("v", v[seq])):
                shape = (length, case.num_kv_heads, case.head_size)
                own = attnfuzz.numbers(shape, seed=case.seed, name=f"{name}{seq}").to(one.dtype)
                assert torch.equal(one[shared:], own[shared:])


class Rotated(attnfuzz.PagedProblem):
    """Keys that are negated where they lie, and no values."""

    shared_pages = attnfuzz.Integer(0, 0)

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        cache = self.cache(case)
        del cache["v_cache"]
        return cache | {"k_cache": cache["k_cache"]._replace(role="in_place")}

    def write(self, case: Any, tensors: Any) -> None:
        self.write_cache(case, tensors)

    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        keys = tensors["k_cache"]
        return {"k_cache": attnfuzz.Expected(-keys.nan_to_num().double(), where=keys.isfinite())}


@attnfuzz.kernel(Rotated())
def rotates(inputs: Any) -> None:
    keys = inputs.k_cache if inputs.layout == "NHD" else inputs.k_cache.transpose(1, 2)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for token in range(length):
            page = int(inputs.block_table[seq, token // inputs.block_size])
            keys[page, token % inputs.block_size] *= -1


@attnfuzz.kernel(Rotated())
def rotates_whole_pages(inputs: Any) -> None:
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for page in inputs.block_table[seq, : -(-length // inputs.block_size)].tolist():
            inputs.k_cache[page] *= -1


def test_a_problem_may_have_keys_alone_and_change_them_in_place() -> None:
    """A rotation of cached keys could not be described without values that no kernel reads."""
    attnfuzz.fuzz(rotates, max_examples=15, device="cpu")(lambda: None)()
    with pytest.raises(attnfuzz.KernelFailure, match=r"k_cache .* was modified where nothing is to be written"):
        attnfuzz.fuzz(rotates_whole_pages, max_examples=15, device="cpu")(lambda: None)()


def test_a_field_that_holds_no_text_is_told_so() -> None:
    """A reader would take the next field's name for its value."""
    (case,) = cases(1, v_cache_strides="")
    assert 'v_cache_strides "", ' in one_line(case)


def test_pages_are_shared_by_all_sequences() -> None:
    """A prefix cache would never be drawn."""
    (case,) = cases(1, lengths=(40, 40), block_size=16, shared_pages=2, layout="NHD")
    k, _ = READ.cached(case, problem_of(case).filled(case, Supports()))
    assert torch.equal(k[0][:32], k[1][:32])
    assert not torch.equal(k[0][32:], k[1][32:])


def test_an_element_of_the_cache_is_told_by_its_token() -> None:
    """Of a wrong element nobody would know whose it is."""
    plain = {
        "page_order": "reversed",
        "spare_pages": 0,
        "extra_columns": 1,
        "unused_entries": "zero",
        "shared_pages": 0,
    }
    (case,) = cases(1, lengths=(5, 3), block_size=4, layout="HND", **plain)
    assert READ.where_is(case, "v_cache", (1, 0, 0, 7)) == "page 1, offset 0: token 4 of sequence 0"
    assert READ.where_is(case, "k_cache", (0, 0, 3, 0)) == "page 0, offset 3: no token of any sequence"
    assert READ.where_is(case, "block_table", (0, 1)) == "it names page 1 of sequence 0"
    assert READ.where_is(case, "block_table", (1, 1)) == "no token of sequence 1 needs it"
    together = msgspec.structs.replace(case, shared_pages=1)
    assert READ.where_is(together, "k_cache", (1, 0, 1, 0)).endswith("token 1 of sequence 0 and token 1 of sequence 1")


def test_a_case_in_one_line_leaves_no_field_blank() -> None:
    """`v_cache_strides , kernel_blocks 0` would look as if something were missing."""
    (case,) = cases(1, v_cache_strides="")
    assert 'v_cache_strides "",' in one_line(case)


def fuzzed(path: Path, source: str, max_examples: int = 30) -> None:
    path.write_text(source, encoding="utf-8")
    (kernel,) = load_kernels(str(path))
    attnfuzz.fuzz(kernel, max_examples=max_examples, device="cpu")(lambda: None)()


def test_the_example_of_the_page_is_silent_without_its_bug(tmp_path: Path) -> None:
    """A right kernel over a paged cache would be blamed for shared pages, far ones, dead slots or its roundings."""
    fuzzed(tmp_path / "kernels.py", EXAMPLE)


def test_pages_are_tried_far_away(tmp_path: Path) -> None:
    """An offset of a page that is worked out in 32 bits would pass, as all caches of tests are small."""
    source = EXAMPLE.replace("places = (pages.long(),", "places = ((pages * page).int() // page,")
    source = source.replace("    for seq, length", "    page = inputs.k_cache.stride(0)\n    for seq, length")
    with pytest.raises(attnfuzz.KernelFailure, match="page_relocation"):
        fuzzed(tmp_path / "kernels.py", source, max_examples=200)  # of 8 one draws a relation, not always this one


PLANTED = {
    "the last token is missed": (
        {"t in range(length) if": "t in range(length - 1) if"},
        ("tokens_dropped", "the last token of each sequence is dropped"),
    ),
    "the last, partial page is missed": (
        {"t in range(length) if": "t in range(length // inputs.block_size * inputs.block_size) if"},
        ("tokens_dropped", "the last, partial page of each sequence is dropped"),
    ),
    "the last token is read twice": (
        {"[t for t in range(length)": "[t for t in (*range(length), *range(length)[-1:])"},
        ("tokens_counted_twice", "the last token of each sequence is counted twice"),
    ),
    "the page beside": (
        {
            "pages = inputs": "pages = (inputs",
            "tokens // inputs.block_size]": "tokens // inputs.block_size] + 1) % len(inputs.k_cache)",
        },
        ("another_page", "the page behind the one in the table is read"),
    ),
    "the first sequence's pages": (
        {"block_table[seq,": "block_table[0,"},
        ("another_sequence", "pages are read through the first row of the block table, in place of their own"),
    ),
    "no table": (
        {"inputs.block_table[seq, tokens // inputs.block_size]": "tokens // inputs.block_size"},
        ("block_table", "a page's number in its sequence is taken for a physical page"),
    ),
    "the rest of the page": (
        {"t in range(length) if": "t in range(-(-length // inputs.block_size) * inputs.block_size) if"},
        ("past_the_end", "the rest of the last page of each sequence takes weight"),
    ),
    "V of the first head": (
        {"(inputs.k_cache, inputs.v_cache)": "(inputs.k_cache, inputs.v_cache[..., :1, :].expand_as(inputs.v_cache))"},
        ("head_map", "V of the first KV head is read in place of each head's own"),
    ),
}


def edited(path: Path, edits: dict[str, str]) -> Kernel:
    """The example's kernel with these edits."""
    source = EXAMPLE
    for before, after in edits.items():
        assert before in source
        source = source.replace(before, after)
    path.write_text(source, encoding="utf-8")
    (kernel,) = load_kernels(str(path))
    return kernel


def explained(path: Path, edits: dict[str, str], **fields: Any) -> list[tuple[str, str]]:
    kernel = edited(path, edits)
    problem: Any = kernel.declaration.problem
    found = explain_case(kernel, problem.case_type(**fields), device="cpu", seconds=600.0).causes or ()
    return [(cause.mistake, cause.words) for cause in found]


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.by_day("the last token is missed", "the first sequence's pages", "the rest of the page")
def test_what_is_read_in_place_of_the_right_pages_is_told(name: str, tmp_path: Path) -> None:
    """A reader would see wrong numbers, and look for the token or the page that is missing."""
    edits, told = PLANTED[name]
    fields = {"lengths": (3, 7), "num_kv_heads": 2, "gqa_ratio": 2, "block_size": 4, "window": 9}
    assert explained(tmp_path / "kernels.py", edits, **fields, page_order="reversed") == [told]


def test_what_the_smallest_case_leaves_open_a_larger_one_tells(tmp_path: Path) -> None:
    """Of one token, shrunk cases cannot say whether it is the first one, the last one or a page."""
    ((mistake, words),) = explained(tmp_path / "kernels.py", PLANTED["no table"][0], lengths=(1,), spare_pages=1)
    assert (mistake, words.partition("), ")[2]) == PLANTED["no table"][1]
    assert words.startswith("in a similar case (lengths ")


@pytest.mark.parametrize("lengths", [(3,), (3, 7)], ids=["one sequence", "two"])
@pytest.mark.by_day("one sequence")
def test_a_mistake_that_is_none_of_those_known_is_not_told_as_one(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """A reader would look for a page where the scale is wrong."""
    edits = {"* inputs.head_size**-0.5\n            out": "* inputs.head_size**-0.25\n            out"}
    assert not explained(tmp_path / "kernels.py", edits, lengths=lengths, block_size=4, window=9)


def related(path: Path, edits: dict[str, str], oracle: str, **fields: Any) -> Failure | None:
    kernel = edited(path, edits)
    problem: Any = kernel.declaration.problem
    verdict = judge(kernel, problem.case_type(**fields), device="cpu", relations=(oracle,))
    assert verdict.related == (oracle,)
    return verdict.failure


SEVERAL_PAGES = {"lengths": (60, 33), "head_size": 128, "block_size": 4, "window": 64, "unused_entries": "wrong_page"}


def test_the_order_of_pages_does_not_count(tmp_path: Path) -> None:
    """Sums in the order of page ids differ from server to server, and within every error bound."""
    by_page = "tokens = tokens[inputs.block_table[seq, tokens // inputs.block_size].sort(stable=True).indices]"
    edits = {"        pages = inputs": f"        {by_page}\n        pages = inputs"}
    failure = related(tmp_path / "kernels.py", edits, "page_permutation", **SEVERAL_PAGES)
    assert failure is not None
    assert failure.oracle == "page_permutation"
    assert "with its entries at other places: the bits must be equal" in failure.message
    assert any("of k_cache and v_cache is now entry" in line for line in failure.details)


def test_unused_entries_of_the_table_do_not_count(tmp_path: Path) -> None:
    """An entry that no token needs would enter a result as long as it changes it within the bound."""
    edits = {".softmax(-1), v).to(": ".softmax(-1), v * (1 + 1e-4 * (inputs.block_table[seq, -1] == 0))).to("}
    failure = related(tmp_path / "kernels.py", edits, "block_table_slack", **SEVERAL_PAGES, extra_columns=2)
    assert failure is not None
    assert failure.oracle == "block_table_slack"
    assert "with unused block-table entries that are 0: the bits must be equal" in failure.message


@pytest.mark.parametrize("oracle", ["page_permutation", "block_table_slack"])
def test_relations_of_pages_are_silent_on_the_example(oracle: str, tmp_path: Path) -> None:
    """A right kernel would be blamed for pages that lie elsewhere."""
    assert related(tmp_path / "kernels.py", {}, oracle, **SEVERAL_PAGES, extra_columns=2) is None


class ByPlace(attnfuzz.Problem):
    """Each entry counts by where it lies: another order is another problem."""

    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "x": attnfuzz.TensorSpec((8, 16), "float32", named_by="names"),
            "names": attnfuzz.TensorSpec((4,), "int32"),
            "out": attnfuzz.TensorSpec((4, 16), "float32", "output"),
        }

    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].copy_(attnfuzz.numbers((8, 16), seed=case.seed, name="x"))
        tensors["names"].copy_(torch.tensor([3, 1, 0, 6], dtype=torch.int32))

    def reference(self, case: Any, tensors: Any) -> dict[str, torch.Tensor]:
        names = tensors["names"].long()
        return {"out": tensors["x"][names].double() * names[:, None]}


@attnfuzz.kernel(ByPlace())
def by_place(inputs: Any) -> torch.Tensor:
    result: torch.Tensor = inputs.x[inputs.names.long()] * inputs.names[:, None]
    return result


def test_a_problem_in_which_places_count_is_not_held_to_that_they_do_not() -> None:
    """A right kernel would be blamed for doing what its reference says."""
    problem: Any = by_place.declaration.problem
    verdict = judge(by_place, problem.case_type(), device="cpu", relations=("page_permutation",))
    assert verdict.failure is None
