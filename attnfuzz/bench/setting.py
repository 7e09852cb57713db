"""What a benchmark runs on: kernels, device and GPUs, found out once."""

from __future__ import annotations

from dataclasses import dataclass

from attnfuzz.campaign.startup import load_searchable
from attnfuzz.campaign.workers import cores
from attnfuzz.isolation.devices import find_gpus
from attnfuzz.judging.runner import Runner

__all__ = ["Setting", "find_setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """``kernels`` by target. ``device`` is "cpu" or "cuda". ``gpus``: identifiers for CUDA_VISIBLE_DEVICES."""

    kernels: tuple[str, ...]
    device: str
    device_name: str
    cores: int
    gpus: tuple[str, ...] = ()


def find_setting(targets: tuple[str, ...], device: str) -> Setting:
    """Load the kernels that ``targets`` name, all bundled ones if none is named. Raises as a campaign would."""
    with Runner(device=device) as runner:
        declarations = load_searchable(runner, targets or ("*",))
        return Setting(
            kernels=tuple(one.target for one in declarations),
            device=runner.device,
            device_name=runner.device_name,
            cores=cores(),
            gpus=tuple(gpu.id for gpu in find_gpus()) if runner.device == "cuda" else (),
        )
