"""Problems of a user's own, with kernels that read or write in wrong places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz

Tensors = Mapping[str, Tensor]


class Scatter(attnfuzz.Problem):
    """Rows go into slots of a cache."""

    num_tokens = attnfuzz.Integer(1, 16)
    spare = attnfuzz.Integer(0, 8)
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "rows": attnfuzz.TensorSpec((case.num_tokens, 8), "uint8"),
            "slots": attnfuzz.TensorSpec((case.num_tokens,), "int64"),
            "cache": attnfuzz.TensorSpec((case.num_tokens + case.spare, 8), "uint8", "in_place", axes=("slot", "byte")),
        }

    def write(self, case: Any, tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        rows = torch.randint(0, 256, tuple(tensors["rows"].shape), generator=generator, dtype=torch.int32)
        tensors["rows"].copy_(rows.to(torch.uint8))
        tensors["slots"].copy_(torch.randperm(len(tensors["cache"]), generator=generator)[: case.num_tokens])

    def reference(self, case: Any, tensors: Tensors) -> dict[str, attnfuzz.Expected]:
        value = torch.zeros(tensors["cache"].shape, dtype=torch.uint8)
        where = torch.zeros(tensors["cache"].shape, dtype=torch.bool)
        value[tensors["slots"]], where[tensors["slots"]] = tensors["rows"], True
        return {"cache": attnfuzz.Expected(value, where=where)}


def scattered(inputs: Any, further: int) -> None:
    flat = inputs.cache.view(-1)
    for i, slot in enumerate(inputs.slots.tolist()):
        at = 8 * slot + further * (i % 4)
        flat[at : at + 8] = inputs.rows[i, : len(flat[at : at + 8])]


@attnfuzz.kernel(Scatter())
def scatter(inputs: Any) -> None:
    scattered(inputs, 0)


@attnfuzz.kernel(Scatter())
def scatter_displaced(inputs: Any) -> None:
    scattered(inputs, 8)


@attnfuzz.kernel(Scatter())
def scatter_previous(inputs: Any) -> None:
    """The last token's row is that of the one before."""
    last = len(inputs.rows) - 1
    for i, slot in enumerate(inputs.slots.tolist()):
        inputs.cache[slot] = inputs.rows[i - 1 if i == last > 0 else i]


class Dequantise(attnfuzz.Problem):
    """Pages of bytes, a float32 before each, as numbers; between pages there is padding."""

    num_pages = attnfuzz.Integer(1, 4)
    padding = attnfuzz.Choice((0, 12, 20))
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "pages": attnfuzz.TensorSpec((case.num_pages + 1, 4 + 8 + case.padding), "uint8"),
            "table": attnfuzz.TensorSpec((case.num_pages,), "int64"),
            "out": attnfuzz.TensorSpec((case.num_pages, 8), "float32", "output", axes=("page", "number")),
        }

    def write(self, case: Any, tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        pages, table = tensors["pages"], tensors["table"]
        table.copy_(torch.randperm(len(pages), generator=generator)[: case.num_pages])
        scales = torch.rand((len(pages), 1), generator=generator) + 0.5
        pages[:, :4] = scales.view(torch.uint8)
        codes = torch.randint(1, 127, (len(pages), 8), generator=generator, dtype=torch.int32)
        pages[:, 4:12] = codes.to(torch.uint8)

    def reference(self, case: Any, tensors: Tensors) -> dict[str, Tensor]:
        chosen = tensors["pages"][tensors["table"]]
        scales = chosen[:, :4].contiguous().view(torch.float32).double()
        return {"out": scales * chosen[:, 4:12].double()}


def dequantised(inputs: Any, stride: int) -> None:
    flat = inputs.pages.view(-1)
    for i, page in enumerate(inputs.table.tolist()):
        at = page * stride
        scale = flat[at : at + 4].clone().view(torch.float32)
        inputs.out[i] = scale * inputs.pages[page, 4:12].float()


@attnfuzz.kernel(Dequantise())
def dequantise(inputs: Any) -> None:
    dequantised(inputs, inputs.pages.shape[1])


@attnfuzz.kernel(Dequantise())
def dequantise_as_if_packed(inputs: Any) -> None:
    dequantised(inputs, inputs.pages.shape[1] - inputs.padding)


class Attend(attnfuzz.Problem):
    """One query and a few keys, which are values, too."""

    keys = attnfuzz.Integer(3, 16)
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "q": attnfuzz.TensorSpec((16,), "float32", axes=("dim",)),
            "k": attnfuzz.TensorSpec((case.keys, 16), "float32", axes=("key", "dim")),
            "out": attnfuzz.TensorSpec((16,), "float32", "output", axes=("dim",)),
        }

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        for name in ("q", "k"):
            tensors[name].copy_(attnfuzz.numbers(tuple(tensors[name].shape), seed=case.seed, name=name))

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        k = tensors["k"].double()
        return {"out": (k @ tensors["q"].double()).softmax(0) @ k}


@attnfuzz.kernel(Attend())
def attend_without_the_last_two(inputs: Any) -> None:
    k = inputs.k[:-2]
    inputs.out.copy_((k @ inputs.q).softmax(0) @ k)


@attnfuzz.kernel(Attend())
def average(inputs: Any) -> None:
    inputs.out.copy_(inputs.k.mean(0))
