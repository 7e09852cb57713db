"""Which cores are a GPU's share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnfuzz.bench.throughput import confined_to, share_of_cores


def fake_system(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ({cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, {0, 4, 1, 5}),
        ({cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}, {0, 1, 2, 3}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_a_share_is_of_whole_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], expected: set[int]
) -> None:
    """One thread of each core would be nearly as fast as the whole machine, and scaling would look bad."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert share_of_cores(1, 2, fake_system(tmp_path, siblings)) == expected


def test_everything_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign on all GPUs would be left without some of the cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5})
    assert share_of_cores(4, 4) == {1, 2, 5}
    assert len(share_of_cores(1, 4)) == 1


def test_what_starts_meanwhile_is_confined() -> None:
    """Workers would run on all cores, or everything that follows on a few."""
    before = os.sched_getaffinity(0)
    with confined_to(frozenset([min(before)])):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
