"""Calls that FlashInfer has dumped as saved cases: attnfuzz.testing.flashinfer_dumps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.corpus import load_regression
from attnfuzz.problems.block_table import block_table_rows, num_blocks
from attnfuzz.problems.shapes import strides_of
from attnfuzz.testing.flashinfer_dumps import cases_of_dump, is_dump
from tests.common.in_process import attnfuzz

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


class Session:
    """A folder of dumps, written as flashinfer/api_logging.py of 0.7.2 writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._calls = 0

    def dump(self, name: str, *arguments: Any, self_id: int = 7, **named: Any) -> Path:
        """One call, of a method, before it was made and after it."""
        self._calls += 1
        call = f"20261129_0222{self._calls:02}_450_pid5834_{name}_call{self._calls:04}"
        passed = {f"arg_{i}": one for i, one in enumerate(arguments, 1)} | {
            f"kwarg_{key}": one for key, one in named.items()
        }
        tensors: dict[str, Tensor] = {}
        told: dict[str, Any] = {"arg_0": {"type": name.partition(".")[0], "repr": "<object at 0x7f>"}}
        for key, one in passed.items():
            if isinstance(one, Tensor):
                tensors[key] = one
            else:
                told[key] = self._told(key, one, tensors)
        (self.folder / call).mkdir()
        if tensors:
            torch.save(tensors, self.folder / call / "inputs.pt")
        record = {
            "function_name": name,
            "module": "flashinfer.decode",
            "call_sequence": self._calls,
            "timestamp": "20261129_022210_450",
            "process_id": 5834,
            "input_metadata": told,
            "output_metadata": {},
            "tensor_info": {"input_tensor_keys": list(tensors), "output_tensor_keys": [], "input_size_bytes": 0},
            "tensor_details": {key: self._details(one) for key, one in tensors.items()},
            "tensor_format": "torch",
            "execution_status": "inputs_saved",
            "graph_capture": False,
            "self_id": self_id,
            "dump_dir": f"elsewhere/{call}",
        }
        lines = "".join(json.dumps(record | {"execution_status": one}) + "\n" for one in ("inputs_saved", "completed"))
        (self.folder / call / "metadata.jsonl").write_text(lines, encoding="utf-8")
        with (self.folder / "session.jsonl").open("a", encoding="utf-8") as file:
            file.write(lines)
        return self.folder / call

    def _told(self, key: str, one: Any, tensors: dict[str, Tensor]) -> Any:
        if isinstance(one, tuple):
            for i, item in enumerate(one):
                tensors[f"{key}__{i}"] = item
            items = [
                {"type": "torch.Tensor", **self._details(item), "tensor_key": f"{key}__{i}"}
                for i, item in enumerate(one)
            ]
            return {"type": "tuple", "length": len(one), "items": items, "truncated": False}
        return {"type": "torch.dtype", "value": str(one)} if isinstance(one, torch.dtype) else one

    @staticmethod
    def _details(one: Tensor) -> dict[str, Any]:
        return {"shape": [*one.shape], "dtype": str(one.dtype), "stride": [*one.stride()], "device": "cuda:0"}


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def decoding(session: Session, *last: int, pages: Tensor | None = None, **planned: Any) -> Path:
    """A decode step of sequences of two pages and one, whose last pages hold ``last`` tokens; the dump of its run."""
    starts = i32(*[0, 2, 3][: len(last) + 1])
    pages = i32(7, 2, 3) if pages is None else pages
    planned = {"q_data_type": torch.float16, "sm_scale": 0.5, **planned}
    session.dump(f"{DECODE}.plan", starts, pages, i32(*last), 2, 2, 16, 4, **planned)
    cache = torch.randn(9, 2, 2, 4, 16, dtype=torch.float16)
    return session.dump(f"{DECODE}.run", torch.randn(len(last), 2, 16, dtype=torch.float16), cache, return_lse=True)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    found = Session(tmp_path / "dumps")
    found.dump(f"{DECODE}.__init__", torch.empty(64, dtype=torch.uint8), "HND", use_tensor_cores=True)
    return found


KERNELS = """
import torch
import attnfuzz

_KEPT = {}

def attend(i, key):
    out = torch.zeros_like(i.q)
    for row, length in enumerate(i.seq_lens.tolist()):
        count = -(-length // i.block_size)
        pages = _KEPT.setdefault((row, count) if key else object(), i.block_table[row, :count].tolist())
        if length:
            k, v = (part[pages].transpose(1, 2).flatten(0, 1)[:length].float() for part in (i.k_cache, i.v_cache))
            weights = torch.einsum("hd,thd->ht", i.q[row].float(), k).mul(i.scale).softmax(-1)
            out[row] = torch.einsum("ht,thd->hd", weights, v).to(out.dtype)
    return out

SUPPORTS = attnfuzz.Supports(dtypes=("float16",), layouts=("HND",), gqa_ratios=(1,), lse="none")

@attnfuzz.kernel("paged_decode", supports=SUPPORTS, options={"use_tensor_cores": (False, True)})
def stale(i, use_tensor_cores):
    return attend(i, True)

@attnfuzz.kernel("paged_decode", supports=SUPPORTS, options={"use_tensor_cores": (False, True)})
def right(i, use_tensor_cores):
    return attend(i, False)
"""


def test_a_bug_that_a_dumped_run_had_is_in_the_case_that_is_made_of_it(tmp_path: Path, session: Session) -> None:
    """A server's failing run would be lost with the server, though all that it was handed has been dumped."""
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    decoding(session, 1, 3)
    failing = decoding(session, 2, 3, pages=i32(5, 2, 1))  # other pages, as many: what the kernel has kept is stale
    wrong = attnfuzz("replay", failing, "--kernel", "kernels.py:stale", "--device", "cpu", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout.count("FAIL  captured/")) == (1, 1)
    assert "after 1 other case" in wrong.stdout
    right = attnfuzz("replay", session.folder, "--kernel", "kernels.py:right", "--device", "cpu", cwd=tmp_path)
    assert (right.returncode, right.stdout.count("PASS  captured/")) == (0, 2)


def test_what_is_read_is_what_was_called(tmp_path: Path, session: Session) -> None:
    """A case would have other pages, lengths, strides or options than the call that was dumped."""
    decoding(session, 1, 3, window_left=3, logits_soft_cap=20.0)
    found = cases_of_dump(session.folder, tmp_path)
    (file,) = found.files
    regression = load_regression(file)
    case: Any = regression.case
    assert (regression.kernel, found.left_out) == ("flashinfer:batch_decode", [])
    assert block_table_rows(case) == ((7, 2), (3, 0))
    assert (case.seq_lens, case.scale, case.layout, case.dtype) == ((5, 3), 0.5, "HND", "float16")
    assert (case.variant.window, case.variant.soft_cap) == (4, 20.0)
    assert (num_blocks(case), strides_of(case, "k_cache")) == (9, "outer_gap")  # K and V are in one tensor
    assert case.options == {"use_tensor_cores": True}


def test_a_prefill_is_known_by_the_names_of_its_own_plan(tmp_path: Path) -> None:
    """Prefill, and so most of what a server computes, could not be replayed."""
    session = Session(tmp_path / "dumps")
    session.dump(f"{PREFILL}.plan", i32(0, 3, 4), i32(0, 2, 3), paged_kv_indices=i32(7, 2, 3), causal=True,
                 paged_kv_last_page_len=i32(1, 4), page_size=4)  # fmt: skip
    caches = torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16)
    session.dump(f"{PREFILL}.run", torch.randn(4, 4, 16), caches)
    (file,) = cases_of_dump(session.folder, tmp_path).files
    case: Any = load_regression(file).case
    assert load_regression(file).kernel == "flashinfer:batch_prefill"
    assert (case.query_lens, case.seq_lens, case.causal, case.layout) == ((3, 1), (5, 4), True, "NHD")


class _Touches:
    """Unpickled without care, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._file),)


def overwritten(run: Path, what: object) -> None:
    torch.save(what, run / "inputs.pt")


def test_a_dump_runs_nothing_that_is_pickled_in_it(tmp_path: Path, session: Session) -> None:
    """A dump from an issue would run whatever its author likes."""
    overwritten(decoding(session, 1, 3), {"arg_1": _Touches(tmp_path / "touched")})
    (reason,) = cases_of_dump(session.folder, tmp_path).left_out
    assert "is no file that torch loads with weights_only=True" in reason
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("q", "cache", "reason"),
    [
        (torch.zeros(1).expand(1 << 20, 1 << 10, 16), torch.zeros(9, 2, 2, 4, 16), "q has more than"),
        (torch.zeros(2, 2, 16), torch.zeros(1).expand(9, 2, 1 << 20, 1 << 10, 16), "is too large to be looked at"),
        (torch.zeros(2, 2), torch.zeros(9, 2, 2, 4, 16), "should be a tensor of 3 dimensions"),
        (torch.zeros(3, 2, 16), torch.zeros(9, 2, 2, 4, 16), "3 query tokens for 2 sequences"),
    ],
)
def test_sizes_are_checked_before_numbers_are_read(
    tmp_path: Path, session: Session, q: Tensor, cache: Tensor, reason: str
) -> None:
    """A file of a kilobyte would take all memory."""
    overwritten(decoding(session, 1, 3), {"arg_1": q, "arg_2": cache})
    (told,) = cases_of_dump(session.folder, tmp_path).left_out
    assert reason in told


def test_a_page_that_does_not_exist_is_told(tmp_path: Path, session: Session) -> None:
    """What a scheduler did wrong would be hidden behind a case that is right."""
    decoding(session, 1, 3, pages=i32(7, 9, 3))
    (told,) = cases_of_dump(session.folder, tmp_path).left_out
    assert told.endswith("it names page 9 of 9: the kernel was handed a page that does not exist")


@pytest.mark.parametrize(
    ("planned", "reason"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "it encodes positions"),
        ({"window_left": "all"}, "window_left is no number"),
    ],
)
def test_what_no_case_describes_is_told(tmp_path: Path, session: Session, planned: dict[str, Any], reason: str) -> None:
    """A case of something else would pass in its place."""
    decoding(session, 1, 3, **planned)
    (told,) = cases_of_dump(session.folder, tmp_path).left_out
    assert reason in told


def test_what_is_no_dump_ends_in_one_sentence(tmp_path: Path, session: Session) -> None:
    """A folder that was copied in part would end in a traceback, or pass."""
    run = attnfuzz("replay", session.folder, cwd=tmp_path)
    assert run.returncode == 2
    assert "has no call of a paged decode or prefill wrapper" in run.stderr
    session.dump(f"{DECODE}.run", torch.zeros(2, 2, 16), torch.zeros(9, 2, 2, 4, 16), self_id=8)
    run = attnfuzz("replay", session.folder, cwd=tmp_path)
    assert run.returncode == 2
    assert "FLASHINFER_DUMP_INCLUDE must leave in plan" in run.stderr
    (session.folder / "session.jsonl").write_text("[]\n", encoding="utf-8")
    run = attnfuzz("replay", session.folder, cwd=tmp_path)
    assert run.returncode == 2
    assert "line 1, is no record of a call of FlashInfer" in run.stderr
    assert not is_dump(tmp_path)
