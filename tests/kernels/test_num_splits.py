"""Numbers of splits chosen by shape and device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnfuzz.cases.supported import adapt_options
from attnfuzz.declaration import load_kernels
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged.num_splits import device_num_splits, one_per_sm_num_splits, resolve_num_splits
from attnfuzz.problems.cases import case_from_builtins

Make = Callable[..., Any]

split_paged_decode: Make = launch_paged.split_paged_decode

SMS = 132
"""Of an H100."""


@pytest.mark.parametrize(
    ("max_seq_len", "num_programs", "num_sms", "expected"),
    [
        (4096, 12, 128, 11),  # the source document's own two examples
        (4096, 28, 128, 5),
        (4096, 1, 132, 64),  # 64 tokens a split at least
        (127, 1, 132, 1),
        (128, 1, 132, 2),
        (0, 1, 132, 1),
        (4096, 131, 132, 2),
        (4096, 132, 132, 1),
        (4096, 10_000, 132, 1),
        (4096, 0, 132, 64),  # no sequences: nothing to divide by
    ],
)
def test_seed(max_seq_len: int, num_programs: int, num_sms: int, expected: int) -> None:
    """The figures that the heuristic is known for could not be made again."""
    assert one_per_sm_num_splits(max_seq_len, num_programs, num_sms) == expected


@pytest.mark.parametrize(
    ("max_seq_len", "num_programs", "expected"),
    [
        (0, 1, 1),
        (64, 1, 1),
        (128, 32, 1),  # the second kernel costs more than is gained
        (32_768, 2048, 1),  # 64 sequences of 32 heads fill the device for several waves already
    ],
)
def test_device_leaves_short_and_many_sequences_whole(max_seq_len: int, num_programs: int, expected: int) -> None:
    """A second launch, and partial results through memory, would be paid for nothing."""
    assert device_num_splits(max_seq_len, num_programs, SMS) == expected


def test_device_is_within_its_limits_and_never_beaten_by_the_seed() -> None:
    """Splits would have too few tokens, or take another round that is almost empty, which is what it should avoid."""
    lengths = (1, 63, 64, 65, 500, 4096, 32_768, 1 << 20)
    for length, programs in itertools.product(lengths, (1, 12, 32, 100, 131, 132, 150, 264, 300, 528, 529, 2000)):
        chosen, seed = (choose(length, programs, SMS) for choose in (device_num_splits, one_per_sm_num_splits))
        assert 1 <= chosen <= min(256, max(1, length // 64)), (length, programs)
        # The model gives a kernel's start 32 tokens, the second kernel 128, and does not cut for a tenth.
        waves = math.ceil(programs * seed / (4 * SMS))
        most = 1.1 * (tokens_in_a_row(length, programs, seed) + 32 * waves + 128 + seed)
        assert tokens_in_a_row(length, programs, chosen) <= most, (length, programs)


def tokens_in_a_row(length: int, programs: int, num_splits: int) -> int:
    return math.ceil(programs * num_splits / (4 * SMS)) * math.ceil(length / num_splits)


def test_device_fills_a_wave_rather_than_a_bit_more() -> None:
    """A batch of 5 × 32 heads would take two rounds of a third of the device in place of one full one."""
    chosen = device_num_splits(4096, 160, SMS)
    assert chosen == 3
    assert math.ceil(160 * chosen / (4 * SMS)) == 1


def test_more_multiprocessors_never_take_longer_splits() -> None:
    """A larger device would be used worse than a smaller one."""
    lengths = [math.ceil(8192 / device_num_splits(8192, 8, sms)) for sms in (1, 8, 48, 132, 1000)]
    assert all(longer >= shorter for longer, shorter in itertools.pairwise(lengths))


def test_names_and_numbers() -> None:
    """A number would be overruled, or a name be taken for another."""
    assert resolve_num_splits(7, 4096, 1, SMS) == 7
    assert resolve_num_splits("one_per_sm", 4096, 12, SMS) == one_per_sm_num_splits(4096, 12, SMS)
    assert resolve_num_splits("device", 4096, 12, SMS) == device_num_splits(4096, 12, SMS)
    with pytest.raises(ValueError, match=r"num_splits='auto' must be one of \('one_per_sm', 'device'\)"):
        resolve_num_splits("auto", 4096, 12, SMS)
    with pytest.raises(ValueError, match=r"num_splits=0 must be an integer of at least 1"):
        resolve_num_splits(0, 4096, 12, SMS)


@pytest.mark.parametrize("heuristic", ["one_per_sm", "device"])
def test_chosen_splits_are_right(
    heuristic: str, paged_problem: Make, check: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice would not reach the kernels, or follow the lengths, which only the device knows."""
    counts: list[int] = []
    split_decode = launch_paged.split_decode

    def watched(*args: Any, **options: Any) -> Any:
        counts.append(args[8])
        return split_decode(*args, **options)

    monkeypatch.setattr(launch_paged, "split_decode", watched)
    problem = paged_problem([0, 3, 130], heads=(2, 1), block_size=16)
    check(split_paged_decode(*problem.args, heuristic, num_sms=SMS), problem.expected)
    problem.args[4].clamp_(max=1)
    split_paged_decode(*problem.args, heuristic, num_sms=SMS)
    split_paged_decode(*problem.args, heuristic, num_sms=SMS, max_seq_len=63)
    room = problem.args[3].shape[1] * 16
    assert counts == [resolve_num_splits(heuristic, room, 6, SMS)] * 2 + [1]


def test_without_a_gpu_nothing_is_split(paged_problem: Make) -> None:
    """An interpreter, which runs one program at a time, would be given more of them."""
    if torch.get_default_device().type == "cpu":
        problem = paged_problem([200], heads=(1, 1), block_size=16)
        _, lse = split_paged_decode(*problem.args, "one_per_sm")
        whole = split_paged_decode(*problem.args, 1)[1]
        assert torch.equal(lse, whole)


def test_a_saved_case_of_the_earlier_name_keeps_its_meaning() -> None:
    """A regression that was saved when the first heuristic was called "seed" would be replayed with the other."""
    (kernel,) = load_kernels("paged_split_k_auto")
    fields = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 8, "seq_lens": [1], "block_size": 1, "scale": 1.0}
    case = case_from_builtins("paged_decode", {**fields, "options": {"num_splits": "seed"}})
    assert adapt_options(case, kernel.declaration.options).options["num_splits"] == "one_per_sm"
