"""Cases from a running program: ``attnfuzz.capture`` records the calls of its attention function as saved cases.

A call is recorded before it is made, so that one which ends the process is there too. What is written down is what a
case says: lengths, query tokens, pages and what else the table holds, strides, variants, options. Numbers are drawn
again, about as large as they were; no tensor leaves the program. Each file holds the calls before it as well, since
what is wrong with a scheduler's or a backend's state shows in a later call only.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnfuzz.corpus import MAX_PRECEDING, FindingRecord, Regression, current_environment, write_regression
from attnfuzz.oracles.registry import ACCURACY
from attnfuzz.problems.cases import Case, case_from_builtins
from attnfuzz.problems.recipes import MAX_LOGIT_EXPONENT, MIN_LOGIT_EXPONENT, MOST_TAKEN, STRIDE_KINDS, StrideKind
from attnfuzz.problems.shapes import strided_layout
from attnfuzz.problems.supports import Layout

if TYPE_CHECKING:
    from torch import Tensor


Captured = Literal["paged_decode", "paged_attention"]
CAPTURED = "captured"
"""The folder, unless somebody names another one."""
_NOTE = "recorded from a running program"
_STRIDED = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "out", "lse")
_NORMAL = 1.15
"""The standard deviation of numbers of the recipe "normal"."""


@contextlib.contextmanager
def capture(
    owner: Any,
    name: str,
    *,
    problem: Captured,
    kernel: str,
    layout: Layout = "NHD",
    inputs: Callable[..., Mapping[str, Any]] | None = None,
    options: tuple[str, ...] = (),
    folder: Path | str = CAPTURED,
    most: int = MAX_PRECEDING,
) -> Iterator[list[Path]]:
    """Record the calls of ``owner.name`` until the context ends, and yield the files, which grow with each.

    ``owner`` is a module, a class's instance or whatever has the function as an attribute, ``kernel`` the target that
    `attnfuzz replay` runs, which takes the same inputs as cases of ``problem``. Arguments are known by the names that
    the problem's inputs have (``q``, ``k_cache``, ``block_table``, ...); of a function with others ``inputs`` gets the
    arguments and returns them by those names. ``options``: arguments that the kernel declares as options. After
    ``most`` calls, at most 65, the function is called as before.

    A call that no case describes is made all the same, and warned of.
    """
    if not 1 <= most <= MAX_PRECEDING + 1:
        raise ValueError(f"most={most} must be between 1 and {MAX_PRECEDING + 1}: a saved case holds those before it")
    function = getattr(owner, name)
    named = inputs or _by_name(function)
    recorder = Recorder(problem, kernel, layout, options, Path(folder))

    def recorded(*arguments: Any, **others: Any) -> Any:
        if len(recorder.cases) < most:
            try:
                recorder.record(named(*arguments, **others))
            except (KeyError, ValueError) as error:
                warnings.warn(f"attnfuzz.capture: a call of {name} was not recorded: {error}", stacklevel=2)
        return function(*arguments, **others)

    setattr(owner, name, recorded)
    try:
        yield recorder.files
    finally:
        setattr(owner, name, function)


def _by_name(function: Callable[..., Any]) -> Callable[..., Mapping[str, Any]]:
    signature = inspect.signature(function)

    def named(*arguments: Any, **others: Any) -> Mapping[str, Any]:
        bound = signature.bind(*arguments, **others)
        bound.apply_defaults()
        return bound.arguments

    return named


class Recorder:
    """Cases of the calls so far. ``note``: where they come from, for people."""

    def __init__(
        self,
        problem: Captured,
        kernel: str,
        layout: Layout,
        options: tuple[str, ...],
        folder: Path,
        *,
        note: str = _NOTE,
    ) -> None:
        self.files: list[Path] = []
        self.cases: list[Case] = []
        self._problem, self._kernel, self._layout, self._options = problem, kernel, layout, options
        self._folder, self._note = folder, note
        self._numbers: dict[int, int] = {}

    def record(self, given: Mapping[str, Any], *, is_wanted: bool = True) -> None:
        """Write the case of a call, unless it is wanted before later ones only.

        Raises ValueError, or KeyError where an input is missing.
        """
        fields, note = self._fields(given)
        case: Case = case_from_builtins(self._problem, fields)
        before = tuple(self.cases[-MAX_PRECEDING:])
        self.cases.append(case)
        if not is_wanted:
            return
        regression = Regression(
            problem=self._problem,
            kernel=self._kernel,
            case=case,
            preceding=before,
            finding=FindingRecord(oracle=ACCURACY.name, message=f"{self._note}; nothing was judged"),
            status="fixed",  # it must pass
            note=f"{self._note}, call {len(self.cases)}{note}",
            environment=current_environment(str(given["q"].device)),
        )
        self.files.append(write_regression(regression, self._folder))

    def _fields(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        q, k_cache, v_cache = (given[name] for name in ("q", "k_cache", "v_cache"))
        axis = {"NHD": (1, 2), "interleaved": (1, 2), "HND": (2, 1), "packed": (3, 1)}[self._layout]
        block_size, num_kv_heads = (k_cache.shape[one] for one in axis)
        seq_lens = given["seq_lens"].tolist()
        pages, note = self._pages(given["block_table"], seq_lens, block_size, len(k_cache))
        value_size = v_cache.shape[2 if self._layout == "packed" else 3]
        dtype = str(q.dtype).removeprefix("torch.")
        kv_dtype = str(k_cache.dtype).removeprefix("torch.")
        fields: dict[str, Any] = {
            "num_q_heads": q.shape[1],
            "num_kv_heads": num_kv_heads,
            "head_size": q.shape[2],
            "v_head_size": value_size,
            "dtype": dtype,
            "seq_lens": seq_lens,
            "scale": float(given.get("scale") or q.shape[2] ** -0.5),
            "block_size": block_size,
            "layout": self._layout,
            "pages": pages,
            "values": {
                "keys": "normal",
                "values": "normal",
                "seed": len(self.cases),
                "logit_exponent": _logit_exponent(q, k_cache, given["block_table"], seq_lens),
            },
            "variant": {
                "window": given.get("window"),
                "soft_cap": given.get("soft_cap"),
                "alibi": None if given.get("alibi_slopes") is None else "geometric",
                "sinks": None if given.get("sinks") is None else "level",
            },
            "strides": {
                one: kind
                for one in _STRIDED
                if given.get(one) is not None and (kind := _stride_kind(given[one])) != "contiguous"
            },
            "options": {one: given[one] for one in self._options},
        }
        if kv_dtype != dtype:
            fields["kv"] = {"dtype": kv_dtype, "per": "tensor" if given["k_scale"].numel() == 1 else "head"}
        if self._problem == "paged_attention":
            ends = given["cu_seqlens_q"].tolist()
            counts = [end - start for start, end in itertools.pairwise(ends)]
            fields["query_lens"] = counts
            fields["causal"] = bool(given.get("causal", True))
            fields["padding_tokens"] = len(q) - ends[-1]
            fields["query_slack"] = int(given.get("max_query_len") or max(counts)) - max(counts)
            fields["seq_slack"] = int(given.get("max_seq_len") or max(seq_lens)) - max(seq_lens)
        return fields, note

    def _pages(self, table: Tensor, seq_lens: list[int], block_size: int, total: int) -> tuple[dict[str, Any], str]:
        """The table as a recipe, and what it leaves out."""
        counts = [-(-length // block_size) for length in seq_lens]
        rows = table.tolist()
        owned = [row[:count] for row, count in zip(rows, counts, strict=True)]
        rest = [page for row, count in zip(rows, counts, strict=True) for page in row[count:]]
        shared = max((_common(owned[0], row) for row in owned[1:]), default=0)
        if any(_common(owned[0], row) != min(shared, len(row)) for row in owned[1:]):
            shared = 0
        first, twice, others = {*owned[0]}, 0, iter(range(max(total, 1), 2 * total + sum(counts) + 1))
        taken, seen = [*owned[0]], first
        for row in owned[1:]:
            for page in row[shared:]:
                twice += page in seen
                taken.append(next(others) if page in seen else page)
                seen.add(page)
        if total > MOST_TAKEN:  # by when they were first met: a case is built with a cache that holds them all
            taken = [self._numbers.setdefault(page, len(self._numbers)) for page in taken]
        pages = {
            "taken": taken,
            "shared_blocks": shared,
            "extra_columns": table.shape[1] - max(1, *counts),
            "spare_blocks": max(0, total - len(taken)) if total <= MOST_TAKEN else 0,
            "padding": "zero"
            if not any(rest)
            else "wrong_page"
            if all(0 <= page < total for page in rest)
            else "garbage",
        }
        return pages, f"; {twice} pages were in several places of the table, and are not here" if twice else ""


def _common(a: list[int], b: list[int]) -> int:
    """How many of the first pages are the same."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _logit_exponent(q: Tensor, k_cache: Tensor, table: Tensor, seq_lens: list[int]) -> int:
    """How much larger than drawn numbers those of q and of the first page of keys are together, as a power of two."""
    longest = max(range(len(seq_lens)), key=lambda seq: seq_lens[seq])
    if not seq_lens[longest]:
        return 0
    sizes = [float(part.double().square().mean().sqrt()) for part in (q, k_cache[int(table[longest, 0])])]
    ratio = sizes[0] * sizes[1] / _NORMAL**2
    if not math.isfinite(ratio) or not ratio:
        return 0
    return min(MAX_LOGIT_EXPONENT, max(MIN_LOGIT_EXPONENT, round(math.log2(ratio))))


def _stride_kind(tensor: Tensor) -> StrideKind:
    """The kind of strides that ``tensor`` has; of others, whether it lies with gaps between its outermost entries."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    kinds = {
        kind: strided_layout(shape, kind, tensor.element_size()).strides for kind in STRIDE_KINDS if kind != "offset"
    }
    told = [size > 1 for size in shape]  # a dimension of one has any stride
    for kind, wanted in kinds.items():
        if all(not counts or own == one for counts, own, one in zip(told, strides, wanted, strict=True)):
            return kind
    return "outer_gap" if len(shape) > 2 else "padded_rows" if len(shape) == 2 else "every_other"
