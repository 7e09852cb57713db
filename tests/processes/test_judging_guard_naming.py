"""Which tensor an access outside goes beyond, told by runs with single tensors guarded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.declaration import Declaration, Kernel, load_kernels
from attnfuzz.judging import guard_naming
from attnfuzz.judging.guard_naming import GuardedRuns, named_access, with_name
from attnfuzz.judging.messages import Edge, GuardReply, GuardRequest, Neighbourhood
from attnfuzz.judging.special_runs import guarded_reply
from attnfuzz.oracles.exception import context_lost
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.verdict import Failure, Verdict

KERNELS = Path(__file__).parents[1] / "oracles" / "relations" / "reaching_kernels.py"


def reaching(tensor: str, access: str, side: str) -> tuple[Kernel, Any]:
    (kernel,) = load_kernels(f"{KERNELS}:paged")
    declaration = kernel.declaration
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    return kernel, msgspec.structs.replace(case, options={"tensor": tensor, "access": access, "side": side})


def reply_to(tensor: str, access: str, side: str, **changes: Any) -> GuardReply:
    kernel, case = reaching(tensor, access, side)
    edge: Edge = "end" if side == "past" else "start"
    request = GuardRequest("", msgspec.Raw(b""), edge, (tensor,), room=64)
    return guarded_reply(kernel, case, msgspec.structs.replace(request, **changes), device="cpu")


@pytest.mark.parametrize("side", ["past", "before"])
@pytest.mark.parametrize("tensor", ["k_cache", "out", "workspace"])
def test_a_write_into_the_room_is_seen_and_a_read_is_not(tensor: str, side: str) -> None:
    """A write would be called a read, or of another tensor."""
    for access, written in (("write", 1), ("read", 0)):
        (found,) = reply_to(tensor, access, side).tensors
        assert (found.name, found.written) == (tensor, written)
        assert found.nbytes % found.itemsize == 0


def test_others_lie_in_ordinary_memory() -> None:
    """No access could be put down to one of two tensors."""
    found = reply_to("q", "write", "past", names=("k_cache", "lse")).tensors
    assert [tensor.name for tensor in found] == ["k_cache", "lse"]
    assert not any(tensor.written for tensor in found)
    assert reply_to("q", "read", "past", names=()).tensors == ()


def test_shape_and_size_are_those_of_the_case() -> None:
    """The message would describe another tensor."""
    (found,) = reply_to("block_table", "read", "past").tensors
    assert found == Neighbourhood("block_table", "int32", (1, 1), 4, 4, 0)


def test_a_lost_context_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would take it for a bug of the framework."""
    kernel, case = reaching("q", "read", "past")

    def lost(error: BaseException) -> str | None:
        return context_lost(error) or "illegal memory access"

    for module in ("attnfuzz.oracles.relations.guard_page", "attnfuzz.judging.special_runs"):
        monkeypatch.setattr(f"{module}.context_lost", lost)

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error")

    request = GuardRequest("", msgspec.Raw(b""), "end", ("q",))
    broken = Kernel(fails, kernel.declaration)
    assert guarded_reply(broken, case, request, device="cpu") == GuardReply("illegal memory access")


NAMES = ["q", "seq_lens", "k", "v", "out", "lse", "workspace"]
CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25)
FAULT = GuardReply("illegal memory access")


class Gpu:
    """A kernel that touches ``elements`` elements beyond an edge of one tensor; counts the runs that it takes."""

    def __init__(self, name: str, edge: Edge, elements: int, *, written: bool = False, **changes: Any) -> None:
        shape = {"name": name, "dtype": "float16", "shape": (3, 13), "itemsize": 2, "nbytes": 78, "written": 0}
        self.tensor = msgspec.convert(shape | changes, Neighbourhood)
        self.edge = edge
        self.elements = elements
        self.is_write = written
        self.takes_unaligned = True
        self.runs = 0
        self.faults = 0

    def __call__(self, edge: Edge, names: Sequence[str], room: int, aligned: bool) -> GuardReply | None:
        self.runs += 1
        if not aligned and not self.takes_unaligned:
            return GuardReply("misaligned address")
        if aligned:
            padding = -(self.tensor.nbytes + room) % 16 if edge == "end" else -room % 16
            room += padding
        if edge == self.edge and self.tensor.name in names:
            if room < self.elements * self.tensor.itemsize:
                self.faults += 1
                return FAULT
            written = 1 if self.is_write and self.elements and room else 0
            return GuardReply(tensors=(msgspec.structs.replace(self.tensor, written=written),))
        return GuardReply(tensors=(self.tensor,) if self.tensor.name in names else ())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("edge", "words"), [("end", "past {} (float16 [3, 13])"), ("start", "before {} (float16 [3, 13])")]
)
def test_tensor_and_edge_are_found_at_the_price_of_a_process(name: str, edge: Edge, words: str) -> None:
    """Another tensor would be named; or the search take minutes, at a process and seconds for each fault."""
    gpu = Gpu(name, edge, 2 if edge == "end" else 1, nbytes=80)
    access = named_access(gpu, NAMES)
    assert access is not None
    sentence = access.words
    assert access.tensor == name
    assert words.format(name) in sentence
    assert gpu.faults <= 3


@pytest.mark.parametrize("elements", [1, 2, 7, 8, 9, 40, 1000, 30_000])
def test_distance_of_a_read_is_exact(elements: int) -> None:
    """An engineer would look for an access of another size."""
    gpu = Gpu("k", "end", elements, nbytes=80)
    up_to = "up to " if elements > 1 else ""
    noun = "element" if elements == 1 else "elements"
    sentence = f"the kernel read past k (float16 [3, 13]): {up_to}{elements} {noun} ({2 * elements} bytes) past its end"
    access = named_access(gpu, NAMES)
    assert access is not None
    assert access.words == sentence
    assert gpu.faults <= 16


def test_kernels_that_need_alignment_are_told_to_the_vector() -> None:
    """A misaligned address, which costs the context too, would pass for an access outside."""
    gpu = Gpu("k", "end", 9, nbytes=80)
    gpu.takes_unaligned = False
    access = named_access(gpu, NAMES)
    assert access is not None
    sentence = access.words
    assert sentence == "the kernel read past k (float16 [3, 13]): up to 16 elements (32 bytes) past its end"


def test_padding_of_odd_sizes_counts() -> None:
    """The distance would be off by the bytes that alignment takes."""
    gpu = Gpu("k", "end", 2, nbytes=78)  # 2 bytes of padding: a fault begins at the second element
    access = named_access(gpu, NAMES)
    assert access is not None
    sentence = access.words
    assert sentence == "the kernel read past k (float16 [3, 13]): up to 2 elements (4 bytes) past its end"


def test_a_write_shows_in_the_room_beside_the_tensor() -> None:
    """A write would be called a read, or cost as many runs."""
    gpu = Gpu("out", "start", 1, written=True)
    access = named_access(gpu, NAMES)
    assert access is not None
    assert access.words == "the kernel wrote before out (float16 [3, 13]): 1 element (2 bytes) before its start"
    assert gpu.faults == 1


def test_far_away_is_told_without_a_shape() -> None:
    """Whoever reaches 64 KiB beyond would be said to have stopped there."""
    access = named_access(Gpu("v", "end", 1 << 20), NAMES)
    assert access is not None
    assert access.words == "the kernel read or wrote past v, perhaps more than 65536 bytes past its end"


def test_what_faults_now_and_then_is_not_put_down_to_a_tensor() -> None:
    """The last tensor of a list would be accused of what has nothing to do with it."""
    asked: list[tuple[str, ...]] = []

    def faults_unless_alone(edge: Edge, names: Sequence[str], room: int, aligned: bool) -> GuardReply:
        asked.append(tuple(names))
        return FAULT if len(names) > 1 else GuardReply()

    assert named_access(faults_unless_alone, NAMES) is None
    assert asked == [(name,) for _ in ("end", "start") for name in NAMES]


def test_silence_names_nothing() -> None:
    """A kernel that faults now and then would be accused of a certain tensor."""
    assert named_access(Gpu("v", "end", 0), NAMES) is None
    assert named_access(lambda *_: None, NAMES) is None


class Asked:
    """A runner whose kernel reads one element past q."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.gpu = Gpu("q", "end", 1, nbytes=80)

    def guarded(self, declaration: Declaration, request: GuardRequest) -> GuardReply | None:
        assert declaration.target == "k.py:k"
        return self.gpu(request.edge, request.names, request.room, request.aligned)


def verdict_of(**changes: Any) -> Verdict:
    raised = "with each tensor ending at unmapped memory: the kernel left a CUDA error: illegal memory access"
    fields = {"oracle": "guard_page", "kind": "raised cuda:illegal memory access", "message": raised}
    return Verdict(failure=Failure(**{**fields, **changes}), fatal=True)


def test_only_the_message_changes() -> None:
    """The search would take the same bug for two, or replay not recognise it."""
    declaration = Declaration(name="k", problem="dense_decode", target="k.py:k")
    before = verdict_of()
    asked: Any = Asked()
    after = with_name(asked, declaration, CASE, before)
    assert before.failure is not None
    assert after.failure is not None
    assert (after.failure.kind, after.fatal) == (before.failure.kind, True)
    assert after.failure.message == "the kernel read past q (float16 [3, 13]): 1 element (2 bytes) past its end"
    assert after.failure.details == (before.failure.message,)
    runs = asked.gpu.runs
    for other in (Verdict(), verdict_of(oracle="page_relocation")):
        assert with_name(asked, declaration, CASE, other) is other
    on_host: Any = Asked("cpu")
    assert with_name(on_host, declaration, CASE, before) is before
    assert not on_host.gpu.runs
    assert asked.gpu.runs == runs


def test_a_tensor_that_is_known_is_not_looked_for() -> None:
    """Each of the other tensors would be tried again, on either side."""
    declaration = Declaration(name="k", problem="dense_decode", target="k.py:k")
    asked: Any = Asked()
    asked.gpu = Gpu("out", "start", 1, written=True)
    failure = with_name(asked, declaration, CASE, verdict_of(tensor="out")).failure
    assert failure is not None
    assert failure.message == "the kernel wrote before out (float16 [3, 13]): 1 element (2 bytes) before its start"
    assert asked.gpu.runs == 3


def test_no_more_processes_end_than_may() -> None:
    """A campaign would spend its last minutes on one message."""
    asked: Any = Asked()
    declaration = Declaration(name="k", problem="dense_decode", target="k.py:k")
    runs = GuardedRuns(asked, declaration, CASE)
    faults = [runs("end", ("q",), 0, True) for _ in range(100)]
    assert faults.count(FAULT) == guard_naming._MOST_FAULTS
    assert runs("end", ("k",), 0, True) is None
