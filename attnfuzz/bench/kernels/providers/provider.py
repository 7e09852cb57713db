"""What a provider is: a name, where it comes from, and how it is called on the tensors of a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from attnfuzz.bench.kernels.calls import Prepared, Result, Unsupported
from attnfuzz.bench.kernels.shapes import Kind
from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors
from attnfuzz.problems.supports import OptionValue

__all__ = ["Options", "Provider", "as_rows", "attention_of", "merge_of", "output_only", "require_even"]

Options = dict[str, OptionValue]


@dataclass(frozen=True, slots=True)
class Provider:
    """``package``: the distribution whose version says that it is installed. ``takes_pages``: it reads a block table.

    ``prepare`` raises Unsupported for shapes that it does not take, and whatever the package raises. ``options`` are
    variants of the call, all of which are timed. ``in_graph``: it can be captured into a CUDA graph.
    """

    name: str
    about: str
    package: str
    kinds: tuple[Kind, ...]
    prepare: Callable[[AttentionTensors | MergeTensors, Options], Prepared]
    takes_pages: bool = False
    options: dict[str, tuple[OptionValue, ...]] = field(default_factory=dict)
    in_graph: bool = True


def attention_of(tensors: AttentionTensors | MergeTensors) -> AttentionTensors:
    """The tensors, known to be those of attention."""
    if isinstance(tensors, MergeTensors):
        raise Unsupported("computes attention")
    return tensors


def merge_of(tensors: AttentionTensors | MergeTensors) -> MergeTensors:
    """The tensors, known to be those of a merge."""
    if isinstance(tensors, AttentionTensors):
        raise Unsupported("merges states")
    return tensors


def require_even(tensors: AttentionTensors) -> None:
    """Raise Unsupported unless dense K and V hold all sequences without padding."""
    if not tensors.shape.is_even:
        raise Unsupported("takes no mask without a copy of it")
    if tensors.shape.room:
        raise Unsupported("its lengths are shapes")


def output_only(returned: object) -> Result:
    """For calls that return the output alone, with axes (token, head, d)."""
    if not isinstance(returned, Tensor):
        raise TypeError(f"returned {type(returned).__name__}, where a tensor was expected")
    return returned, None


def as_rows(returned: object) -> Result:
    """For calls that return the output with one query a sequence, axes (sequence, head, 1, d)."""
    out, _ = output_only(returned)
    return out[:, :, 0], None
