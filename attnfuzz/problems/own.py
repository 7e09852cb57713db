"""`attnfuzz.Problem`: what a user's file says of a problem that attnfuzz does not have. Torch-free by itself.

The class's attributes say what a case has, as data (`attnfuzz.problems.open_cases`), and its methods what is computed;
these run in executors only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from attnfuzz.overlay import original_of
from attnfuzz.problems.fields import Choice, Field, Integer, Integers, Seed
from attnfuzz.problems.open_cases import OpenProblem, implementation_of, implemented
from attnfuzz.problems.shapes import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Expected:
    """The right result: ``value`` in float64, or in a dtype that holds the numbers exactly, in the shape of the result.

    ``where`` (bool, of that shape; None for everywhere) are the elements that a kernel must write. Other elements of an
    output are ignored; those of a tensor that is changed in place must keep every bit. ``bound`` is the largest error
    at each element, in that shape or as one number; where it is None, `Problem.bound` is asked.
    """

    value: Tensor
    where: Tensor | None = None
    bound: Tensor | float | None = None


class Problem:
    """A problem in a user's file: subclasses say what is computed, and kernels are declared with an instance.

    Attributes that are `Integer`, `Integers`, `Choice` or `Seed` are the fields of a case, and shrinking
    makes the first of them simple first. An instance may narrow them:
    ``@attnfuzz.kernel(RopeAppend(head_size=attnfuzz.Choice((64, 128))))``.

    A case gets its fields from these alone, each independent of the others: what must fit together is worked out from
    them (``gqa_ratio`` in place of ``num_q_heads``). All methods must give the same for the same case anywhere: numbers
    come from ``attnfuzz.numbers`` or a `torch.Generator` with the case's seed.
    """

    def __init__(self, **narrowed: Field) -> None:
        fields = _fields_of(type(self))
        for name, field in narrowed.items():
            if name not in fields or not isinstance(field, Integer | Integers | Choice | Seed):
                raise ValueError(
                    f"{type(self).__name__}({name}={field!r:.80}): must be a field of the problem "
                    f"({', '.join(fields)}) as attnfuzz.Integer, Integers, Choice or Seed"
                )
            fields[name] = field
        self.fields = fields

    def tensors(self, case: Any) -> Mapping[str, TensorSpec]:
        """All tensors of ``case`` by name, in the order in which they are allocated.

        A kernel finds them under these names in its inputs, beside the fields of the case. A ``TensorSpec`` has a
        shape, the name of a dtype, and a role: "input" is read, "output" is written, and "in_place" holds something
        and is written in part.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tensors(self, case)")

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write every element that a kernel may read, in place. What is left is dead memory, and holds poison.

        ``tensors`` lie on the CPU, whatever the kernel runs on; what is written is copied to where it runs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write(self, case, tensors)")

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Expected]:
        """Each output and each tensor changed in place as it is to be, computed in float64.

        ``tensors``: a copy of the case on the CPU, as ``write`` left it, with NaN (integers: -1) elsewhere.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reference(self, case, tensors)")

    def bound(self, case: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        """The largest error at each element of a result, for those that have a bound; 0 where every bit counts.

        Not asked for results of which ``reference`` gives a bound. Others are compared with the usual tolerance of
        their dtype.
        """
        del case, tensors
        return {}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Any]]:
        """Tensors that a kernel may take for something else, for the diagnosis of wrong results.

        Of each mistake, told in a clause, the tensors and the fields that are others then, by name: with them
        ``reference`` gives what comes of it. Where one of them alone gives the kernel's results, the report says so.
        """
        del case, tensors
        return {}

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """A few words for a reader on the element ``index`` of the tensor ``name``; empty for nothing."""
        del case, name, index
        return ""


def _fields_of(problem: type) -> dict[str, Field]:
    members = {name: value for base in reversed(problem.__mro__) for name, value in vars(base).items()}
    return {name: value for name, value in members.items() if isinstance(value, Integer | Integers | Choice | Seed)}


def describe(problem: Problem) -> OpenProblem:
    """``problem`` as others see it. Raises ValueError for one that no other process could find."""
    kind = type(problem)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or "<locals>" in kind.__qualname__:
        raise ValueError(
            f"problem {kind.__qualname__!r} is in no file at its top level, where other processes could find it; "
            "define the class there"
        )
    return OpenProblem(place=f"{original_of(file)}:{kind.__qualname__}", fields=problem.fields)


def moved(description: OpenProblem, file: str, prefix: str) -> OpenProblem:
    """``description``, which says ``prefix`` in place of ``file`` if it lives there."""
    place, _, name = description.place.rpartition(":")
    problem = implementation_of(description)
    if place != file or problem is None:
        return description
    return implemented(msgspec.structs.replace(description, place=f"{prefix}:{name}"), problem)
