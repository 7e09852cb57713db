"""Measured launches: for which GPU and batch they are taken, and that they are what their records say."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.bench.kernels.shapes import MachineReply, MeasureReply, MeasureRequest
from attnfuzz.bench.tuning import Tuning, ValuesToTry, tune
from attnfuzz.bench.tuning_record import Tuned, grown, python_source
from attnfuzz.declaration import load_kernels
from attnfuzz.kernels import tuned
from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.grouped.launch import _launch
from attnfuzz.kernels.q_block.heuristics import MAX_SEGMENTS, Launch, choose
from tests.common.timing_stand_ins import Pretended, times

RECORDS = Path(__file__).parents[2] / "docs" / "tuning"
H100 = GpuLimits(132, 227 << 10, False, True, "NVIDIA H100 80GB HBM3", (9, 0))
LLAMA: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2, "num_sms": 132}
PROMPT: dict[str, Any] = LLAMA | {"num_seqs": 4, "max_query_len": 512, "max_seq_len": 512}
DECODE: dict[str, Any] = LLAMA | {"num_seqs": 1, "max_query_len": 1, "max_seq_len": 8192}
AS_MEASURED = {"prompt": Launch(128, 32, 8, 3, 1, 1), "decode": Launch(16, 128, 4, 2, 16, 1)}


def made_up(target: str, tried: ValuesToTry, best: dict[str, dict[str, Any]]) -> Tuned:
    """A run on an H100 on which ``best`` is the fastest, of prompts or of batches that decode."""
    (kernel,) = load_kernels(target)

    def answer(request: MeasureRequest) -> MeasureReply:
        wanted = best["prompt" if max(request.shape.queries) > 1 else "decode"]
        return times(request, 1.0 if wanted.items() <= request.options.items() else 2.0)

    process = Pretended(answer)
    process.machine = MachineReply(device="cuda", name=H100.name, processors=132, capability=(9, 0))
    fixed: ValuesToTry = {("tuned",): ((False,),)}
    record = tune(process, kernel.declaration, Tuning(options={**tried, **fixed}))
    features = ("batch", "max_seq_len", "heads_per_group", "head_size", "max_query_len", "rows", "pairs")
    return grown(target, record, features, 8)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if both kernels had been tuned on an H100."""
    q_block: ValuesToTry = {("block_m", "num_warps"): ((128, 8), (16, 4)), ("tile", "num_stages"): ((32, 3), (128, 2))}
    q_block_best = {
        "prompt": {"block_m": 128, "num_warps": 8, "tile": 32, "num_stages": 3, "fill": 1},
        "decode": {"block_m": 16, "num_warps": 4, "tile": 128, "num_stages": 2, "fill": 1},
    }
    grouped: ValuesToTry = {("num_warps", "pdl"): ((4, True), (8, False)), ("tile", "num_stages"): ((64, 2), (32, 4))}
    grouped_best = {"decode": {"num_warps": 8, "pdl": False, "tile": 32, "num_stages": 4, "fill": 4}}
    fills: ValuesToTry = {("fill",): ((1,), (4,))}
    trees = []
    for target, tried, best in (
        ("paged_attention_auto", q_block, q_block_best),
        ("paged_grouped_auto", grouped, grouped_best),
    ):
        path = tmp_path / f"{target}.py"
        path.write_text(python_source(made_up(target, {**tried, **fills}, best)))
        spec = importlib.util.spec_from_file_location(target, path)
        assert spec is not None
        assert spec.loader is not None
        tree = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tree)
        trees.append(tree)
    monkeypatch.setattr(tuned, "_TREES", trees)
    tuned.tree_for.cache_clear()
    _launch.cache_clear()
    yield
    tuned.tree_for.cache_clear()
    _launch.cache_clear()


@pytest.mark.usefixtures("measured")
def test_a_gpu_that_was_measured_gets_its_launches() -> None:
    """Tuning would change nothing, or a GPU get what is fast on another one."""
    assert choose(**PROMPT, gpu=H100) == AS_MEASURED["prompt"]
    assert choose(**DECODE, gpu=H100) == AS_MEASURED["decode"]
    h200 = H100._replace(name="NVIDIA H200")
    assert choose(**PROMPT, gpu=h200) == AS_MEASURED["prompt"]
    untuned = choose(**PROMPT, gpu=H100, tuned=False)
    assert untuned != AS_MEASURED["prompt"]
    for other in (
        None,
        H100._replace(name="NVIDIA H100 PCIe", processors=114),
        H100._replace(name="NVIDIA B200", processors=148, capability=(10, 0)),
    ):
        assert choose(**PROMPT, gpu=other) == untuned


@pytest.mark.usefixtures("measured")
def test_what_was_not_measured_is_chosen_by_shape() -> None:
    """Heads of 256 would get the tiles of 128, which spill, and float32 those that take minutes to compile."""
    for other in ({"head_size": 256}, {"itemsize": 4}):
        assert choose(**PROMPT | other, gpu=H100) == choose(**PROMPT | other, gpu=H100, tuned=False)


@pytest.mark.usefixtures("measured")
def test_what_a_caller_gives_is_not_chosen() -> None:
    """An option would be ignored on the one GPU that was measured."""
    assert choose(**PROMPT, gpu=H100, tile=64) == AS_MEASURED["prompt"]._replace(tile=64)
    assert choose(**DECODE, gpu=H100, num_segments=3).num_segments == 3


@pytest.mark.usefixtures("measured")
def test_grouped_decode_is_launched_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan would stay the one that was written down by hand."""
    monkeypatch.setattr("attnfuzz.kernels.grouped.launch.gpu_at", lambda device: H100)
    shape = (1, 32, 8, 128, 128, 8192, torch.float16, 2, torch.device("cuda", 0))
    launch = _launch(*shape, *[None] * 7)
    assert launch.options == {"num_warps": 8, "num_stages": 4}
    assert (launch.of_splits["TILE"], launch.num_splits) == (32, 4 * 132 // 8)
    by_hand = _launch(*shape, *[None] * 7, tuned=False)
    assert (by_hand.of_splits["TILE"], by_hand.options["num_stages"]) == (32, 3)
    given = _launch(*shape, *[None] * 7, fill=1, balanced=True)
    assert (given.balanced, given.num_splits, given.of_splits["TILE"]) == (True, 132 // 8, 32)
    of_8_bits = _launch(*shape[:7], 1, shape[8], *[None] * 7)
    assert of_8_bits.options["num_warps"] == 4


def test_committed_trees_are_those_of_their_records() -> None:
    """Figures would be claimed that nobody could find again, or a tree be changed by hand."""
    modules = {found.name for found in pkgutil.iter_modules(tuned.__path__)}
    records = {path.stem: msgspec.json.decode(path.read_bytes(), type=Tuned) for path in RECORDS.glob("*.json")}
    assert modules <= set(records)  # a record whose tree is no better than a plan by hand has no module
    for name, read in records.items():
        again = grown(read.kernel, read.record, read.features, read.max_leaves)  # logarithms may differ in a last bit
        assert again.tree == read.tree
        if name in modules:
            written = (Path(next(iter(tuned.__path__))) / f"{name}.py").read_text()
            assert written == python_source(read) == python_source(again)


def test_committed_trees_choose_what_can_be_launched() -> None:
    """A rare batch would ask for more shared memory or segments than there are, on the one GPU that was measured."""
    for tree in tuned._TREES:
        gpu = GpuLimits(tree.PROCESSORS, 227 << 10, False, True, tree.DEVICE, tree.CAPABILITY)
        for num_seqs, group, max_query_len, head_size in (
            (1, 1, 1, 64), (1000, 8, 1, 128), (1, 128, 8192, 128), (300, 3, 500, 80),
        ):  # fmt: skip
            launch = choose(
                num_seqs=num_seqs, num_q_heads=2 * group, num_kv_heads=2, head_size=head_size, itemsize=2,
                max_query_len=max_query_len, max_seq_len=8192, num_sms=tree.PROCESSORS, gpu=gpu,
            )  # fmt: skip
            assert (launch.block_m + 2 * launch.num_stages * launch.tile) * 128 * 2 <= 227 << 10
            assert launch.block_m >= 16 <= launch.tile
            assert 1 <= launch.num_segments <= MAX_SEGMENTS
