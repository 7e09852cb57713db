"""Looking for a rounding in what a kernel computed."""

from __future__ import annotations

from attnfuzz.explaining.operations import MOST_LINES, Operation, Operations, Recording, places_of

Dot = tuple[Operation, ...]


def of(kind: object, dtype: str, line: int, *operands: Operation) -> Operation:
    return Operation(kind, dtype, ("k.py", line), 0, list(operands))  # type: ignore[arg-type]  # any kind


def scores(line: int, dtype: str = "float16") -> Dot:
    """q times k, element by element at ``line``, added up in float32 on the next."""
    q, k = of("load", "float16", 1), of("load", "float16", 2)
    product = of("mul", dtype, line, q, k)
    wide = of("convert", "float32", line, product)
    return q, k, product, wide, of("sum", "float32", line + 1, wide)


def test_products_are_told_by_what_becomes_of_them() -> None:
    """Any product in 16 bits would be taken for one of q and k."""
    *made, score = scores(10)
    weight = of("exp", "float32", 12, score)
    value = of("load", "float16", 13)
    short = of("convert", "float16", 14, weight)
    weighted = of("mul", "float16", 15, short, value)
    graph = Operations([*made, score, weight, value, short, weighted, of("sum", "float32", 16, weighted)])
    assert places_of(("products",), graph) == (("k.py", 10),)


def test_another_rounding_of_the_same_numbers_is_told_where_a_replay_names_the_wrong_one() -> None:
    """A replay cannot tell sums in 16 bits from products in 16 bits on every case, and the line would be left out."""
    *made, score = scores(10)
    graph = Operations([*made, score, of("exp", "float32", 12, score)])
    assert places_of(("products and sums",), graph) == (("k.py", 10),)
    assert places_of(("row sum", "no such name"), graph) == ()


def test_many_lines_are_none() -> None:
    """A list of half of the kernel would be told as where to look."""
    graphs = {}
    for count in (MOST_LINES, MOST_LINES + 1):
        made = [one for i in range(count) for one in scores(10 * (i + 1))]
        exps = [of("exp", "float32", 5, one) for one in made if one.kind == "sum"]
        graphs[count] = places_of(("products",), Operations([*made, *exps]))
    assert len(graphs[MOST_LINES]) == MOST_LINES
    assert graphs[MOST_LINES + 1] == ()


def test_exp_within_a_soft_cap_is_not_exp_of_the_softmax() -> None:
    """The tanh of a soft cap, of which no maximum is subtracted, would be told as the softmax that lacks it."""
    *made, score = scores(10, "float32")
    cap = of("exp", "float32", 20, score)
    capped = of("div", "float32", 21, cap)
    top = of("max", "float32", 22, capped)
    weight = of("exp", "float32", 23, of("add", "float32", 23, capped, top))
    bare = of("exp", "float32", 24, capped)
    right = [*made, score, cap, capped, top, *weight.operands, weight]
    assert places_of(("no maximum",), Operations(right)) == ()
    assert places_of(("no maximum",), Operations([*right, bare])) == (("k.py", 24),)


def test_a_loop_in_which_each_rounding_follows_the_other_keeps_its_lines() -> None:
    """What is computed in a circle would have no beginning, and no line."""
    *made, score = scores(10, "float32")
    weight = of("exp", "float32", 12, score)
    row = of("sum", "float32", 13, weight)
    total = of("add", "float32", 14, row)
    short = of("convert", "float16", 15, total)
    total.operands.append(of("convert", "float32", 15, short))
    graph = Operations([*made, score, weight, row, total, short, *total.operands[1:]])
    assert places_of(("row sum",), graph) == (("k.py", 15),)


def test_one_line_that_rounds_two_inputs_does_two_operations() -> None:
    """Of q and k that are scaled by one line, one product would be made: that of both, and so a score."""
    recording = Recording()
    scale = recording.add("argument", "float32")
    scaled = []
    for name in ("q", "k"):
        part = recording.add("load", "float32", calls=name)
        product = recording.add("mul", "float32", (part, scale), calls="one line", place=("k.py", 7))
        scaled.append(recording.add("convert", "float16", (product,), calls="one line", place=("k.py", 7)))
    score = recording.add("dot", "float32", scaled, calls="dot", place=("k.py", 8))
    recording.add("exp", "float32", (score,), calls="exp", place=("k.py", 9))
    graph = Operations(recording.operations)
    assert len(list(graph)) == 9
    assert places_of(("both scaled",), graph) == (("k.py", 7),)
    assert places_of(("products",), graph) == ()


def test_rounds_of_a_loop_are_one() -> None:
    """The graph of a kernel would grow with the length of the sequence."""
    recording = Recording()
    total = recording.add("argument", "float32")
    for _ in range(9):
        part = recording.add("load", "float16", calls="load")
        total = recording.add("add", "float32", (total, part), calls="add")
    assert [one.kind for one in recording.operations] == ["argument", "load", "add"]
    assert total in total.operands
