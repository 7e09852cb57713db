"""Tuning a kernel: batches, configurations and the tree that chooses."""

from __future__ import annotations

import ast
import itertools
import math
import statistics
from math import inf
from typing import Any

import msgspec
import pytest

from attnfuzz.bench.kernels.run import Crashed
from attnfuzz.bench.kernels.shapes import MeasureReply, MeasureRequest, bytes_to_move
from attnfuzz.bench.tuning import Tuning, configurations, tune, tuning_batches
from attnfuzz.bench.tuning_record import (
    FEATURES,
    Configuration,
    Leaf,
    Record,
    Sample,
    Split,
    Tuned,
    choose,
    encode_tuned,
    features_of,
    grow_tree,
    grown,
    leaves,
    python_source,
)
from tests.common.timing_stand_ins import Pretended, declared, times

SPLIT = declared("file.py:split", num_splits=(1, 8, 32), tile=(16, 64))


def answer(request: MeasureRequest) -> MeasureReply:
    """Splits pay for few sequences; tiles of 64 are always better, but wrong in 32 splits."""
    splits, tile = request.options["num_splits"], request.options["tile"]
    if (splits, tile) == (32, 64):
        return MeasureReply(status="wrong", note="5 times the error bound")
    few = len(request.shape.seq_lens) <= 8
    factor = {1: 4.0 if few else 1.0, 8: 1.0 if few else 1.5, 32: 1.2 if few else 2.0}[int(splits)]
    return times(request, factor * (1.0 if tile == 64 else 1.3))


def test_batches_are_ragged_and_reproducible() -> None:
    """A tree would be tuned for batches that no server has, or another one every day."""
    batches = tuning_batches("paged_decode", 60)
    assert batches == tuning_batches("paged_decode", 60)
    assert len({shape.label for shape in batches}) == 60
    assert all(shape.kind == "decode" for shape in batches)
    assert any(len(set(shape.seq_lens)) > 1 for shape in batches)
    assert max(map(bytes_to_move, batches)) < 5 << 30
    kinds = {shape.kind for shape in tuning_batches("paged_attention", 200)}
    assert kinds == {"decode", "mixed"}
    with pytest.raises(ValueError, match="is not tuned"):
        tuning_batches("split_decode", 3)


def test_features_are_those_of_the_batch() -> None:
    """A wrapper would ask the tree with other numbers than it was grown on."""
    shape = tuning_batches("paged_decode", 1)[0]
    features = features_of(shape)
    assert tuple(features) == FEATURES
    assert features["batch"] == len(shape.seq_lens)
    assert features["max_seq_len"] == max(shape.seq_lens)
    assert features["heads_per_group"] == shape.num_q_heads // shape.num_kv_heads
    assert features["pairs"] == len(shape.seq_lens) * shape.num_kv_heads


def measured(process: Pretended, count: int = 30, *, budget_s: float = inf, **limits: Any) -> Record:
    """What a run over ``count`` batches records."""
    return tune(process, SPLIT, Tuning(options={}, max_batches=count, budget_s=budget_s), **limits)


def test_too_many_configurations_are_sampled_and_keep_the_default() -> None:
    """A run would take hours, or leave out what the kernel does today."""
    declared_options = {"a": tuple(range(10)), "b": tuple(range(10))}
    default, some = configurations(declared_options, {}, 20)
    assert len(some) == 20
    assert some[0] == default == {"a": 0, "b": 0}


def test_what_is_asked_for_takes_the_place_of_what_is_declared() -> None:
    """What a kernel declares is what is drawn; its own launches would be out of reach, or options be fixed in vain."""
    declared_options = {"block_m": ("auto", 128), "tile": ("auto",), "num_warps": ("auto",), "fused": (True, False)}
    asked = {("block_m", "num_warps"): ((64, 4), (128, 8)), ("tile",): ((32,), (64,)), ("fused",): ((False,),)}
    default, found = configurations(declared_options, asked, 20)
    assert default == {"block_m": "auto", "tile": "auto", "num_warps": "auto", "fused": False}
    assert found == [
        {"block_m": block_m, "num_warps": num_warps, "tile": tile}
        for block_m, num_warps in ((64, 4), (128, 8))
        for tile in (32, 64)
    ]


def test_bad_configurations_are_measured_on_few_batches_to_grow_on() -> None:
    """Most of the time would go into configurations that lose everywhere."""
    process = Pretended(answer)
    record = measured(process)
    assert len(record.batches) == 30
    place = record.configurations.index({"num_splits": 1, "tile": 16})
    on = [batch.grown_on for batch in record.batches if batch.times_us[place] is not None]
    assert on.count(True) == 6
    assert on.count(False) == sum(not batch.grown_on for batch in record.batches)
    assert [one for one, _ in record.wrong] == [{"num_splits": 32, "tile": 64}]
    assert len([one for one in process.asked if one.options == {"num_splits": 32, "tile": 64}]) == 1
    wrong = record.configurations.index({"num_splits": 32, "tile": 64})
    assert {batch.times_us[wrong] for batch in record.batches} == {None}


def test_batches_and_heads_are_kept_back() -> None:
    """A tree that knows its batches by heart would look as good as one that has found something."""
    record = measured(Pretended(answer), 40)
    kept_back = [batch for batch in record.batches if not batch.grown_on]
    assert 8 <= len(kept_back) <= 16
    assert all(not batch.grown_on for batch in record.batches if batch.shape.num_q_heads == 12)
    assert {batch.shape.num_q_heads for batch in kept_back} > {12}
    assert all(taken is not None for batch in kept_back for taken in batch.times_us[:4])


def test_all_that_is_measured_is_compiled_before() -> None:
    """One core would compile for minutes while a GPU waits."""
    process = Pretended(answer)
    record = measured(process)
    compiled = {(one.shape.num_q_heads, one.shape.head_size, *one.options.items()) for one in process.compiled}
    asked = {(one.shape.num_q_heads, one.shape.head_size, *one.options.items()) for one in process.asked}
    assert asked <= compiled
    assert len(process.compiled) < len(process.asked)
    assert record.default == {"num_splits": 1, "tile": 16}


def test_the_budget_ends_it_after_a_batch() -> None:
    """A batch measured with half of the configurations would compare what cannot be compared."""
    clock = itertools.count().__next__
    found = measured(Pretended(answer), budget_s=2.5, clock=lambda: float(clock()))
    assert (len(found.batches), found.unreached) == (3, 27)
    asked_to_stop = iter([False, False, True])
    found = measured(Pretended(answer), stopped=lambda: next(asked_to_stop))
    assert (len(found.batches), found.unreached) == (3, 27)


def test_the_printed_function_chooses_what_was_fastest() -> None:
    """Somebody would commit a function that picks slow options, or does not even parse."""
    tuned = grown(SPLIT.target, measured(Pretended(answer), 40), ("batch", "max_seq_len"), 8)
    assert tuned.seen.tree.worst == 0
    assert tuned.unseen is not None
    assert tuned.unseen.tree.worst == 0
    assert tuned.seen.one.worst > 0.1
    seen = [batch.shape for batch in tuned.record.batches if batch.grown_on]
    few = sum(len(shape.seq_lens) <= 8 for shape in seen)
    assert tuned.tree == Split(
        "batch",
        8,
        Leaf({"num_splits": 8, "tile": 64}, few),
        Leaf({"num_splits": 1, "tile": 64}, len(seen) - few),
    )
    source = python_source(tuned)
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert [argument.arg for argument in function.args.args] == ["batch", "max_seq_len"]
    assert ast.unparse(function).splitlines()[2:] == [
        "    if batch <= 8:",
        "        return {'num_splits': 8, 'tile': 64}",
        "    return {'num_splits': 1, 'tile': 64}",
    ]
    assert max(map(len, python_source(msgspec.structs.replace(tuned, features=FEATURES)).splitlines())) <= 120


def test_losses_are_those_over_the_best_of_each_batch() -> None:
    """A tree would be praised, or a default blamed, by figures that nobody could find in the table."""
    tuned = grown(SPLIT.target, measured(Pretended(answer), 40), ("batch",), 1)
    assert tuned.unseen is not None
    for figures, grown_on in ((tuned.seen, True), (tuned.unseen, False)):
        shapes = [batch.shape for batch in tuned.record.batches if batch.grown_on == grown_on]
        few = [len(shape.seq_lens) <= 8 for shape in shapes]
        assert figures.batches == len(shapes)
        # 8 splits cost half as much again for many sequences, and the default four times 1.3, or 1.3, as much
        assert figures.one == figures.tree
        assert figures.tree.worst == pytest.approx(0.5, rel=1e-3)
        assert figures.default.worst == pytest.approx(4 * 1.3 - 1, rel=1e-3)
        median = statistics.median(math.log(5.2 if one else 1.3) for one in few)
        assert figures.default.median == pytest.approx(math.expm1(median), rel=1e-3)


def test_a_record_gives_the_same_again() -> None:
    """The tree could only be made on the day and the GPU of the measurement."""
    tuned = grown(SPLIT.target, measured(Pretended(answer)), ("batch", "max_seq_len"), 8)
    written = encode_tuned(tuned)
    read = msgspec.json.decode(written, type=Tuned)
    assert read == tuned
    assert grown(tuned.kernel, read.record, tuned.features, tuned.max_leaves) == tuned
    lines = written.decode().splitlines()
    assert sum('"times_us"' in line for line in lines) == len(tuned.record.batches)


def test_the_module_says_only_what_was_measured() -> None:
    """What a record calls a GPU, or a package, would be run by whoever imports the module."""
    tuned = grown(SPLIT.target, measured(Pretended(answer)), ("batch",), 8)
    hostile = 'GPU\n"""\nimport os\n\\'
    machine = msgspec.structs.replace(tuned.record.machine, name=hostile, versions={hostile: hostile})
    record = msgspec.structs.replace(tuned.record, started=hostile, machine=machine)
    changed = msgspec.structs.replace(tuned, kernel=hostile, record=record)
    module = ast.parse(python_source(changed))
    assert {type(node) for node in module.body} == {ast.Expr, ast.Assign, ast.FunctionDef}
    constants = [node for node in module.body if isinstance(node, ast.Assign)]
    assert [ast.literal_eval(node.value) for node in constants][:4] == [hostile, hostile, (9, 0), 132]


def test_what_cannot_be_tuned_is_said() -> None:
    """A table of nothing would be printed as if it were a result."""

    def dead(request: MeasureRequest) -> MeasureReply:
        raise Crashed(f"{request.contender} died")

    plan = Tuning(options={}, max_batches=12)
    with pytest.raises(ValueError, match=r"no configuration of file\.py:split ran"):
        grown(SPLIT.target, tune(Pretended(dead), SPLIT, plan), ("batch",), 8)
    with pytest.raises(ValueError, match="only one configuration"):
        tune(Pretended(answer), declared("plain"), plan)
    with pytest.raises(ValueError, match="it has num_splits"):
        tune(Pretended(answer), SPLIT, Tuning(options={("warps",): ((4,),)}))


COLUMNS = ("batch", "max_seq_len")
OPTIONS: list[Configuration] = [{"num_splits": 1}, {"num_splits": 8}, {"num_splits": 99}]
UNSPLIT, IN_EIGHT, _ = OPTIONS


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
    tree = grow_tree(samples, COLUMNS, OPTIONS)
    assert all(one.times[OPTIONS.index(choose(tree, one.features))] == min(one.times) for one in samples)
    assert len(leaves(tree)) == 3
    assert isinstance(tree, Split)
    assert all(choose(tree, {"batch": batch, "max_seq_len": 4096}) == IN_EIGHT for batch in (1, 4))
    assert choose(tree, {"batch": 64, "max_seq_len": 4096}) == UNSPLIT
    assert choose(tree, {"batch": 1, "max_seq_len": 200}) == UNSPLIT


def test_one_leaf_is_the_best_for_all() -> None:
    """What a tree saves would be compared with too weak a choice."""
    assert grow_tree(samples_of(), COLUMNS, OPTIONS, max_leaves=1) == Leaf(IN_EIGHT, 24)


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
    assert [choose(tree, {"n": n}) for n in (1, 4, 5, 8)] == [UNSPLIT, UNSPLIT, IN_EIGHT, IN_EIGHT]
    assert grow_tree(samples, ("n",), OPTIONS, max_leaves=1) == Leaf(IN_EIGHT, 8)


def test_without_samples_there_is_no_tree() -> None:
    """An IndexError would be all that a user sees."""
    with pytest.raises(ValueError, match="at least one sample"):
        grow_tree([], COLUMNS, OPTIONS)
