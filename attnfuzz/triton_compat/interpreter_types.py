"""Types of interpreted tensors, made once each: a third of the time of a kernel went into making them again.

An interpreted program computes with small arrays, and NumPy takes less time for an operation than Triton takes to say
of what type its result is: each result has a type of its own, whose shape is unwrapped, checked and written out in
words, and each operation asks whether its operands have to be cast and broadcast, by comparing such types. Here types
of the same elements and shape share what they hold, and an operation whose operands need nothing is told so at once. No
number is computed in another way.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from attnfuzz.triton_compat.patching import takes

Method = Callable[..., Any]

_ADDED = "attnfuzz_types"
_OF_TENSORS = "attnfuzz_of_tensors"
"""Attribute of a type for its tensors: their shape and number of elements."""
_OF_TYPE = {"element_ty", "shape", "numel", "name"}
_OF_TENSOR = {"handle", "shape", "numel", "type", "dtype"}
_PARAMETERS = {
    ("block_type", "__init__"): ["self", "element_ty", "shape"],
    ("tensor", "__init__"): ["self", "handle", "type"],
    ("dtype", "__eq__"): ["self", "other"],
    ("TritonSemantic", "cast"): ["self", "input", "dst_ty", "fp_downcast_rounding"],
    ("TritonSemantic", "broadcast_impl_value"): ["self", "lhs", "rhs"],
}


def install_types() -> bool:
    """Have types made once, of all kernels; returns False, changing nothing, for an unknown Triton."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, _ADDED):
        return True
    core: Any = importlib.import_module("triton.language.core")
    owners: dict[str, Any] = {
        "block_type": getattr(core, "block_type", None),
        "tensor": getattr(core, "tensor", None),
        "dtype": getattr(core, "dtype", None),
        "TritonSemantic": getattr(importlib.import_module("triton.language.semantic"), "TritonSemantic", None),
    }
    known = ((vars(owners[owner] or object).get(name), wanted) for (owner, name), wanted in _PARAMETERS.items())
    if not all(takes(method, *wanted) for method, wanted in known):
        return False
    patch, semantic = (getattr(interpreter, name, None) for name in ("_patch_attr", "interpreter_semantic"))
    if semantic is None or not takes(patch, "obj", "name", "member", "builder", "scope"):
        return False
    if not _is_made_as_known(core):
        return False
    methods = {key: vars(owners[key[0]])[key[1]] for key in _PARAMETERS}
    core.block_type.__init__ = _made_once(methods["block_type", "__init__"], core)
    core.tensor.__init__ = _sharing(methods["tensor", "__init__"])
    core.dtype.__eq__ = _comparing(methods["dtype", "__eq__"], core.dtype)
    owners["TritonSemantic"].cast = _unless_cast(methods["TritonSemantic", "cast"])
    owners["TritonSemantic"].broadcast_impl_value = _unless_alike(methods["TritonSemantic", "broadcast_impl_value"])
    interpreter._patch_attr = _patching(semantic)
    setattr(interpreter, _ADDED, True)
    return True


def _is_made_as_known(core: Any) -> bool:
    """Whether a type and a tensor hold what is shared here, and nothing besides."""
    of_type = core.block_type(core.float32, [core.constexpr(2), 4])
    of_tensor = core.tensor(None, of_type)
    return (
        set(vars(of_type)) == _OF_TYPE
        and set(vars(of_tensor)) == _OF_TENSOR
        and [*of_type.shape] == [2, 4]
        and [one.value for one in of_tensor.shape] == [2, 4]
        and of_tensor.dtype is core.float32
        and of_tensor.type is of_type
        and not hasattr(core.float32, "shape")
    )


def _made_once(method: Method, core: Any) -> Method:
    """Have types of one shape share the object that ``method`` makes, which is how `_unless_alike` knows them.

    What is no plain shape is left to Triton, which may object to it.
    """
    known: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[Any, ...], Any] = {}
    constant, kinds = core.constexpr, (list, core.tuple)

    @functools.wraps(method)
    def made_once(self: Any, element_ty: Any, shape: Any) -> None:
        given: Any = shape if type(shape) in kinds else (None,)
        sizes = tuple([size.value if type(size) is constant else size for size in given])
        for size in sizes:
            if type(size) is not int:  # 2.0 would be found as 2
                method(self, element_ty, shape)
                return
        key = str(element_ty), sizes
        made = known.get(key)
        if made is None:
            method(self, element_ty, shape)
            shared = shapes.setdefault(sizes, self.shape)
            made = known[key] = {"shape": shared, "numel": self.numel, "name": self.name, _OF_TENSORS: {}}
        self.element_ty = element_ty
        vars(self).update(made)

    return made_once


def _sharing(method: Method) -> Method:
    """Have all tensors of a type share the objects for their shape and number of elements."""

    @functools.wraps(method)
    def sharing(self: Any, handle: Any, type: Any) -> None:
        shared = vars(type).get(_OF_TENSORS)
        if not shared:
            method(self, handle, type)
            if shared is not None:
                shared |= {"shape": self.shape, "numel": self.numel}
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(shared)

    return sharing


def _comparing(method: Method, scalar: Any) -> Method:
    @functools.wraps(method)
    def comparing(self: Any, other: Any) -> Any:
        if self is other:
            return True
        return self.name == other.name if type(other) is scalar else method(self, other)

    return comparing


def _unless_cast(method: Method) -> Method:
    @functools.wraps(method)
    def unless_cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.type.scalar is dst_ty.scalar else method(self, input, dst_ty, fp_downcast_rounding)

    return unless_cast


def _unless_alike(method: Method) -> Method:
    @functools.wraps(method)
    def unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = (getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None))  # a scalar has none
        return (lhs, rhs) if shapes[0] is shapes[1] else method(self, lhs, rhs)

    return unless_alike


def _patching(semantic: Any) -> Method:
    """As Triton's own, of which each call makes a dictionary anew."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        del builder

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*arguments, **named)

        scope.set_attr(obj, name, called)

    return patch_attr
