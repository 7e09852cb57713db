"""Mistakes that are made in attention kernels: each operator makes one change at a time at every place that it fits.

An operator is a function from a `Function` to the changes that it makes there. They stand here in the order of masks,
addresses, the online softmax, what runs at all, and the code that launches kernels; below them, all by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from attnfuzz.mutation.source import Change, Function, is_operation

_LOOSER = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_OPPOSITE = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
_FINITE_MINIMUM = "-5e4"
"""A number as kernels use it in place of -inf: some scores lie below it."""


def mask_term(function: Function) -> Iterator[Change]:
    """``a & b``: only one of the two."""
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            yield function.replaced_by(node, node.left)
            yield function.replaced_by(node, node.right)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and len(node.values) == 2:
            yield from (function.replaced_by(node, value) for value in node.values)


def mask_dropped(function: Function) -> Iterator[Change]:
    """A load or store without its mask."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in ("load", "store") and (mask := _argument(call, "mask", 1 if name == "load" else 2)) is not None:
            others = [_argument(call, "other", 2)] if name == "load" else []
            yield _without(function, call, [mask, *filter(None, others)])


def comparison(function: Function) -> Iterator[Change]:
    """``<`` and ``<=``, ``>`` and ``>=``, ``==`` and ``!=`` in each other's place."""
    for node in function.all(ast.Compare):
        old, new = (_LOOSER | _OPPOSITE).get(type(node.ops[0]), ("", ""))
        if old and len(node.ops) == 1:
            left, right = function.source.span(node.left)[1], function.source.span(node.comparators[0])[0]
            between = function.source.data[left:right].decode()
            yield Change(left, right, between.replace(old, new, 1).encode())


def bound(function: Function) -> Iterator[Change]:
    """``i < n``: up to ``n - 1``. One more is what `comparison` does."""
    for node in function.all(ast.Compare):
        limit = node.comparators[0]
        if isinstance(node.ops[0], ast.Lt) and not isinstance(limit, ast.Constant) and len(node.ops) == 1:
            yield function.replaced(limit, f"({function.text(limit)} - 1)")


def other(function: Function) -> Iterator[Change]:
    """Another value for masked elements: NaN for a number, 0 for an infinite one, entry 1 of a table.

    Leaving out a zero is no mutant. The documentation calls the elements undefined then (NaN, at worst), but every
    backend fills them with zeros (triton-lang/triton#10119, pytorch/pytorch#127311).
    """
    for call in function.all(ast.Call):
        if function.triton_name(call) == "load" and (value := _argument(call, "other", 2)) is not None:
            is_integer = isinstance(value, ast.Constant) and isinstance(value.value, int)
            number = "0.0" if is_infinite(value) else 'float("nan")'
            yield function.replaced(value, "1" if is_integer else number)


def masked_value(function: Function) -> Iterator[Change]:
    """The score of a masked token: 0, or a number that is not small enough."""
    for call in function.all(ast.Call):
        if function.triton_name(call) != "where":
            continue
        for value in call.args[1:]:
            if is_infinite(value) and function.text(value).count("-"):
                yield function.replaced(value, "0.0")
                yield function.replaced(value, _FINITE_MINIMUM)


def is_infinite(node: ast.AST) -> bool:
    """Whether it is written as an infinite number."""
    text = ast.unparse(node)
    return any(part in text for part in ("'inf'", "'-inf'", "math.inf", "np.inf"))


def _without(function: Function, call: ast.Call, values: list[ast.expr]) -> Change:
    """``call`` without some of its arguments, and the commas before them."""
    kept = [one for one in call.args if one not in values]
    named = [keyword for keyword in call.keywords if keyword.value not in values]
    start, end = function.source.span(call)
    first = min((*call.args, *call.keywords), key=function.source.span)
    last = max((*call.args, *call.keywords), key=function.source.span)
    head = function.source.data[start : function.source.span(first)[0]].decode()
    tail = function.source.data[function.source.span(last)[1] : end].decode()
    arguments = ", ".join(function.text(one) for one in (*kept, *named))
    return Change(start, end, f"{head}{arguments}{tail}".encode())


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """The argument of that name or at that position."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is not None or len(call.args) <= position or any(isinstance(one, ast.Starred) for one in call.args):
        return named
    return call.args[position]


_KEYS_AND_VALUES = (("k", "v"), ("key", "value"), ("K", "V"))


def swap_strides(function: Function) -> Iterator[Change]:
    """Two strides that stand beside each other, in an address or in the arguments of a call."""
    for statement in (node for node in function.nodes if isinstance(node, ast.stmt)):
        if isinstance(statement, ast.For | ast.While | ast.If | ast.With):
            continue
        names = sorted(
            (node for node in ast.walk(statement) if isinstance(node, ast.Name) and is_stride(node.id)),
            key=function.source.span,
        )
        for first, second in pairwise(names):
            if first.id != second.id:
                yield function.swapped(first, second)


def other_stride(function: Function) -> Iterator[Change]:
    """K's stride for V, and V's for K."""
    for name in function.all(ast.Name):
        if is_stride(name.id):
            yield from (function.replaced(name, twin) for twin in _twins(name.id) if twin in function.parameters)


def index(function: Function) -> Iterator[Change]:
    """Another index in front of a stride: of another axis, or what the index was computed from; axes of the grid."""
    programs = _programs(function)
    origins = _origins(function)
    for product in function.all(ast.BinOp):
        factor = _index_before_stride(product)
        if factor is None:
            continue
        wrong = [name for name in programs if factor.id in programs and name != factor.id]
        yield from (function.replaced(factor, name) for name in (*wrong, *origins.get(factor.id, ())))
    axes = sorted({function.text(axis) for axis in _grid_axes(function)})
    for axis in _grid_axes(function):
        yield from (function.replaced(axis, wrong) for wrong in axes if wrong != function.text(axis))


def div_mod(function: Function) -> Iterator[Change]:
    """``//`` and ``%`` in each other's place."""
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            old, new = ("//", "%") if isinstance(node.op, ast.FloorDiv) else ("%", "//")
            start, end = function.source.span(node.left)[1], function.source.span(node.right)[0]
            yield Change(start, end, function.source.data[start:end].decode().replace(old, new, 1).encode())


def rounding(function: Function) -> Iterator[Change]:
    """A quotient rounded up instead of down, or down instead of up."""
    language = min(function.source.language_names)
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            yield function.replaced(node, f"{language}.cdiv({function.text(node.left)}, {function.text(node.right)})")
        elif isinstance(node, ast.Call) and _is_cdiv(node) and len(node.args) == 2:
            up, by = map(function.text, node.args)
            yield function.replaced(node, f"(({up}) // ({by}))")


def int64(function: Function) -> Iterator[Change]:
    """Offsets in 32 bits: a conversion to int64 left out, or to int32 of something that may have had 64 bits."""
    for call in function.all(ast.Call):
        match call:
            case ast.Call(func=ast.Attribute(attr="to", value=value), args=[wide]):
                if function.language_attribute(wide) != "int64":
                    continue
                bare = function.text(value)
                yield function.replaced(call, f"({bare})" if is_operation(value) else bare)
                if any(function.triton_name(one) == "load" for one in ast.walk(value)):
                    yield function.replaced(wide, function.text(wide).replace("int64", "int32"))


def is_stride(name: str) -> bool:
    """Whether a name is one of a stride."""
    return "stride" in name.lower()


def _is_cdiv(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "cdiv"


def _twins(name: str) -> Iterator[str]:
    """``stride_vt`` for ``stride_kt``, and the other way round."""
    for one, two in (*_KEYS_AND_VALUES, *(pair[::-1] for pair in _KEYS_AND_VALUES)):
        twin = re.sub(rf"(?<=_){one}", two, name, count=1)
        if twin != name:
            yield twin


def _index_before_stride(product: ast.BinOp) -> ast.Name | None:
    """``i`` in ``i * stride`` or ``stride * i``."""
    if not isinstance(product.op, ast.Mult):
        return None
    left, right = product.left, product.right
    if not isinstance(left, ast.Name) or not isinstance(right, ast.Name) or is_stride(left.id) == is_stride(right.id):
        return None
    return right if is_stride(left.id) else left


def _assignments(function: Function) -> Iterator[tuple[str, ast.expr]]:
    for node in function.all(ast.Assign):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _programs(function: Function) -> list[str]:
    """Variables that say which program this is."""
    return [name for name, value in _assignments(function) if _is_program(function, value)]


def _is_program(function: Function, value: ast.expr) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        value = value.func.value
    return function.triton_name(value) == "program_id"


def _grid_axes(function: Function) -> Iterator[ast.Constant]:
    for call in function.all(ast.Call):
        if function.triton_name(call) == "program_id":
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            yield from (value for value in values if isinstance(value, ast.Constant))


def _origins(function: Function) -> dict[str, list[str]]:
    """Expressions that an index was computed from: the token for its page, the number of a table's entry for it."""
    found: dict[str, list[str]] = {}
    for name, value in _assignments(function):
        sources: list[str] = []
        for node in ast.walk(value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
                sources += [node.left.id] if isinstance(node.left, ast.Name) else []
            elif function.triton_name(node) == "load" and isinstance(node, ast.Call) and node.args:
                products = (one for one in ast.walk(node.args[0]) if isinstance(one, ast.BinOp))
                sources += [factor.id for one in products if (factor := _index_before_stride(one)) is not None]
        if sources:
            found[name] = sources
    return found


_OTHER_BASE = {"exp": "exp2", "exp2": "exp", "log": "log2", "log2": "log"}
_OTHER_EXTREME = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
_REDUCTIONS = ("sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum")


def initial_value(function: Function) -> Iterator[Change]:
    """The running maximum begins with 0 or a number that is not small enough, a sum with 1."""
    for call in function.all(ast.Call):
        if function.triton_name(call) != "full" or len(call.args) < 2:
            continue
        value = call.args[1]
        if is_infinite(value):
            yield function.replaced(value, "0.0")
            yield function.replaced(value, "-5e4")
        elif isinstance(value, ast.Constant) and value.value == 0:
            yield function.replaced(value, "1.0")
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.Sub) and is_infinite(node.right) and function.triton_name(node.left) == "zeros":
            yield function.replaced_by(node, node.left)


def rescale(function: Function) -> Iterator[Change]:
    """An accumulator that is not multiplied with anything when the maximum moves."""
    for statement in function.all(ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        for node in ast.walk(statement.value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for carried in (node.left, node.right):
                    if isinstance(carried, ast.Name) and carried.id in names:
                        yield function.replaced_by(node, carried)
    for update_ in function.all(ast.AugAssign):
        if isinstance(update_.op, ast.Mult):
            yield function.replaced(update_, "pass")


def update(function: Function) -> Iterator[Change]:
    """In a loop: a variable that keeps its old value, or an accumulator that forgets it."""
    for node in function.nodes:
        if not isinstance(node, ast.stmt) or not function.is_in_loop(node):
            continue
        match node:
            case ast.Assign(targets=[ast.Name()], value=ast.Name()):
                yield function.replaced(node, "pass")
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.BinOp(left=left, op=ast.Add(), right=right) as value
            ):
                if any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(left)):
                    yield function.replaced_by(value, right)
            case ast.AugAssign(op=ast.Add() | ast.Sub(), target=target, value=added):
                yield function.replaced(node, "pass")
                yield function.replaced(node, f"{function.text(target)} = {function.text(added)}")


def exp_base(function: Function) -> Iterator[Change]:
    """Powers of 2 for powers of e, logarithms likewise, and the other way round."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in _OTHER_BASE and isinstance(call.func, ast.Attribute):
            yield function.replaced(call.func, f"{function.text(call.func.value)}.{_OTHER_BASE[name]}")


def min_max(function: Function) -> Iterator[Change]:
    """The smaller for the larger, and the other way round."""
    for call in function.all(ast.Call):
        name = function.triton_name(call)
        if name in _OTHER_EXTREME and isinstance(call.func, ast.Attribute):
            yield function.replaced(call.func, f"{function.text(call.func.value)}.{_OTHER_EXTREME[name]}")


def sign(function: Function) -> Iterator[Change]:
    """``+`` for ``-`` and the other way round, outside addresses; -inf for inf."""
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if _is_address(function, node) or is_infinite(node.right):
                continue
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            start, end = function.source.span(node.left)[1], function.source.span(node.right)[0]
            yield Change(start, end, function.source.data[start:end].decode().replace(old, new, 1).encode())
        elif isinstance(node, ast.Call) and is_infinite(node) and isinstance(node.func, ast.Name):
            text = function.text(node)
            if "-" not in text:
                yield function.replaced(node, text.replace("inf", "-inf"))


def scale(function: Function) -> Iterator[Change]:
    """The softmax scale left out, or applied twice."""
    for product in function.all(ast.BinOp):
        if not isinstance(product.op, ast.Mult):
            continue
        for factor, rest in ((product.left, product.right), (product.right, product.left)):
            if isinstance(factor, ast.Name) and "scale" in factor.id.lower():
                yield function.replaced_by(product, rest)
                yield function.replaced(factor, f"({factor.id} * {factor.id})")


def precision(function: Function) -> Iterator[Change]:
    """float16 where the kernel computes in float32."""
    for node in function.all(ast.Attribute):
        is_value = isinstance(function.parent(node), ast.Call | ast.keyword)
        if is_value and function.language_attribute(node) == "float32":
            yield function.replaced(node, function.text(node).replace("float32", "float16"))


def axis(function: Function) -> Iterator[Change]:
    """A reduction over the other axis, a vector as a row instead of a column."""
    for call in function.all(ast.Call):
        if function.triton_name(call) in _REDUCTIONS:
            named = [keyword.value for keyword in call.keywords if keyword.arg == "axis"]
            for value in (*named, *call.args[1:2]):
                if function.text(value) in ("0", "1"):
                    yield function.replaced(value, "0" if function.text(value) == "1" else "1")
    for subscript in function.all(ast.Subscript):
        match subscript.slice:
            case ast.Tuple(elts=[ast.Slice() as all_, ast.Constant(value=None) as none]) as both:
                yield function.replaced(both, f"{function.text(none)}, {function.text(all_) or ':'}")
            case ast.Tuple(elts=[ast.Constant(value=None) as none, ast.Slice() as all_]) as both:
                yield function.replaced(both, f"{function.text(all_) or ':'}, {function.text(none)}")


def normalisation(function: Function) -> Iterator[Change]:
    """A numerator that is not divided."""
    for node in function.all(ast.BinOp):
        if isinstance(node.op, ast.Div):
            yield function.replaced_by(node, node.left)


def _is_address(function: Function, node: ast.AST) -> bool:
    """Whether it adds up to a pointer: with strides in it, or in the first argument of a load or store."""
    if any(isinstance(one, ast.Name) and is_stride(one.id) for one in ast.walk(node)):
        return True
    inner: ast.AST = node
    for outer in function.ancestors(node):
        if function.triton_name(outer) in ("load", "store") and isinstance(outer, ast.Call):
            return bool(outer.args) and outer.args[0] is inner
        inner = outer
    return False


_STORES = ("store", "atomic_add", "atomic_max", "atomic_xchg")


def range_bound(function: Function) -> Iterator[Change]:
    """``range(start, end, step)`` with one of them off by one."""
    for loop in function.all(ast.For):
        call = loop.iter
        if not isinstance(call, ast.Call) or not _is_range(function, call):
            continue
        if len(call.args) > 1:
            yield function.replaced(call.args[0], _plus(function, call.args[0], "+ 1"))
        end = call.args[0] if len(call.args) == 1 else call.args[1]
        yield from (function.replaced(end, _plus(function, end, by)) for by in ("- 1", "+ 1"))
        for step in call.args[2:]:
            yield from (function.replaced(step, _plus(function, step, by)) for by in ("- 1", "+ 1"))


def guard(function: Function) -> Iterator[Change]:
    """A choice that is always made in the same way; a program, or a loop, that does not end early."""
    for node in function.nodes:
        if isinstance(node, ast.Call) and function.triton_name(node) == "where" and len(node.args) == 3:
            yield from (function.replaced_by(node, value) for value in node.args[1:])
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Break | ast.Continue):
            yield function.replaced(node.test, "False")


def store(function: Function) -> Iterator[Change]:
    """A result that is not stored."""
    for node in function.all(ast.Expr):
        if function.triton_name(node.value) in _STORES:
            yield function.replaced(node, "pass")


def _is_range(function: Function, call: ast.Call) -> bool:
    is_pythons = isinstance(call.func, ast.Name) and call.func.id == "range"
    return bool(call.args) and (is_pythons or function.triton_name(call) in ("range", "static_range"))


def _plus(function: Function, node: ast.expr, by: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value + (1 if by == "+ 1" else -1))
    text = function.text(node)
    return f"{text} {by}" if isinstance(node, ast.Name | ast.Call | ast.Attribute) else f"({text}) {by}"


def is_launch_code(function: Function) -> bool:
    """Whether a function, not itself compiled, launches kernels or collects strides for them."""
    return not function.is_kernel and (any(_launches(function)) or any(_stride_calls(function)))


def grid_order(function: Function) -> Iterator[Change]:
    """Two axes of the grid swapped."""
    for call in _launches(function):
        if isinstance(call.func, ast.Subscript) and isinstance(call.func.slice, ast.Tuple):
            yield from (function.swapped(*pair) for pair in pairwise(call.func.slice.elts))


def launch_arguments(function: Function) -> Iterator[Change]:
    """Two tensors or numbers, side by side, swapped."""
    for call in _launches(function):
        for first, second in pairwise(call.args):
            if isinstance(first, ast.Name) and isinstance(second, ast.Name):
                yield function.swapped(first, second)


def launch_strides(function: Function) -> Iterator[Change]:
    """Strides of the wrong tensor or axis, and those that the tensor would have if it were contiguous."""
    for call in _launches(function):
        strides = [one for one in call.args if "stride" in function.text(one)]
        for first, second in pairwise(call.args):
            if first in strides and second in strides and function.text(first) != function.text(second):
                yield function.swapped(first, second)
    for stride in _stride_calls(function):
        if isinstance(stride.func, ast.Attribute) and isinstance(function.parent(stride), ast.Starred | ast.Call):
            yield function.replaced(stride.func.value, f"{function.text(stride.func.value)}.contiguous()")
    if any(_stride_calls(function)):
        yield from _elements(function)


def launch_condition(function: Function) -> Iterator[Change]:
    """The other one of two layouts."""
    for test in function.all(ast.Compare):
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq) and isinstance(test.comparators[0], ast.Constant):
            yield function.replaced(test, function.text(test).replace("==", "!=", 1))


def _elements(function: Function) -> Iterator[Change]:
    """Strides or axes in a tuple, swapped with the next, and taken from another tensor's strides."""
    tuples = [one for one in function.all(ast.Tuple) if not isinstance(function.parent(one), ast.Subscript)]
    picked = [one for each in tuples for one in each.elts if isinstance(one, ast.Subscript)]
    owners = sorted({function.text(one.value) for one in picked})
    for each in tuples:
        for first, second in pairwise(each.elts):
            is_pair = all(isinstance(one, ast.Subscript) for one in (first, second))
            is_axes = all(isinstance(one, ast.Constant) and isinstance(one.value, int) for one in (first, second))
            if is_pair or is_axes:
                yield function.swapped(first, second)
    for one in picked:
        others = (owner for owner in owners if owner != function.text(one.value))
        yield from (function.replaced(one.value, owner) for owner in others)


def _launches(function: Function) -> Iterator[ast.Call]:
    """Calls of the form ``kernel[grid](...)``."""
    return (call for call in function.all(ast.Call) if isinstance(call.func, ast.Subscript))


def _stride_calls(function: Function) -> Iterator[ast.Call]:
    return (
        call for call in function.all(ast.Call) if isinstance(call.func, ast.Attribute) and call.func.attr == "stride"
    )


Operator = Callable[[Function], Iterator[Change]]

KERNEL_OPERATORS: Mapping[str, Operator] = {
    "mask_term": mask_term,
    "mask_dropped": mask_dropped,
    "comparison": comparison,
    "bound": bound,
    "other": other,
    "masked_value": masked_value,
    "swap_strides": swap_strides,
    "other_stride": other_stride,
    "index": index,
    "div_mod": div_mod,
    "rounding": rounding,
    "int64": int64,
    "initial_value": initial_value,
    "rescale": rescale,
    "update": update,
    "exp_base": exp_base,
    "min_max": min_max,
    "sign": sign,
    "scale": scale,
    "precision": precision,
    "axis": axis,
    "normalisation": normalisation,
    "range_bound": range_bound,
    "guard": guard,
    "store": store,
}
"""For functions that Triton compiles."""

LAUNCH_OPERATORS: Mapping[str, Operator] = {
    "grid_order": grid_order,
    "launch_arguments": launch_arguments,
    "launch_condition": launch_condition,
    "launch_strides": launch_strides,
}
"""For functions that launch them."""

OPERATOR_NAMES = (*KERNEL_OPERATORS, *LAUNCH_OPERATORS)


def changes(function: Function) -> Iterator[tuple[str, Change]]:
    """Every change that an operator makes to a function, with the operator's name."""
    operators: Mapping[str, Operator] = {}
    if function.is_kernel:
        operators = KERNEL_OPERATORS
    elif is_launch_code(function):
        operators = LAUNCH_OPERATORS
    for name, operator in operators.items():
        yield from ((name, change) for change in operator(function))
