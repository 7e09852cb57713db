"""The cases that mutants are hunted with: all different, the same every time, and drawn once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from attnfuzz.declaration import Declaration
from attnfuzz.mutation.hunting import CaseStream
from attnfuzz.problems.cases import encode_case
from attnfuzz.problems.supports import Supports

ANY = Declaration(name="k", problem="dense_decode", target="k")
FEW = Declaration(
    name="m", problem="dense_decode", target="m",
    supports=Supports(dtypes=("float32",), head_sizes=(16,), max_seq_len=1, strides="contiguous", gqa_ratios=(1,)),
)  # fmt: skip


def test_the_same_cases_for_every_mutant() -> None:
    """One mutant would be hunted with other cases than the next, and no result could be had again."""
    stream = CaseStream(ANY, seed=3, device="cpu")
    with ThreadPoolExecutor(4) as pool:
        slices = list(pool.map(lambda start: stream.take(start, 40), [160, 0, 120, 40, 80, 200]))
    again = CaseStream(ANY, seed=3, device="cpu")
    assert [again.take(start, 40) for start in (160, 0, 120, 40, 80, 200)] == slices
    assert len({encode_case(case) for case in stream.take(0, 240)}) == 240
    assert CaseStream(ANY, seed=4, device="cpu").take(0, 240) != stream.take(0, 240)


def test_a_gpu_has_few_formats_at_first() -> None:
    """Every case of a mutant would have to be compiled on a GPU."""
    cases = CaseStream(ANY, seed=1, device="cuda").take(0, 100)
    assert len({(case.dtype, case.num_q_heads, case.head_size, case.options.get("tile")) for case in cases}) <= 2
