"""A test suite on a GPU under pytest-xdist: what one kernel does to the GPU, and how many workers share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnfuzz.campaign.workers import by_formula, cores
from attnfuzz.isolation.devices import find_gpus

BROKEN_KERNELS = Path(__file__).with_name("broken_kernels.py")
ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "no:attnfuzz", "-p", "attnfuzz.pytest_plugin")
"""Loaded by its module's name, as GPU machines may run a checkout that is not installed."""

SUITE = f"""
import attnfuzz
import pytest

CASE = {{"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": [5, 0, 37], "scale": 0.25}}

def check(name):
    attnfuzz.check({str(BROKEN_KERNELS)!r} + ":" + name, CASE, device="cuda")

@pytest.mark.parametrize("number", range(4))
def test_before(number):
    check("correct")

def test_that_writes_far_away():
    check("writes_far_away")

@pytest.mark.parametrize("number", range(4))
def test_after(number):
    check("correct")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    pytester.makepyprojecttoml("[tool.attnfuzz]\nregressions = 'saved'\n")
    return pytester


def test_illegal_access_fails_its_own_test(suite: pytest.Pytester) -> None:
    """After one illegal access, later tests of its worker would fail, or those of the other one on the same GPU."""
    suite.makepyfile(SUITE)
    result = suite.runpytest_subprocess(*PLUGIN, "-n", "2")
    result.assert_outcomes(passed=8, failed=1)
    result.stdout.fnmatch_lines(["*KernelFailure: *writes_far_away fails crash/cuda:illegal memory access*"])
    result.stdout.no_fnmatch_line("*replacing crashed worker*")


def test_auto_is_what_a_campaign_takes(suite: pytest.Pytester) -> None:
    """As many workers as the machine has cores would run out of the GPU's memory."""
    gpus = find_gpus()
    assert gpus, "torch sees a GPU that nvidia-smi does not list"
    expected = by_formula(cores(), gpus)
    suite.makepyfile("def test_it(): pass")
    result = suite.runpytest_subprocess(*PLUGIN, "-n", "auto", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"attnfuzz: {expected.sentence}", f"{expected.workers} worker* [[]1 item[]]"])
