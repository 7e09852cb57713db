"""What runs and verdicts are made of: words, host memory, buckets of rows, and calls that a graph cannot hold."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnfuzz.mistake import PAST_THE_END
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.graph_replay import CapturedCall
from attnfuzz.problems.wording import element, number, numbers, plural, ranges, ratio, shape_of
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.trials.row_batches import Bucket, RowBlockSize, buckets
from attnfuzz.verdict import Cause, Failure, ends_process, is_fault


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (12, "12.0"),
        (0.0049, "0.0049"),
        (1e-30, "1e-30"),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (1 / 3, "0.333333"),
    ],
)
def test_number(value: float, words: str) -> None:
    """A float would look like an index, or fill the line with digits."""
    assert number(value) == words


@pytest.mark.parametrize(("value", "words"), [(1.234, "1.23"), (912.4, "912"), (39242.6, "39243"), (3.7e36, "3.7e+36")])
def test_ratio(value: float, words: str) -> None:
    """An error of a thousand bounds would be given to the last digit, or one of two bounds without any."""
    assert ratio(value) == words


def test_two_numbers_that_differ_look_different() -> None:
    """Such as "lse is 2.625 in one run and 2.625 in the next" would be no reason to believe that they differ."""
    assert numbers(2.625, 2.6250002) == ("2.625", "2.6250002")
    assert numbers(2.0, 3.0) == ("2.0", "3.0")


def test_ranges() -> None:
    """Hundreds of elements would be listed one by one."""
    assert ranges([5, 0, 1, 2, 2, 9]) == "0-2, 5, 9"
    assert ranges(range(0, 40, 2), most=3) == "0, 2, 4, ..."
    assert ranges([]) == ""


def test_other_words() -> None:
    """Messages would not read as sentences."""
    assert element("out", ("seq", "head"), (0, 3)) == "out[seq 0, head 3]"
    assert (plural(1, "token"), plural(2, "token")) == ("1 token", "2 tokens")
    assert shape_of("float16", (2, 3)) == "float16 [2, 3]"


@pytest.mark.parametrize(
    ("oracle", "kind", "ends", "fault"),
    [
        ("crash", "SIGSEGV", True, False),
        ("hang", "timeout", True, False),
        ("guard_page", "read past k_cache", True, True),
        ("page_relocation", "write before out", True, True),
        ("page_relocation", "raised cuda:an illegal memory access", True, True),
        ("page_relocation", "page ids", False, False),
        ("graph_replay", "raised AcceleratorError in decode", True, True),
        ("graph_replay", "bits", False, False),
        ("red_zone", "write after out", False, False),
        ("accuracy", "out:value", False, False),
    ],
)
def test_deaths_and_faults_are_told_by_oracle_and_kind(oracle: OracleName, kind: str, ends: bool, fault: bool) -> None:
    """A campaign would go on in a process that is gone, or leave out a relation that only compares bits."""
    assert ends_process(Failure(oracle=oracle, kind=kind, message="")) == ends
    assert is_fault(oracle, kind) == fault
    assert not ends_process(None)


@pytest.mark.parametrize(("oracle", "name"), [("accuracy", "accuracy/out:value"), ("red_zone", "red_zone/tf32")])
def test_a_cause_that_nobody_has_asked_about_is_no_headline(oracle: OracleName, name: str) -> None:
    """What fits a large case by chance would be told as the bug of a finding that time has cut off."""
    seen = Failure(oracle=oracle, kind="out:value", message="", causes=(Cause(mistake="tf32", way="TF32"),))
    assert seen.undecided.name == name
    assert "tf32" in (*seen.undecided.maybe, seen.undecided.cause)


def test_a_failure_of_more_causes_than_are_sent_is_sent() -> None:
    """The driver would take the answer for garbled, and the kernel for one that overwrites file descriptors."""
    many = tuple(Cause(mistake=PAST_THE_END, way=f"{number} of dead memory") for number in range(512))
    failure = Failure(oracle="dead_memory", kind="out", message="out changes", causes=many)
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure


PROGRAM = """
import resource, sys
import torch
from attnfuzz.trials.expectations import keep_freed_memory

def faults(nbytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(4)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults(2 << 20)
keep_freed_memory()
faults(2 << 20)
print(given_back, faults(2 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have their own rules")
def test_freed_memory_is_not_asked_for_again() -> None:
    """Most of the time of an error bound would be page faults, as it was before."""
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    given_back, kept = map(int, output.split())
    assert kept < given_back / 10


SIZES = st.builds(
    RowBlockSize,
    num_tokens=st.integers(1, 300),
    head_size=st.sampled_from([1, 16, 80, 256]),
    group=st.integers(1, 8),
    num_rows=st.integers(1, 8),
)


def elements(size: RowBlockSize) -> int:
    return size.num_tokens * size.head_size * size.group * size.num_rows


def padded(bucket: Bucket) -> int:
    return bucket.row_elements * bucket.num_rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(SIZES, max_size=40), st.integers(0, 100_000), st.integers(1, 2_000_000))
def test_every_block_fits_its_bucket(sizes: list[RowBlockSize], most_padding: int, most_elements: int) -> None:
    """A sequence would be cut off or left out, or a batch would take more time or memory than was meant."""
    found = buckets(sizes, most_padding=most_padding, most_elements=most_elements)
    assert sorted(itertools.chain.from_iterable(bucket.blocks for bucket in found)) == list(range(len(sizes)))
    for bucket in found:
        own = [sizes[block] for block in bucket.blocks]
        assert bucket.num_rows == sum(size.num_rows for size in own)
        for field in ("num_tokens", "head_size", "group"):
            assert getattr(bucket, field) == max(getattr(size, field) for size in own)
        assert padded(bucket) - sum(map(elements, own)) <= most_padding * (len(own) - 1)
        assert padded(bucket) <= max(most_elements, elements(own[0]))


def test_equal_sizes_share_a_bucket_without_any_padding() -> None:
    """Sequences of one size would each pay for the launches of a bucket."""
    sizes = [RowBlockSize(7, 16, 2, 4), RowBlockSize(300, 64, 1, 1), RowBlockSize(7, 16, 2, 1)]
    found = buckets(sizes, most_padding=0, most_elements=10**9)
    assert [bucket.blocks for bucket in found] == [[1], [0, 2]]


def test_the_bucket_with_least_padding_is_taken() -> None:
    """Short sequences would be padded to long ones although there are others of their size."""
    sizes = [RowBlockSize(100, 16, 1, 1), RowBlockSize(50, 16, 1, 1), RowBlockSize(49, 16, 1, 1)]
    found = buckets(sizes, most_padding=16 * 49, most_elements=10**9)
    assert [bucket.blocks for bucket in found] == [[0], [1, 2]]


class Graph:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def replay(self) -> None:
        self.said.append("replayed")


def test_a_batch_is_planned_before_its_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's graph would read the plan of the batch that it was captured with."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("waited"))
    graph: Any = Graph(said)
    CapturedCall(graph, {}, lambda: said.append("planned")).replay("replayed once")
    assert said == ["planned", "replayed", "waited"]


def test_a_plan_that_raises_is_the_kernels_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign would end with the error of an engine that refuses another batch."""

    def refuse() -> None:
        raise ValueError("the batch size should be fixed")

    graph: Any = Graph([])
    with pytest.raises(KernelRaised) as raised:
        CapturedCall(graph, {}, refuse).replay("replayed with another batch")
    assert isinstance(raised.value.error, ValueError)
