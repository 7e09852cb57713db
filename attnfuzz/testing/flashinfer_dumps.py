"""Calls that FlashInfer has dumped, as saved cases: what ``FLASHINFER_LOGLEVEL=10`` writes (0.6 and 0.7).

A folder of dumps holds ``session.jsonl``, a record of each call before it is made and another one after it, and for
each call a folder with its ``metadata.jsonl`` and its tensors. An attention is two or three calls of one wrapper: what
it was made with (layout), what was planned (pages, lengths, variants), and the run (numbers).

Of a case only lengths, pages, strides and options are read, and how large q and a page of keys are, as by `capture`.
Nothing is executed: tensors are loaded with ``weights_only``, and mapped, so that no size that a file claims is
allocated.
"""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnfuzz.data_files import MOST_RESULT_BYTES, is_regular_file, read_data_file
from attnfuzz.testing.capture import Recorder

if TYPE_CHECKING:
    from torch import Tensor


_SESSION, _CALL = "session.jsonl", "metadata.jsonl"
_MOST_PICKLED = 1 << 20
"""Bytes of what describes the tensors of a call; FlashInfer's takes a few hundred."""
_MOST_ENTRIES = 1 << 16
"""Of lengths and of page numbers: a batch of a server has thousands."""
_MOST_NUMBERS = 1 << 26
"""Of q, and of a page."""
_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_PLANNED = {
    _DECODE: ("indptr", "indices", "last_page_len", "", "", "", "page_size"),
    _PREFILL: (
        "qo_indptr", "indptr", "indices", "last_page_len", "", "", "", "page_size", "head_dim_vo", "custom_mask",
        "packed_custom_mask", "causal",
    ),
}  # fmt: skip
"""By the wrapper, what ``plan`` takes by place; "" for what the tensors say, too."""
_OTHER_NAMES = {"paged_kv_indptr": "indptr", "paged_kv_indices": "indices", "paged_kv_last_page_len": "last_page_len"}
_MADE_WITH = ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores")
_RUN = ("q", "paged_kv_cache")


class DumpError(Exception):
    """Something that a dump does not say, or says of something that no case describes."""


@dataclass(slots=True)
class _Wrapper:
    """A wrapper as far as it is known when it runs."""

    made: Mapping[str, Any] = field(default_factory=dict)
    planned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DumpedCases:
    """``files``: the cases that were written. ``left_out``: which calls were not, and why."""

    files: list[Path]
    left_out: list[str]


def is_dump(path: Path) -> bool:
    """Whether FlashInfer has written this folder: that of one call, or of all."""
    return is_regular_file(path / _SESSION) or is_regular_file(path / _CALL)


def cases_of_dump(path: Path, folder: Path) -> DumpedCases:
    """Write a case into ``folder`` for each attention that was run, or for the one whose folder ``path`` is.

    Each has those before it, which may have left something behind. Raises DumpError.
    """
    root, only = (path, None) if is_regular_file(path / _SESSION) else (path.parent, path.name)
    wrappers: dict[tuple[str, str], _Wrapper] = {}
    recorders: dict[tuple[str, ...], Recorder] = {}
    left_out: list[str] = []
    for name, call in _calls(root):
        wrapper, _, method = str(call.get("function_name")).partition(".")
        if wrapper not in _PLANNED:
            continue
        state = wrappers.setdefault((str(call.get("process_id")), str(call.get("self_id"))), _Wrapper())
        try:
            if method == "__init__":
                state.made = _arguments(root / name, call, _MADE_WITH)
            elif method == "plan":
                state.planned = _arguments(root / name, call, _PLANNED[wrapper])
            elif method == "run":
                given = _given(wrapper, state, _arguments(root / name, call, _RUN))
                recorder = _recorder(recorders, wrapper, state, given, folder)
                recorder.record(given, is_wanted=only in (None, name))
        except (DumpError, KeyError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            left_out.append(f"{name}: {what}")
        if name == only:
            break
    return DumpedCases([file for one in recorders.values() for file in one.files], left_out)


def _calls(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every call in its order, by its folder's name; of its records the first, which no crash has kept from being."""
    try:
        lines = read_data_file(root / _SESSION, MOST_RESULT_BYTES).splitlines()
    except OSError as error:
        raise DumpError(f"{root / _SESSION} cannot be read ({error.strerror}); name a folder of dumps") from error
    seen = set()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            name = Path(record["dump_dir"]).name
        except (KeyError, TypeError, ValueError, RecursionError):
            raise DumpError(f"{root / _SESSION}, line {number}, is no record of a call of FlashInfer") from None
        if name not in seen:
            seen.add(name)
            yield name, record


def _arguments(folder: Path, call: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments that were passed, by name."""
    if call.get("graph_capture"):
        raise DumpError("it was captured in a CUDA graph, and its tensors were written at another time")
    told, keys = call.get("input_metadata"), call.get("tensor_info")
    if not isinstance(told, dict) or not isinstance(keys, dict):
        raise DumpError("its record says nothing of its arguments")
    tensors = _tensors(folder) if keys.get("input_tensor_keys") and names != _MADE_WITH else {}
    passed = {**tensors, **{key: _value(value, tensors) for key, value in told.items()}}
    found = {f"arg_{i}": name for i, name in enumerate(names, 1)}  # arg_0 is the wrapper
    by_name = {key.removeprefix("kwarg_"): value for key, value in passed.items() if key.startswith("kwarg_")}
    by_name = {_OTHER_NAMES.get(name, name): value for name, value in by_name.items()}
    return {name: passed[key] for key, name in found.items() if key in passed and name} | by_name


def _value(told: Any, tensors: Mapping[str, Tensor]) -> Any:
    """An argument that is no tensor, or several: of a cache, K and V."""
    if not isinstance(told, dict) or told.get("type") not in ("tuple", "list"):
        return told
    items = told.get("items")
    keys = [one.get("tensor_key") for one in items if isinstance(one, dict)] if isinstance(items, list) else []
    return tuple(tensors.get(key) for key in keys if isinstance(key, str))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a call, mapped from their file, of which no more than the description is read."""
    import torch

    file = folder / "inputs.pt"
    if not is_regular_file(file):
        raise DumpError("it has no inputs.pt; dump without FLASHINFER_DUMP_SAFETENSORS, which loses strides")
    try:
        with zipfile.ZipFile(file) as parts:
            described = [one.file_size for one in parts.infolist() if one.filename.endswith(".pkl")]
        loaded = None
        if max(described, default=0) <= _MOST_PICKLED:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a hostile file makes torch raise
        raise DumpError("its inputs.pt is no file that torch loads with weights_only=True") from error
    if not isinstance(loaded, dict) or not all(type(one) is torch.Tensor for one in loaded.values()):
        raise DumpError("its inputs.pt holds something else than tensors by name")
    return {str(name): tensor for name, tensor in loaded.items()}


def _given(wrapper: str, state: _Wrapper, run: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a case, and its options. Raises DumpError for what no case has."""
    import torch

    planned = state.planned
    if not planned:
        raise DumpError("what it was planned for has not been dumped; FLASHINFER_DUMP_INCLUDE must leave in plan")
    for name in ("custom_mask", "packed_custom_mask"):
        if planned.get(name) is not None:
            raise DumpError(f"{name} is given, which is another problem")
    if planned.get("pos_encoding_mode", "NONE") != "NONE":
        raise DumpError("it encodes positions, which is no part of a case")
    if _number(run, "q_scale", 1) != 1:
        raise DumpError("q_scale is given, which is no part of a case")
    cache = run["paged_kv_cache"]
    if not isinstance(cache, tuple):
        packed = _tensor(cache, 5)
        cache = (packed[:, 0], packed[:, 1])
    if len(cache) != 2:
        raise DumpError("its cache is neither K and V nor both in one tensor")
    k_cache, v_cache = (_tensor(part, 4) for part in cache)
    q, page_size = _tensor(run["q"], 3), int(_number(planned, "page_size", 0))
    if q.numel() > _MOST_NUMBERS:
        raise DumpError(f"q has more than {_MOST_NUMBERS} elements")
    rows, counts = _rows(planned, len(k_cache))
    last = _numbers(planned["last_page_len"])
    if len(last) != len(counts):
        raise DumpError(f"it has {len(last)} last pages for {len(counts)} sequences")
    lengths = [(count - 1) * page_size + end if count else 0 for count, end in zip(counts, last, strict=True)]
    window = int(_number(planned, "window_left", -1))
    given: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": torch.tensor(rows, dtype=torch.int32, device="cpu"),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        "scale": _number(planned, "sm_scale", 0),
        "window": window + 1 if window >= 0 else None,
        "soft_cap": _number(planned, "logits_soft_cap", 0) or None,
        "k_scale": torch.ones(1, dtype=torch.float32, device="cpu"),
        **{name: _tensor(run[name]) for name in ("sinks", "out", "lse") if run.get(name) is not None},
    }
    if wrapper == _PREFILL:
        starts = torch.tensor(_numbers(planned["qo_indptr"]), dtype=torch.int32, device="cpu")
        return given | {"cu_seqlens_q": starts, "causal": planned.get("causal", False)}
    if len(q) != len(counts):
        raise DumpError(f"it has {len(q)} query tokens for {len(counts)} sequences")
    return given | {"use_tensor_cores": bool(state.made.get("use_tensor_cores", False))}


def _rows(planned: Mapping[str, Any], total: int) -> tuple[list[list[int]], list[int]]:
    """The pages of each sequence, as rows of a table, and how many there are."""
    starts, pages = _numbers(planned["indptr"]), _numbers(planned["indices"])
    places = [*itertools.pairwise(starts)]
    if not places or starts[0] or any(start > end for start, end in places) or starts[-1] > len(pages):
        raise DumpError("where the pages of its sequences begin does not fit their number")
    if wrong := [page for page in pages[: starts[-1]] if not 0 <= page < total]:
        raise DumpError(f"it names page {wrong[0]} of {total}: the kernel was handed a page that does not exist")
    counts = [end - start for start, end in places]
    columns = max(1, *counts)
    if columns * len(counts) > _MOST_ENTRIES:
        raise DumpError(f"its block table would have more than {_MOST_ENTRIES} entries")
    return [pages[start:end] + [0] * (columns - end + start) for start, end in places], counts


def _tensor(value: Any, dimensions: int | None = None) -> Tensor:
    """The value if it is a tensor of so many dimensions. Raises DumpError for others, and for entries too large to look
    at one."""
    import torch

    if not isinstance(value, torch.Tensor) or dimensions not in (None, value.dim()):
        raise DumpError(f"an argument that should be a tensor of {dimensions} dimensions is not")
    if value.dim() and len(value) and value[0].numel() > _MOST_NUMBERS:
        raise DumpError(f"a tensor of shape {tuple(value.shape)} is too large to be looked at")
    return value


def _number(passed: Mapping[str, Any], name: str, default: float) -> float:
    value = passed.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or not abs(value) < _MOST_NUMBERS:
        raise DumpError(f"{name} is no number")
    return value


def _numbers(value: Any) -> list[int]:
    tensor = _tensor(value, 1)
    if tensor.numel() > _MOST_ENTRIES or tensor.is_floating_point():
        raise DumpError(f"what should be a list of at most {_MOST_ENTRIES} numbers is not")
    return [int(one) for one in tensor.tolist()]


def _recorder(
    recorders: dict[tuple[str, ...], Recorder], wrapper: str, state: _Wrapper, given: Mapping[str, Any], folder: Path
) -> Recorder:
    """The recorder of the kernel which this wrapper is."""
    is_prefill = wrapper == _PREFILL
    kernel = f"flashinfer:batch_{'prefill' if is_prefill else 'decode'}"
    if state.made.get("use_cuda_graph"):
        kernel += "_graph"
    layout = state.made.get("kv_layout", "NHD")
    if not state.made and given["k_cache"].shape[1] != state.planned["page_size"]:
        layout = "HND"
    if layout not in ("NHD", "HND"):
        raise DumpError("kv_layout is neither NHD nor HND")
    return recorders.setdefault(
        (kernel, layout),
        Recorder(
            "paged_attention" if is_prefill else "paged_decode",
            kernel,
            layout,
            () if is_prefill else ("use_tensor_cores",),
            folder,
            note="dumped by FlashInfer",
        ),
    )
