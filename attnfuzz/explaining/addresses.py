"""What lies at an address of a case's memory, in words."""

from __future__ import annotations

from torch import Tensor

from attnfuzz.explaining.places import Places, key_slots, value_tensors
from attnfuzz.explaining.rig import Rig
from attnfuzz.judging.words import plural
from attnfuzz.memory.arena import Region
from attnfuzz.problems.cases import AttentionCase

__all__ = ["name_of"]


def name_of(rig: Rig, places: Places, unit: int) -> tuple[str, str]:
    """The stretch of dead memory that an address lies in, and the very place in it.

    A stretch is what lies past the end of a sequence in its last page, an unowned page, a gap, or a red zone.
    """
    region, distance = rig.place_of(unit)
    itemsize = region.tensor.dtype.itemsize
    size = region.end - region.start
    if distance < 0:
        before = plural(-(distance // itemsize), "element")
        return f"zone {rig.zone_of(unit)}", f"{before} before the start of {region.name}"
    if distance >= size:
        past = plural((distance - size) // itemsize + 1, "element")
        return f"zone {rig.zone_of(unit)}", f"{past} past the end of {region.name}"
    return _inside(rig, places, region, distance // itemsize)


def _inside(rig: Rig, places: Places, region: Region, element: int) -> tuple[str, str]:
    """A place between the first and the last element of a tensor."""
    if isinstance(rig.case, AttentionCase) and region.name in ("k", "v", "k_cache", "v_cache", "kv_cache"):
        for what, view in (("K", key_slots(rig.inputs)), ("V", value_tensors(rig.inputs)[0])):
            index = _index_in(view, region, element)
            if index is not None:
                a, b = index[:2]
                return f"{what}, {a}", f"{what} of {places.slot_name(a, b)}, {_whose(places.contents(a, b))}"
    index = _index_in(region.tensor, region, element)
    if index is None:
        gap = f"a gap between the elements of {region.name}"
        return gap, gap
    if region.name in ("prefix_output", "suffix_output"):
        state = f"{region.name} of token {index[0]}, head {index[1]}, an empty state"
        return state, state
    return region.name, f"{region.name}{list(index)}"


def _whose(contents: str) -> str:
    return contents if contents.startswith(("which", "past")) else f"which holds {contents}"


def _index_in(view: Tensor, region: Region, element: int) -> tuple[int, ...] | None:
    """The index in `view`, of the region's memory, of the element that far from the region's first one."""
    offset = element - (view.data_ptr() - region.tensor.data_ptr()) // view.element_size()
    index = [0] * view.dim()
    for axis in sorted(range(view.dim()), key=view.stride, reverse=True):
        if view.shape[axis] > 1:
            index[axis], offset = divmod(offset, view.stride(axis))
            if not 0 <= index[axis] < view.shape[axis]:
                return None
    return tuple(index) if offset == 0 else None
