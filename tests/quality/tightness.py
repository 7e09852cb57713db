"""What the error bounds still see: `python -m tests.quality.tightness` prints the share of drawn cases that show a bug.

Kernels that lose a little precision, or a little else, on cases as a search draws them: judged by the output alone, and
by the LSE alone, once with nothing declared and once as kernels whose sums are in float32. Beside them, how many cases
a search needs to meet one that shows the bug, by whichever of the two, with a probability of 90 %, and whether a GPU
judges so many in a second. With ``--device cuda`` cases are as large as a campaign on a GPU draws them.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from tests.common.tensor_cores import HOPPER_FP8
from tests.quality.designs import Design, Result, drawn_of, ratios

DECLARED = (Numerics(), Numerics(row_sum="float32", partials="float32"))


def _rounded_products(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (q[:, None] * k).float().sum(-1) * scale


def _rounded_sums(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Products and their sum in order, each rounded."""
    products = q[:, None] * k
    total = products[..., 0]
    for dim in range(1, k.shape[-1]):
        total = total + products[..., dim]
    return total.float() * scale


def _scaled_by(factor: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, scale: torch.einsum("hd,hnd->hn", q.float(), k.float()) * scale * factor


@dataclass(frozen=True)
class Mistake(Design):
    """``dropped``: tokens at the end that do not count. ``short_sum``, ``short_out``: sums kept in the dtype of q from
    tile to tile. ``twice``: weights are divided by their sum, and rounded again, before they multiply V."""

    dropped: int = 0
    short_sum: bool = False
    short_out: bool = False
    twice: bool = False

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tile: int) -> Result:
        """As of a design."""
        kept = max(1, k.shape[1] - self.dropped)
        scores = self._all_scores(q, k[:, :kept], scale)
        top = scores.new_full(scores.shape[:1], -torch.inf)
        total, out = torch.zeros_like(top), scores.new_zeros(len(scores), v.shape[-1])
        for start in range(0, kept, tile):
            part = scores[:, start : start + tile]
            higher = torch.maximum(top, part.amax(-1))
            weights, rescale = (part - higher[:, None]).exp(), (top - higher).exp()
            rounded = weights.to(q.dtype).float()
            if self.twice:
                of_tile = weights.sum(-1, keepdim=True)
                rounded = (weights / of_tile).to(q.dtype).float().mul(of_tile).to(q.dtype).float()
            total = total * rescale + weights.sum(-1)
            out = self._added(out * rescale[:, None], rounded, v[:, start : min(start + tile, kept)])
            total = total.to(q.dtype).float() if self.short_sum else total
            out = out.to(q.dtype).float() if self.short_out else out
            top = higher
        return (out / total[:, None]).to(q.dtype), top + total.log()


MISTAKES = (
    Mistake("scale + 1 %", "", scores=_scaled_by(1.01)),
    Mistake("last token dropped", "", dropped=1),
    Mistake("q·k products rounded", "", scores=_rounded_products),
    Mistake("products and sums in 16 bits", "", scores=_rounded_sums),
    Mistake("row sum in 16 bits, per tile", "", short_sum=True),
    Mistake("accumulator in 16 bits, per tile", "", short_out=True),
    Mistake("weights rounded twice", "", twice=True),
    Mistake("products summed in 14 bits", "", unit=HOPPER_FP8),
)


def shares(
    mistake: Mistake, drawn: Sequence[DenseDecodeCase], numerics: Numerics, device: str = "cpu"
) -> tuple[float, float, float]:
    """Of ``drawn``, in how many the output is beyond its bound, in how many the LSE is, and in how many either."""
    by_out = by_lse = by_either = 0
    for case in drawn:
        rows = [of_row[0] for of_row in ratios(mistake, case, (numerics,), device)]
        in_out, in_lse = any(out > 1 for out, _ in rows), any(lse > 1 for _, lse in rows)
        by_out += in_out
        by_lse += in_lse
        by_either += in_out or in_lse
    return by_out / len(drawn), by_lse / len(drawn), by_either / len(drawn)


def cases_needed(share: float, probability: float = 0.9) -> float:
    """How many independent cases have one that shows a bug, of which a ``share`` does, with this ``probability``."""
    if share >= 1:
        return 1
    return math.ceil(math.log(1 - probability) / math.log1p(-share)) if share > 0 else math.inf


def _needed(found: Sequence[tuple[float, float, float]], rate: float) -> str:
    """Of both dtypes together, as a search draws them."""
    number = cases_needed(sum(one[2] for one in found) / len(found))
    if math.isinf(number):
        return "none of these shows it"
    return f"{number}, {'within' if number <= rate else 'more than'} a second"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.tightness", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="of each dtype")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rate", type=float, default=1500.0, help="cases of one kernel that a GPU judges in a second")
    options = parser.parse_args()
    count, device = options.cases, options.device
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    today = datetime.date.today().isoformat()
    command = f"python -m tests.quality.tightness --cases {count} --device {device} --rate {options.rate:g}"
    print(f"`{command}`, {where}, torch {torch.__version__}, {today}\n")
    needed = "cases for 90 %, by either"
    print(f"| mistake | out, undeclared | LSE, undeclared | {needed} | out, sums in float32 | LSE | {needed} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    drawn = [drawn_of(dtype, count, device) for dtype in ("float16", "bfloat16")]
    for mistake in MISTAKES:
        columns = []
        for numerics in DECLARED:
            found = [shares(mistake, of_dtype, numerics, device) for of_dtype in drawn]
            columns += [" / ".join(f"{100 * one[i]:.0f} %" for one in found) for i in range(2)]
            columns.append(_needed(found, options.rate))
        print("|", " | ".join([mistake.name, *columns]), "|", flush=True)


if __name__ == "__main__":
    main()
