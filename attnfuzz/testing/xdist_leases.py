"""A test suite under pytest-xdist: how many workers it gets, and the GPU that each of them has. Torch-free.

The controller shares the GPUs out and tells every worker its own with the worker's input; kernels of that worker run
there. A worker that crashes gives its GPU back before xdist starts the replacement, which thereby gets it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from attnfuzz.campaign.workers import WorkerChoice, by_formula, cores
from attnfuzz.isolation.devices import DeviceLease, Gpu, LeasePool
from attnfuzz.testing.loading import pin_to

_DEVICE_ID = "attnfuzz_device_id"
_NUMBER_BY_ENVIRONMENT = "PYTEST_XDIST_AUTO_NUM_WORKERS"
_OURS_AND_XDISTS = ("attnfuzz", "xdist")


def choose_workers(config: pytest.Config, gpus: Sequence[Gpu]) -> WorkerChoice | None:
    """As many as a campaign takes without trying; None leaves the choice to xdist, or to whoever else makes it.

    That is so without a GPU, where xdist is asked for ``logical`` cores, and where an environment variable of xdist's
    or a conftest.py settles the number.
    """
    if not gpus or config.getoption("numprocesses") != "auto" or os.environ.get(_NUMBER_BY_ENVIRONMENT):
        return None
    implementations = config.hook.pytest_xdist_auto_num_workers.get_hookimpls()
    if any(one.function.__module__.partition(".")[0] not in _OURS_AND_XDISTS for one in implementations):
        return None
    return by_formula(cores(), gpus)


class Leases:
    """The controller's part, a plugin. Workers on other machines, which see other GPUs, are not pinned."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._pool = LeasePool([gpu.id for gpu in gpus])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Lease a GPU to a worker that is about to start."""
        spec = node.gateway.spec
        lease = self._pool.take(node.gateway.id) if spec.popen and not spec.via else None
        if lease is not None:
            node.workerinput[_DEVICE_ID] = lease.device_id

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take back the GPU of a worker that has ended or crashed."""
        self._pool.give_back(node.gateway.id)


def pin_worker(workerinput: dict[str, Any]) -> None:
    """The worker's part: run kernels on the GPU that the controller has leased to it, if any."""
    device_id = workerinput.get(_DEVICE_ID)
    if device_id is not None:
        pin_to(DeviceLease(device_id))
