"""attnfuzz.campaign.state: an interrupted campaign is found again, and nothing else is taken for one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Known
from attnfuzz.campaign.result import KernelStatistics, Statistics
from attnfuzz.campaign.state import Asked, SavedFinding, State, StateError, StateFile, load_state
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import DenseDecodeCase

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")


def a_case(seq_len: int) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25)


def a_finding() -> Finding:
    return Finding(
        name="0-1", declaration=KERNEL, case=a_case(2), failure=Failure(oracle="crash", kind="SIGSEGV", message="dead"),
        first_seen_s=1.5, failed=2, runs=3, shrunk_s=2.5, minimised=True, steps=7, path=Path("regressions/a.json"),
        features=frozenset({"seq_len>1"}), preceding=(a_case(3), a_case(4)),
    )  # fmt: skip


def a_state(**changes: Any) -> State:
    kernel = KernelStatistics(KERNEL, cases=12, max_error_ratio=0.5, ratios={"float16": {3: 4}}, coverage={5: 6})
    known = Known(kernel=KERNEL.target, oracle="crash", kind="SIGSEGV", features=frozenset({"seq_len>1"}))
    state = State(
        asked=Asked(kernels=("kernels.py",), budget_s=60.0, save_folder="regressions"), seed=7, elapsed_s=20.0, parts=1,
        kernels=(kernel,), interval_s=2.0, throughput={"": (5, 7)}, findings=(SavedFinding.of(a_finding()),),
        known=(known,),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def written(folder: Path, state: State) -> Path:
    with StateFile(folder) as file:
        file.write(state)
    return folder / "state.json"


def test_a_state_survives_a_round_trip(tmp_path: Path) -> None:
    """Whatever is missing is searched for again, or never reported again."""
    written(tmp_path, a_state())
    state = load_state(tmp_path)
    assert state == a_state()
    assert state.remaining_s == 40.0
    before, after = a_finding(), state.findings[0].restore(KERNEL, "0-1")
    assert {name: getattr(after, name) for name in Finding.__slots__} == {
        name: getattr(before, name) for name in Finding.__slots__
    }


def test_nobody_else_may_read_a_state(tmp_path: Path) -> None:
    """The address of a shared server that it holds may have a password in it."""
    with StateFile(tmp_path) as file:
        for _ in range(2):
            file.write(a_state())
            assert (tmp_path / "state.json").stat().st_mode & 0o077 == 0


def test_statistics_go_on_where_they_were(tmp_path: Path) -> None:
    """The number of cases would begin again at nothing."""
    now = time.monotonic()
    new = msgspec.structs.replace(KERNEL, options={"tile": (16,)})
    statistics = Statistics(
        kernels=Statistics.of_kernels([new]), started=now, deadline=now, device="cpu", device_name="cpu", workers=1,
        seed=7,
    )  # fmt: skip
    a_state().fill(statistics)
    assert statistics.cases == 12
    assert statistics.kernels[KERNEL.target].declaration == new
    assert statistics.throughput.counts == {"": [5, 7]}


def test_nothing_to_resume_is_said_with_the_place(tmp_path: Path) -> None:
    """Whoever is in the wrong folder has to see which one was looked at."""
    with pytest.raises(StateError, match=rf"no interrupted campaign.*{tmp_path}"):
        load_state(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "attnfuzz.state/2"}, "attnfuzz.state/2"),
        ({"version": "99.0"}, "99.0"),
        ({"seed": "seven"}, "no state of a campaign"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"kernels": 3}, "no state of a campaign"),
    ],
)
def test_what_is_no_state_of_this_version_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Signatures of another version may mean other bugs, which then would never be found."""
    path = written(tmp_path, a_state())
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    with pytest.raises(StateError, match=words) as refusal:
        load_state(tmp_path)
    assert "without --resume" in str(refusal.value)


def test_other_kernels_are_refused() -> None:
    """Counts and known bugs of one kernel would be put down to another."""
    a_state().check_kernels({KERNEL.target})
    with pytest.raises(StateError, match=r"searched kernels\.py:k, not other"):
        a_state().check_kernels({"other"})


def test_two_campaigns_in_one_folder_do_not_write_over_each_other(tmp_path: Path) -> None:
    """The second would leave the first without a state, or with half of its own."""
    with StateFile(tmp_path) as first, StateFile(tmp_path) as second:
        assert (first.is_usable, second.is_usable) == (True, False)
        first.write(a_state())
        second.write(a_state(seed=8))
        second.remove()
    assert load_state(tmp_path).seed == 7


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    """A read-only checkout could not be searched from."""
    (tmp_path / "blocked").touch()
    with StateFile(tmp_path / "blocked" / "folder") as file:
        assert not file.is_usable
        file.write(a_state())
        file.remove()


def test_a_campaign_that_ran_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    """Each folder in which somebody ever searched would keep a hidden one."""
    with StateFile(tmp_path / "state") as file:
        file.write(a_state())
        file.remove()
    assert list(tmp_path.iterdir()) == []
