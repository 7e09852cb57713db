"""From made-up times to a file: batches, what is measured, and the source that is printed."""

from __future__ import annotations

import ast
import itertools

import msgspec
import pytest

from attnfuzz.bench.kernels.measurements import MeasureReply, MeasureRequest
from attnfuzz.bench.kernels.run import Crashed
from attnfuzz.bench.kernels.shapes import bytes_to_move
from attnfuzz.bench.tuning import FEATURES, Tuning, configurations, features_of, measure_batches, tune, tuning_batches
from attnfuzz.bench.tuning_tree import Leaf, Split, Tuned, python_source
from tests.unit.timing_stand_ins import Pretended, declared, times

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
    assert any(not shape.is_even for shape in batches)
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


def test_too_many_configurations_are_sampled_and_keep_the_default() -> None:
    """A run would take hours, or leave out what the kernel does today."""
    declared_options = {"a": tuple(range(10)), "b": tuple(range(10))}
    some = configurations(declared_options, {}, 20)
    assert len(some) == 20
    assert some[0] == {"a": 0, "b": 0}
    assert configurations(declared_options, {"a": (3,), "b": (1, 2)}, 20) == [{"a": 3, "b": 1}, {"a": 3, "b": 2}]


def test_bad_configurations_are_measured_on_few_batches_only() -> None:
    """Most of the time would go into configurations that lose everywhere."""
    process = Pretended(answer)
    batches = tuning_batches("paged_decode", 30)
    found = measure_batches(process, SPLIT, configurations(SPLIT.options, {}, 48), batches)
    assert len(found.samples) == 30
    assert {one["tile"] for one in found.configurations} == {64}
    slow = [one for one in process.asked if one.options == {"num_splits": 1, "tile": 16}]
    assert len(slow) == 6
    assert [one for one, _ in found.wrong] == [{"num_splits": 32, "tile": 64}]
    assert len([one for one in process.asked if one.options == {"num_splits": 32, "tile": 64}]) == 1


def test_the_budget_ends_it_after_a_batch() -> None:
    """A batch measured with half of the configurations would compare what cannot be compared."""
    process = Pretended(answer)
    clock = itertools.count().__next__
    found = measure_batches(
        process, SPLIT, configurations(SPLIT.options, {}, 48), tuning_batches("paged_decode", 30),
        budget_s=2.5, clock=lambda: float(clock()),
    )  # fmt: skip
    assert (len(found.samples), found.unreached) == (3, 27)


def test_the_printed_function_chooses_what_was_fastest() -> None:
    """Somebody would commit a function that picks slow options, or does not even parse."""
    plan = Tuning(options={}, features=("batch", "max_seq_len"), max_batches=40)
    tuned, _ = tune(Pretended(answer), SPLIT, plan)
    assert tuned.regret == 0
    assert tuned.regret_of_one > 0.1
    few = sum(len(shape.seq_lens) <= 8 for shape in tuning_batches("paged_decode", 40))
    assert tuned.tree == Split(
        "batch", 8, Leaf({"num_splits": 8, "tile": 64}, few), Leaf({"num_splits": 1, "tile": 64}, 40 - few)
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
    assert msgspec.json.decode(msgspec.json.encode(tuned), type=Tuned) == tuned


def test_what_cannot_be_tuned_is_said() -> None:
    """A table of nothing would be printed as if it were a result."""

    def dead(request: MeasureRequest) -> MeasureReply:
        raise Crashed(f"{request.contender} died")

    plan = Tuning(options={}, features=("batch",), max_batches=3)
    with pytest.raises(ValueError, match=r"no configuration of file\.py:split ran"):
        tune(Pretended(dead), SPLIT, plan)
    with pytest.raises(ValueError, match="only one configuration"):
        tune(Pretended(answer), declared("plain"), plan)
    with pytest.raises(ValueError, match="it has num_splits"):
        tune(Pretended(answer), SPLIT, Tuning(options={"warps": (4,)}, features=("batch",)))
