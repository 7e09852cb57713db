"""Trees grown over times that the test makes up."""

from __future__ import annotations

import itertools
from math import inf

import pytest

from attnfuzz.bench.tuning_record import (
    Configuration,
    Leaf,
    Sample,
    Split,
    choose,
    grow_tree,
    leaves,
    regret,
)

FEATURES = ("batch", "max_seq_len")
OPTIONS: list[Configuration] = [{"num_splits": 1}, {"num_splits": 8}, {"num_splits": 99}]
WHOLE, SPLIT, _ = OPTIONS


def samples_of() -> list[Sample]:
    """Splitting (configuration 1) pays for few long sequences, and costs a fifth otherwise."""
    found = []
    for batch, length in itertools.product((1, 2, 4, 8, 16, 32), (128, 512, 2048, 8192)):
        splits_pay = batch <= 4 and length > 512
        whole, split = (3.0, 1.0) if splits_pay else (1.0, 1.2)
        work = batch * length
        found.append(Sample({"batch": batch, "max_seq_len": length}, (whole * work, split * work, 9.0 * work)))
    return found


def test_it_finds_where_a_configuration_pays() -> None:
    """The tree would be no better than one configuration for all."""
    samples = samples_of()
    tree = grow_tree(samples, FEATURES, OPTIONS)
    assert regret(samples, OPTIONS, tree) == 0
    assert len(leaves(tree)) == 3
    assert isinstance(tree, Split)
    assert all(choose(tree, {"batch": batch, "max_seq_len": 4096}) == SPLIT for batch in (1, 4))
    assert choose(tree, {"batch": 64, "max_seq_len": 4096}) == WHOLE
    assert choose(tree, {"batch": 1, "max_seq_len": 200}) == WHOLE


def test_one_leaf_is_the_best_for_all() -> None:
    """What a tree saves would be compared with too weak a choice."""
    assert grow_tree(samples_of(), FEATURES, OPTIONS, max_leaves=1) == Leaf(SPLIT, 24)


def test_small_gains_are_not_worth_a_line() -> None:
    """Noise of a percent would become code that somebody has to read."""
    noisy = [Sample({"batch": batch}, (1.0, 1.0 + (0.004 if batch < 5 else -0.004))) for batch in range(1, 11)]
    assert isinstance(grow_tree(noisy, ("batch",), OPTIONS), Leaf)
    assert isinstance(grow_tree(noisy, ("batch",), OPTIONS, least_gain=0.0), Split)


def test_thresholds_are_powers_of_two_where_one_fits() -> None:
    """A reader would wonder what 37 stands for, or a length of the next power would go to the wrong side."""
    samples = [Sample({"n": n}, (1.0, 2.0) if n < 100 else (2.0, 1.0)) for n in (10, 20, 37, 300, 400, 1024)]
    tree = grow_tree(samples, ("n",), OPTIONS)
    assert isinstance(tree, Split)
    assert tree.at_most == 256
    close = [Sample({"n": n}, (1.0, 2.0) if n < 6 else (2.0, 1.0)) for n in (4, 5, 6, 7)]
    tree = grow_tree(close, ("n",), OPTIONS)
    assert isinstance(tree, Split)
    assert tree.at_most == 5
    power = [Sample({"n": n}, (1.0, 2.0) if n < 512 else (2.0, 1.0)) for n in (128, 256, 512, 1024)]
    tree = grow_tree(power, ("n",), OPTIONS)
    assert isinstance(tree, Split)
    assert tree.at_most == 256


def test_a_configuration_that_does_not_run_is_not_chosen() -> None:
    """Out of shared memory would be worse than slow, and infinities would spoil the sums."""
    samples = [Sample({"n": n}, (inf if n > 4 else 1.0, 1.5)) for n in range(1, 9)]
    tree = grow_tree(samples, ("n",), OPTIONS)
    assert [choose(tree, {"n": n}) for n in (1, 4, 5, 8)] == [WHOLE, WHOLE, SPLIT, SPLIT]
    assert grow_tree(samples, ("n",), OPTIONS, max_leaves=1) == Leaf(SPLIT, 8)


def test_without_samples_there_is_no_tree() -> None:
    """An IndexError would be all that a user sees."""
    with pytest.raises(ValueError, match="at least one sample"):
        grow_tree([], FEATURES, OPTIONS)
