"""Rewrites lines of a kernel that Python means otherwise than Triton's compiler, before they are interpreted.

The interpreter runs a kernel as the Python that it is written in. Where the compiler gives a line another meaning,
kernels that are right on a GPU look wrong on a CPU (Triton 3.6 to 3.9):

* A block is true to Python, so that `a and b` of two blocks is `b`, `a or b` is `a`, and `not a` is False. The compiler
  combines them element by element, and so does it here. Of scalars these operators are left as they are.
* In `for i in range(...)` Python counts with integers of its own, which have no `i.to(tl.int64)` and never overflow.
  The compiler counts with scalars, of the type to which it promotes those of the bounds, and so does it here. The
  numbers of `tl.static_range` are known when a kernel is compiled, and stay Python's.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

_MEANINGS = "attnfuzz_meanings"
"""The name, beside a kernel's own, of what rewritten kernels call."""
_COUNTING = "range"
_OF_MODULES = "visit_Module"


def install_rewriting() -> bool:
    """Rewrite kernels from now on; returns False, changing nothing, for a Triton that is built differently."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, _MEANINGS):
        return True
    rewriter = getattr(interpreter, "ASTTransformer", None)
    if not inspect.isclass(rewriter) or not issubclass(rewriter, ast.NodeTransformer) or _OF_MODULES in vars(rewriter):
        return False
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if not callable(getattr(semantic, "integer_promote_impl", None)) or not callable(
        getattr(interpreter, "_get_np_dtype", None)
    ):
        return False

    def visit_module(self: ast.NodeTransformer, node: ast.Module) -> ast.AST:
        # As a whole and first: the interpreter leaves some parts alone, visits others twice, or makes nodes of its own.
        return self.generic_visit(_Rewriter().visit(node))

    vars(interpreter)[_MEANINGS] = _Meanings(interpreter)
    setattr(rewriter, _OF_MODULES, visit_module)
    return True


def _call(method: str, *arguments: ast.expr, keywords: Iterable[ast.keyword] = ()) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(_MEANINGS, ast.Load()), method, ast.Load()), [*arguments], [*keywords])


class _Rewriter(ast.NodeTransformer):
    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """``a and b`` as ``combined(a, b) if is_block(a) else a and b``, where a is evaluated once."""
        self.generic_visit(node)
        method = "both" if isinstance(node.op, ast.And) else "either"
        left, *others = node.values
        for i, right in enumerate(others):
            name = f"attnfuzz_left_{node.lineno}_{node.col_offset}_{i}"
            test = _call("is_block", ast.NamedExpr(ast.Name(name, ast.Store()), left))
            combined = _call(method, ast.Name(name, ast.Load()), right)
            left = ast.IfExp(test, combined, ast.BoolOp(node.op, [ast.Name(name, ast.Load()), right]))
            ast.copy_location(left, node)
        return left

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        is_not = isinstance(node.op, ast.Not)
        return ast.copy_location(_call("negated", node.operand), node) if is_not else node

    def visit_For(self, node: ast.For) -> ast.For:
        """``for i in range(a, b)`` as ``for i in counted(range, a, b)``."""
        self.generic_visit(node)
        called = node.iter
        if isinstance(called, ast.Call) and _last_name(called.func) == _COUNTING:
            counted = _call("counted", called.func, *called.args, keywords=called.keywords)
            node.iter = ast.copy_location(counted, called)
        return node


def _last_name(called: ast.expr) -> str:
    """``range`` of ``tl.range(...)``, which the interpreter makes one function with ``tl.static_range``."""
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


class _Meanings:
    """Functions that kernels call in place of Python's operators and loops."""

    def __init__(self, interpreter: ModuleType) -> None:
        language = importlib.import_module("triton.language")
        self._tensor: Any = language.tensor
        self._handle = vars(interpreter)["TensorHandle"]
        self._semantic = vars(interpreter)["interpreter_semantic"]
        self._numpy_dtype: Callable[[Any], Any] = vars(interpreter)["_get_np_dtype"]

    def is_block(self, value: Any) -> bool:
        return isinstance(value, self._tensor) and bool(value.type.is_block())

    def both(self, left: Any, right: Any) -> Any:
        if isinstance(right, self._tensor):
            return left.logical_and(right)
        return left if right else right

    def either(self, left: Any, right: Any) -> Any:
        if isinstance(right, self._tensor):
            return left.logical_or(right)
        return right if right else left

    def negated(self, value: Any) -> Any:
        return value.__not__() if self.is_block(value) else not value

    def counted(self, numbers: Callable[..., Any], *bounds: Any, **others: Any) -> Iterable[Any]:
        """``numbers(*bounds, **others)``; a range of Python's integers as scalars."""
        found = numbers(*bounds, **others)
        if not isinstance(found, range):
            return found  # type: ignore[no-any-return]  # a kernel's own, whatever it is
        named = (others[name] for name in ("arg1", "arg2", "step") if others.get(name) is not None)
        kinds = (self._semantic.to_tensor(bound).dtype for bound in (*bounds, *named) if bound is not None)
        kind = functools.reduce(self._semantic.integer_promote_impl, kinds)
        dtype = self._numpy_dtype(kind)
        return (self._tensor(self._handle(np.array([number], dtype), kind), kind) for number in found)
