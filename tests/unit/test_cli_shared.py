"""attnfuzz explore --shared, as installed: two machines, one server, and what is left when the server goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.report.summary import Summary
from tests.unit.redis_server import RedisServer

KERNEL = """
import attnfuzz
from attnfuzz.kernels import eager


SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def mine(inputs):
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    out[inputs.seq_lens > 1] += 1  # the bug
    return out, lse
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def start(server: RedisServer, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    """A campaign on a machine of its own, by its folder."""
    cwd.mkdir()
    (cwd / "mine.py").write_text(KERNEL)
    command = [
        str(Path(sys.executable).with_name("attnfuzz")),
        "explore",
        "mine.py",
        "--workers",
        "1",
        "--json",
        "a.json",
    ]
    return subprocess.Popen(
        [*command, "--shared", server.url, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def summary(cwd: Path) -> Summary:
    return msgspec.json.decode((cwd / "a.json").read_bytes(), type=Summary)


def test_a_bug_that_one_machine_found_is_known_to_the_next(server: RedisServer, tmp_path: Path) -> None:
    """Every machine of an array would find, shrink and report the same bug."""
    first = start(server, tmp_path / "node1", "--fail-fast", "--budget", "60s")
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 1, output
    (finding,) = summary(tmp_path / "node1").kernels[0].findings

    second = start(server, tmp_path / "node2", "--budget", "10s")
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 1, output
    found = summary(tmp_path / "node2")
    assert [kernel.findings for kernel in found.kernels] == [()]
    assert [(one.signature, one.message) for one in found.elsewhere] == [(finding.signature, finding.message)]
    assert found.cases > 0
    assert "known elsewhere: mine.py:mine accuracy/out:value [seq_len>1], found on " in output
    assert "nothing new found, 1 known elsewhere, in " in output.splitlines()[-1]
    assert not (tmp_path / "node2" / "regressions").exists()


def test_a_campaign_outlives_its_server(server: RedisServer, tmp_path: Path) -> None:
    """One machine of many would end the search of all others."""
    campaign = start(server, tmp_path / "node1", "--budget", "12s")
    assert campaign.stdout is not None
    with campaign, campaign.stdout as lines:
        head = [next(lines)]
        server.kill()
        output = "".join([*head, *lines])
        assert campaign.wait(60) == 1, output
    assert output.count("goes on alone") == 1
    assert len(summary(tmp_path / "node1").kernels[0].findings) == 1
    assert len(list((tmp_path / "node1" / "regressions").glob("*.json"))) == 1
