"""Find what a kernel of a user's own problem reads or writes in wrong places, or takes for something else.

All that is known of such a problem is its reference. So that is asked about changed inputs as the kernel is: elements
that must matter and do not are read elsewhere, and the reference tells where, if it gives the kernel's result once they
hold what lies there. Of results it is looked for where else the rows lie that are missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from attnfuzz.explaining.neighbours import longer_cases, of_other_strides
from attnfuzz.explaining.reruns import Reruns, Results
from attnfuzz.inputs.open_module import OWN_TOLERANCES, Target, filled
from attnfuzz.memory.patterns import bits
from attnfuzz.mistake import OF_PROBLEM
from attnfuzz.problems.cases import Case
from attnfuzz.problems.fields import Seed
from attnfuzz.problems.open_cases import OpenCase, ProblemError, implementation_of
from attnfuzz.problems.own import Expected
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.wording import element, plural
from attnfuzz.trials.comparison import axes_of, extent
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.verdict import Cause

NOT_READ = "not_read"
"""The cause where what a kernel does not read is known, and not what it reads in place of that."""

_FLIPPED = {torch.uint8: 0x15, torch.int8: 0x15, torch.float16: 0x200, torch.bfloat16: 0x40, torch.float32: 0x400000}
"""Bits of an element that is changed: of a number, enough to see it. What other types hold are indices, for all that is
known, and a kernel may die of a wrong one."""
_MOST_ELEMENTS = 1024
_FAR_ENOUGH = 4.0
"""Bounds by which the result must change with an element that matters."""
_NEARLY = 1e-2
"""Of the largest number of a result."""
_FARTHEST = 64
"""Elements from the right place, in either direction, up to which any distance is tried; else those that the fields of
the case say."""
_FEWEST_NUMBERS = 4
"""Unlike each other, so that a row lies nowhere by chance."""

Elements = Int64[Tensor, " elements"]
Some = Int64[Tensor, " some"]
"""Of the elements that are looked at."""


def read_elsewhere(reruns: Reruns) -> Iterator[Cause]:
    """Inputs that do not matter though they must, if it is known where the kernel reads in place of them."""
    case = reruns.case
    for name, ignored, is_replayed in _unread(reruns):
        tensor = getattr(reruns.inputs, name)
        mask = torch.zeros(tensor.numel(), dtype=torch.bool, device="cpu").index_fill(0, ignored, True)
        which = extent(name, axes_of(name, case), mask.view(tensor.shape))
        found = [step for step in _steps(case) if is_replayed(step)]
        if len(found) == 1 and not _is_refuted(reruns, name, *found):
            (step,) = found
            said, side = _as_large(case, name, tensor, step), "before" if step < 0 else "behind"
            why = f", as many as {' or '.join(said)}" if said else ""
            words = f"{which} are read {plural(abs(step), 'element')} {side} their places{why}"
            yield Cause(mistake="read_elsewhere", way=f"{name}: {step:+}", words=words)
        elif not _is_read_of_others(reruns, name, ignored):
            yield Cause(mistake=NOT_READ, way=name, words=f"{which} do not matter, although they must")


def _unread(reruns: Reruns, among: str = "") -> Iterator[tuple[str, Elements, Callable[[int], bool]]]:
    """Inputs, or the one that is named, with their elements that do not matter though they must; and whether what lies
    so many elements from these gives the results in their place."""
    case = reruns.case
    if not isinstance(case, OpenCase):
        return
    tell_memory_apart(reruns)
    reruns.reset()
    got = reruns.run()
    reference = AskedProblem(case)
    if is_given(got, reference.right):
        return
    for name, spec in tensor_specs(case).items():
        tensor = getattr(reruns.inputs, name)
        if spec.role != "input" or tensor.dtype not in _FLIPPED or not tensor.is_contiguous():
            continue
        live = reruns.values.written[name][1].flatten().nonzero().flatten()
        if (among and name != among) or not 0 < len(live) <= _MOST_ELEMENTS:
            continue
        ignored = _ignored(reruns, reference, name, live, got)
        if len(ignored):
            yield name, ignored, partial(_is_replayed, reruns, reference, got, name, ignored)


def _is_replayed(
    reruns: Reruns, reference: AskedProblem, got: Results, name: str, elements: Elements, step: int
) -> bool:
    return is_given(got, reference.moved(reruns, name, elements, step))


def _is_refuted(reruns: Reruns, name: str, step: int) -> bool:
    """Whether with other numbers it is not what lies there that is read in place of what does not matter: what matters
    little is given by whatever lies anywhere, and a key that is left out by another one in its place."""
    return any(not replayed(step) for one in _renewed(reruns.case) for *_, replayed in _unread(reruns.of(one), name))


def _renewed(case: Case) -> Iterator[OpenCase]:
    """The case with other numbers, where they have a seed."""
    if isinstance(case, OpenCase):
        seeds = {one: getattr(case, one) for one, field in case.problem.fields.items() if isinstance(field, Seed)}
        for more in _OTHER_SEEDS if seeds else ():
            yield msgspec.structs.replace(case, **{one: seed ^ more for one, seed in seeds.items()})


_Replays = Callable[["AskedProblem"], Iterator[tuple[Cause, Callable[[], list[Target]]]]]
"""Mistakes, each with what comes of it, by the reference."""
_AGREEING = 3
"""Other cases in which the one mistake gives the kernel's results too."""


def mistaken(reruns: Reruns, others: Iterable[Reruns]) -> Iterator[Cause]:
    """The one of the mistakes that the problem knows which gives the kernel's results, of other cases too."""
    yield from _left(reruns, others, AskedProblem.known_mistakes)


def taken_for_another(reruns: Reruns, others: Iterable[Reruns]) -> Iterator[Cause]:
    """Inputs that are taken for others, or read by other strides or unpacked in another way: where the reference gives
    the kernel's results once they hold that, in one way only, of other cases too."""
    yield from _left(reruns, others, AskedProblem.mistaken)


def _left(reruns: Reruns, others: Iterable[Reruns], replays: _Replays) -> Iterator[Cause]:
    """The mistake that is left of those that give the results of a case when others are asked for theirs."""
    left: dict[tuple[str, str], Cause] | None = None
    asked = 0
    for one in itertools.chain([reruns], others):
        try:
            found = _given(one, replays, left)
        except KernelRaised as raised:
            if left is None or raised.fatal:
                raise
            continue  # a case that it refuses tells nothing
        if found is None and left is None:
            return
        if found is None:  # which is right
            continue
        left, asked = found, asked + 1
        if not left or (len(left) == 1 and asked > _AGREEING):
            break
    if left and len(left) == 1:
        yield from left.values()


def _given(
    reruns: Reruns, replays: _Replays, among: Mapping[tuple[str, str], Cause] | None
) -> dict[tuple[str, str], Cause] | None:
    """The mistakes, ``among`` these if there are some, which give the kernel's results; None where they are right."""
    case = reruns.case
    if not isinstance(case, OpenCase):
        return None
    tell_memory_apart(reruns)
    reference = AskedProblem(case, reruns)
    got = reruns.run()
    if is_given(got, reference.right):
        return None
    found = ((cause, results) for cause, results in replays(reference) if among is None or _key(cause) in among)
    return {_key(cause): cause for cause, results in found if is_given(got, results())}


def _key(cause: Cause) -> tuple[str, str]:
    return cause.mistake, cause.way


_OTHER_SEEDS = (1, 2, 3)


def _is_read_of_others(reruns: Reruns, name: str, ignored: Elements) -> bool:
    """Whether these elements matter with other numbers, or with more of what is counted: not to do so here says nothing
    of them then.

    Where all keys that a kernel reads are equal in one dimension, that of its query does not matter; nor does any where
    it reads one key alone.
    """
    case = reruns.case
    if not isinstance(case, OpenCase):
        return False
    alike = (one for one in longer_cases(case) if tensor_specs(one)[name] == tensor_specs(case)[name])
    for one in itertools.chain(_renewed(case), alike):
        other = reruns.of(one)
        other.reset()
        got = other.run()
        _flip(getattr(other.reset(), name), ignored)
        if any(bool((bits(part) != bits(got[result])).any()) for result, part in other.run().items()):
            return True
    return False


def tell_memory_apart(reruns: Reruns) -> None:
    """Have what the problem leaves out differ from place to place, so that what is read of it tells which."""
    reruns.reset()
    for name, spec in tensor_specs(reruns.case).items():
        tensor = getattr(reruns.inputs, name)
        if spec.role != "output" and tensor.dtype in _FLIPPED and tensor.is_contiguous():
            dead = (~reruns.values.written[name][1]).flatten().nonzero().flatten().to(tensor.device)
            numbers = dead * 37 % 61 + 1
            tensor.view(-1)[dead] = (numbers / 16 if tensor.is_floating_point() else numbers).to(tensor.dtype)
    reruns.keep()


def _steps(case: Case) -> Iterator[int]:
    """How far from its place something may be read."""
    for step in dict.fromkeys((*_sizes(case).values(), *range(1, _FARTHEST + 1))):
        yield -step
        yield step


def _sizes(case: Case) -> dict[str, int]:
    """The fields of a case that are counts of something."""
    values = {name: getattr(case, name) for name in case.problem.fields} if isinstance(case, OpenCase) else {}
    return {name: one for name, one in values.items() if isinstance(one, int) and not isinstance(one, bool) and one > 0}


def _as_large(case: Case, name: str, tensor: Tensor, step: int) -> list[str]:
    """Name what is as large as a step through a tensor: fields, and so many entries of its first axis."""
    said = [f"{field} says" for field, value in _sizes(case).items() if value == abs(step)]
    entry = tensor[0].numel() if tensor.dim() > 1 and len(tensor) > 1 else 0
    if entry and abs(step) % entry == 0:
        count, axis = abs(step) // entry, axes_of(name, case)[0]
        entries = plural(count, "row" if axis.endswith("=") else axis)
        said.append(f"{entries} {'has' if count == 1 else 'have'}")
    return said


class AskedProblem:
    """A case's problem, asked about its inputs, and about others in their place."""

    def __init__(self, case: OpenCase, reruns: Reruns | None = None) -> None:
        """``reruns``: what its next run finds also where the problem writes nothing."""
        self._case = case
        self._tensors = filled(case)
        self._reruns = reruns
        if reruns is not None:
            inputs = reruns.reset()
            self._tensors = {name: getattr(inputs, name).cpu().clone() for name in self._tensors}
        self.right = self.asked({})

    def changed(self, name: str, elements: Elements) -> list[Target]:
        """With these elements of a tensor changed."""
        other = self._tensors[name].clone()
        _flip(other, elements)
        return self.asked({name: other})

    def moved(self, reruns: Reruns, name: str, elements: Elements, step: int) -> list[Target]:
        """With what the kernel finds so many elements from them; nothing where that is outside."""
        other, there = self._tensors[name].clone(), elements + step
        if int(there.min()) < 0 or int(there.max()) >= other.numel():
            return []
        memory = bits(getattr(reruns.reset(), name)).flatten().cpu()
        bits(other).view(-1)[elements] = memory[there]
        return self.asked({name: other})

    def known_mistakes(self) -> Iterator[tuple[Cause, Callable[[], list[Target]]]]:
        """Each of the problem's own mistakes. Raises ProblemError."""
        try:
            known = implementation_of(self._case.problem).mistakes(self._case, self._tensors)
            for words, others in known.items():
                tensors = {name: other for name, other in others.items() if name in self._tensors}
                fields = {name: other for name, other in others.items() if name not in tensors}
                case = SimpleNamespace(**{**msgspec.structs.asdict(self._case), **fields})  # whatever a kernel declares
                yield Cause(mistake=OF_PROBLEM, way=words, words=words), partial(self.asked, tensors, case)
        except (ProblemError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProblemError.raised("mistakes", self._case, error) from error

    def mistaken(self) -> Iterator[tuple[Cause, Callable[[], list[Target]]]]:
        """Inputs that may be taken for others."""
        for way, words, others in itertools.chain(
            self._of_parts(), self._of_places(), self._of_tensors(), self._of_strides()
        ):
            yield Cause(mistake="taken_for_another", way=way, words=words), partial(self.asked, others)

    @property
    def _given(self) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name, one in tensor_specs(self._case).items() if one.role == "input"}

    def _of_parts(self) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
        """Halves of bytes, where the last axis is one of bytes; scales of blocks, where it is one of blocks."""
        given, last = self._given, {name: axes_of(name, self._case)[-1:] for name in self._given}
        for names in _alone_and_together([name for name in given if last[name] == ("byte",)]):
            of_bytes = {name: bits(given[name]) for name in names}
            others = {name: (one << 4 | one >> 4).view(given[name].dtype) for name, one in of_bytes.items()}
            yield f"halves: {names}", f"the two halves of each byte of {' and '.join(names)} are exchanged", others
        for names in _alone_and_together([name for name in given if last[name] == ("block",)]):
            of_blocks = {name: bits(given[name]) for name in names if given[name].shape[-1] > 1}
            for step, words in (
                (0, "the first block's"),
                (1, "that of the block before"),
                (-1, "that of the next block"),
            ):
                moved = (
                    (name, one.roll(step, -1) if step else one[..., :1].expand_as(one))
                    for name, one in of_blocks.items()
                )
                others = {name: one.clone().view(given[name].dtype) for name, one in moved}
                if others:
                    yield f"blocks: {step:+} {names}", f"{' and '.join(names)}: {words} is taken for each block", others

    def _of_places(self) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
        """Along an axis: whole numbers, and scales of blocks, alone and together.

        Of the first axis of whole numbers, where there are three places, the first and the one before are told apart.
        """
        given, axes = self._given, {name: axes_of(name, self._case) for name in self._given}
        whole = [name for name, one in given.items() if one.dtype in (torch.int32, torch.int64)]
        for name in whole:
            if axes[name] and len(one := given[name]) > 2:
                before = torch.cat((one[:1], one[:-1]))
                yield (
                    f"rows: -1 {name}",
                    f"{name}: that of the {axes[name][0]} before is taken for each",
                    {name: before},
                )
        of_blocks = [name for name in given if axes[name][-1:] == ("block",)]
        for names in (*((name,) for name in whole), *_alone_and_together(of_blocks)):
            for axis, what in enumerate(axes[names[0]]):
                least = 3 if names[0] in whole and axis == 0 else 2
                if what.endswith("=") or what == "block" or given[names[0]].shape[axis] < least:
                    continue
                first = {name: bits(given[name]).narrow(axis, 0, 1).expand_as(given[name]).clone() for name in names}
                others = {name: one.view(given[name].dtype) for name, one in first.items()}
                told = f"{' and '.join(names)}: that of the first {what} is taken for each"
                yield f"first {what}: {names}", told, others

    def _of_tensors(self) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
        """Tensors that are alike."""
        for (name, one), (other, two) in itertools.permutations(self._given.items(), 2):
            if (
                one.shape == two.shape
                and one.dtype == two.dtype
                and one.is_floating_point() | (one.dtype == torch.uint8)
            ):
                yield f"{other} for {name}", f"{other} is read in place of {name}", {name: two}

    def _of_strides(self) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
        """Read tensors that have gaps, here or with other strides, without any, and with the strides of others."""
        specs = {name: one for name, one in tensor_specs(self._case).items() if one.role == "input"}
        cases = itertools.chain([self._case], of_other_strides(self._case))
        gaps = {name for one in cases for name in specs if tensor_specs(one)[name].strides != "contiguous"}
        if self._reruns is None or not gaps:
            return
        inputs = self._reruns.reset()
        memory = {name: getattr(inputs, name) for name in specs}
        shapes = {name: tuple(one.shape) for name, one in specs.items()}
        for shape in dict.fromkeys(shapes[name] for name in specs if name in gaps):
            alike = [name for name in specs if shapes[name] == shape]
            dense = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
            for names in _alone_and_together([name for name in alike if name in gaps]):
                if others := _by_strides(memory, dict.fromkeys(names, dense)):
                    told = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} read as if contiguous"
                    yield f"contiguous: {names}", told, others
            for name, other in itertools.permutations(alike, 2):
                if gaps & {name, other} and (others := _by_strides(memory, {name: memory[other].stride()})):
                    yield f"strides of {other}: {name}", f"{name} is read by the strides of {other}", others

    def asked(self, others: Mapping[str, Tensor], case: Any = None) -> list[Target]:
        """With `others` in place of tensors of the same names, and if so that of another case of the problem."""
        case = case or self._case
        problem = implementation_of(self._case.problem)
        given = {name: others.get(name, tensor).clone() for name, tensor in self._tensors.items()}
        bounds = problem.bound(case, {name: tensor.clone() for name, tensor in given.items()})
        found = []
        for name, one in problem.reference(case, given).items():
            value = (one.value if isinstance(one, Expected) else one).double().cpu()
            if isinstance(one, Expected) and one.where is not None:
                value = torch.where(one.where.cpu(), value, 0.0)
            usual = OWN_TOLERANCES.get(self._tensors[name].dtype)
            bound: Any = bounds.get(name, 0.0 if usual is None else usual.bound(value))
            if isinstance(one, Expected) and one.bound is not None:
                bound = one.bound
            found.append(
                Target(name, value, torch.as_tensor(bound, dtype=torch.float64, device="cpu").expand_as(value))
            )
        return found


def _alone_and_together(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [*((name,) for name in names), *([tuple(names)] if len(names) > 1 else [])]


def _by_strides(memory: Mapping[str, Tensor], strides: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read what lies where these strides lead from each first element; nothing where that memory is not known."""
    try:
        return {name: memory[name].as_strided(memory[name].shape, of).cpu().clone() for name, of in strides.items()}
    except RuntimeError:
        return {}


def is_given(got: Results, wanted: Sequence[Target]) -> bool:
    """Whether these are the results, and there is something to compare: beside small numbers, a bound allows much.

    Numbers of 8 bits may be as far off as their last bit makes them.
    """
    for one in wanted:
        result, size = got[one.name], one.value.nan_to_num().abs()
        error = (result.double() - one.value).abs()
        same = (result.double() == one.value) | (result.isnan() & one.value.isnan())
        of_format = torch.zeros_like(size)
        if result.is_floating_point():  # a number below the smallest normal one has that one's last bit
            of_format = torch.finfo(result.dtype).eps * size.clamp(min=torch.finfo(result.dtype).smallest_normal)
        nearly = error <= torch.minimum(one.bound, (_NEARLY * size.max()).maximum(of_format))
        if not bool((same | nearly).all()):
            return False
    return bool(wanted)


def _flip(tensor: Tensor, elements: Elements) -> None:
    flat = bits(tensor).view(-1)
    at = elements.to(flat.device)
    flat[at] = flat[at] ^ _FLIPPED[tensor.dtype]


def _ignored(reruns: Reruns, reference: AskedProblem, name: str, live: Elements, got: Results) -> Some:
    """Elements that do not matter to the kernel, with some that must among each stretch of them.

    Of the bytes of a number, the last ones hardly matter to anybody.
    """

    def differs(chosen: Elements) -> bool:
        _flip(getattr(reruns.reset(), name), chosen)
        return any(bool((bits(part) != bits(got[result])).any()) for result, part in reruns.run().items())

    def matters(chosen: Elements) -> float:
        return max(_distance(*pair) for pair in zip(reference.right, reference.changed(name, chosen), strict=True))

    read = set(_single(live, differs).tolist())  # most kernels read all, and then nothing is left to ask
    unread = live[[int(one) not in read for one in live]]
    needed = _single(unread, lambda chosen: matters(chosen) > 0)
    strongly = {int(one) for one in needed if matters(one[None]) > _FAR_ENOUGH}
    found: list[int] = []
    stretch: list[int] = []
    for one in [*needed.tolist(), -2]:
        if stretch and one != stretch[-1] + 1:
            found += stretch if strongly & set(stretch) else []
            stretch = []
        stretch.append(one)
    return torch.tensor(sorted(found), dtype=torch.int64, device="cpu")


def _distance(one: Target, other: Target) -> float:
    """The largest difference, in bounds; infinite where a number becomes none."""
    same = (one.value == other.value) | (one.value.isnan() & other.value.isnan())
    apart = (one.value - other.value).abs() / one.bound.clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.where(same, 0.0, apart.nan_to_num(torch.inf)).max()) if one.value.numel() else 0.0


def _single(candidates: Elements, tells: Callable[[Elements], bool]) -> Some:
    """Find by halves the ``candidates`` that tell by themselves."""
    if not len(candidates) or not tells(candidates):
        return candidates[:0]
    if len(candidates) == 1:
        return candidates
    middle = len(candidates) // 2
    return torch.cat([_single(candidates[:middle], tells), _single(candidates[middle:], tells)])


def written_elsewhere(reruns: Reruns) -> Iterator[Cause]:
    """Rows of a result that are missing at their places and lie elsewhere."""
    reruns.reset()
    results = reruns.run()
    for target in reruns.values.targets("bound"):
        moves = list(_moves(reruns.case, target, reruns.values.where[target.name], results[target.name]))
        if moves:
            yield Cause(mistake="written_elsewhere", way=target.name, words="; ".join(dict.fromkeys(moves)))


_MOST_MOVES = 2


def _moves(case: Case, target: Target, where: Bool[Tensor, "..."] | None, result: Tensor) -> Iterator[str]:
    if result.dim() < 2:
        return
    wanted = target.value.to(result.dtype)
    counts = torch.ones_like(wanted, dtype=torch.bool) if where is None else where
    told = 0
    for row in range(len(wanted)):
        content = wanted[row].flatten()
        if not bool(counts[row].all()) or len(set(content.tolist())) < _FEWEST_NUMBERS:
            continue
        if int((result[row].flatten() == content).sum()) * 2 > len(content):
            continue
        lies = (result.flatten().unfold(0, len(content), 1) == content).all(-1).nonzero().flatten().tolist()
        if not lies:
            continue
        step = lies[0] - row * len(content)
        at = element(target.name, axes_of(target.name, case)[:1], (row,))
        yield f"what belongs at {at} lies {plural(abs(step), 'element')} {'behind' if step > 0 else 'before'} its place"
        told += 1
        if told == _MOST_MOVES:
            return
