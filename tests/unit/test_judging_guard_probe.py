"""What an executor tells of one run with chosen tensors guarded: here on the host, where too much would be a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.messages import Edge, GuardReply, GuardRequest, Neighbourhood
from attnfuzz.judging.special_runs import guarded_reply
from attnfuzz.oracles.exception import context_lost
from attnfuzz.problems.simplest import simplest_case

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
