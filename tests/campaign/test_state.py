"""attnfuzz.campaign.saved.state: an interrupted campaign is found again, and nothing else is taken for one."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from attnfuzz.campaign.coordinator import Coordinator
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Setup, Unfinished
from attnfuzz.campaign.request import CampaignRequest, resumed
from attnfuzz.campaign.result import Reporter, Statistics
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.campaign.saved.state import AskedOf, CampaignState, SavedFinding, StateError, StateFile, load_state
from attnfuzz.campaign.statistics import KernelStatistics
from attnfuzz.corpus import write_regression
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.report.junit import junit_xml
from attnfuzz.report.summary import summarise
from attnfuzz.report.terminal import print_result
from attnfuzz.untrusted_text import only_printable
from attnfuzz.verdict import Failure
from tests.campaign.hostile_states import broken_bytes, changed_documents
from tests.common.named_features import named

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")


def a_case(seq_len: int) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25)


def a_finding() -> Finding:
    return Finding(
        name="0-1", declaration=KERNEL, case=a_case(2), failure=Failure(oracle="crash", kind="SIGSEGV", message="dead"),
        first_seen_s=1.5, failed=2, runs=3, shrunk_s=2.5, minimised=True, steps=7, path=Path("regressions/a.json"),
        features=named("seq_len>1"), preceding=(a_case(3), a_case(4)),
    )  # fmt: skip


def a_state(**changes: Any) -> CampaignState:
    kernel = KernelStatistics(
        declaration=KERNEL, cases=12, max_error_ratio=0.5, ratios={"float16": {3: 4}}, coverage={5: 6}
    )
    known = Bug(kernel=KERNEL.target, oracle="crash", kind="SIGSEGV", features=named("seq_len>1"))
    state = CampaignState(
        asked=AskedOf(kernels=("kernels.py",), budget_s=60.0, save_folder="regressions"),
        seed=7, elapsed_s=20.0, parts=1,
        kernels=(kernel,), interval_s=2.0, throughput={"": (5, 7)}, findings=(SavedFinding.of(a_finding()),),
        known=(known,),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def written(folder: Path, state: CampaignState) -> Path:
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
    """Paths and names of kernels are nobody else's business."""
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
    a_state().check_kernels([KERNEL])
    with pytest.raises(StateError, match=r"searched kernels\.py:k, not other"):
        a_state().check_kernels([msgspec.structs.replace(KERNEL, target="other")])
    with pytest.raises(StateError, match=r"computes merge_states, and dense_decode when"):
        a_state().check_kernels([msgspec.structs.replace(KERNEL, problem="merge_states")])


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


def a_full_document() -> dict[str, Any]:
    unfinished = Unfinished(
        kernel=KERNEL.target, case=msgspec.Raw(encode_case(a_case(9))), failure=a_finding().failure,
        preceding=(msgspec.Raw(encode_case(a_case(3))),),
    )  # fmt: skip
    finding = a_finding()
    finding.replaces = Path("regressions/b.json")
    document: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(a_state(findings=(SavedFinding.of(finding),), pending=(unfinished,)))
    )
    return document


def outcome_of(folder: Path, data: bytes) -> CampaignState | str:
    """What comes of a ``.attnfuzz/state.json`` with such content: a state, or the sentence that refuses it."""
    (folder / "state.json").write_bytes(data)
    try:
        return load_state(folder)
    except StateError as refusal:
        return str(refusal)


def go_on_with(state: CampaignState) -> None:
    """Have a campaign without time take it up and report it."""
    asked = msgspec.structs.replace(state.asked, python="")  # of another environment it would be refused
    state = msgspec.structs.replace(state, asked=asked)
    defaults = CampaignRequest(kernels=("*",), started=time.monotonic(), budget_s=60.0, save_folder=Path("regressions"))
    try:
        request = resumed(defaults, state, given=())
    except StateError:  # its budget is spent
        request = resumed(defaults, state, given={"budget_s"})
    state.check_kernels([KERNEL])
    statistics = Statistics(
        kernels=Statistics.of_kernels([KERNEL]), started=request.started - state.elapsed_s, deadline=0.0,
        device="cpu", device_name="cpu", workers=1, seed=state.seed,
    )  # fmt: skip
    state.fill(statistics)
    result = Coordinator(request, statistics, launch=no_worker, reporter=Reporter()).run()
    console = Console(file=io.StringIO(), width=100)
    print_result(console, result)
    assert junit_xml(result)
    assert msgspec.json.encode(summarise(result))


def no_worker(setup: Setup) -> Any:
    raise AssertionError("there was no time for one")


STRANGERS = ("stranger.json", "here/.attnfuzz/note.txt", "here/passwd.json", "here/regressions/a.json")


@pytest.mark.night
def test_no_state_ends_in_anything_but_one_sentence_or_a_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that came with a folder could end in a traceback, or have another file overwritten or removed."""
    folder = tmp_path / "here" / ".attnfuzz"
    folder.mkdir(parents=True)
    (tmp_path / "here" / "regressions").mkdir()
    for name in STRANGERS:
        (tmp_path / name).write_bytes(b"mine")
    monkeypatch.chdir(tmp_path / "here")
    good = msgspec.json.encode(a_full_document())
    changed = ((name, msgspec.json.encode(one)) for name, one in changed_documents(a_full_document()) if encodable(one))
    sentences = taken_up = 0
    for name, data in (("as it was", good), *broken_bytes(good), *changed):
        outcome = outcome_of(Path(".attnfuzz"), data)
        if isinstance(outcome, CampaignState):
            taken_up += 1
            go_on_with(outcome)
        else:
            sentences += 1
            assert "\n" not in outcome, name
            assert outcome.startswith(".attnfuzz/state.json "), name
            assert "without --resume" in outcome, name
            assert only_printable(outcome) == outcome, name
            assert len(outcome) <= 1_024, name
        assert [(tmp_path / one).read_bytes() for one in STRANGERS] == [b"mine"] * len(STRANGERS), name
    assert isinstance(outcome_of(Path(".attnfuzz"), good), CampaignState)
    assert sentences > 1_000
    assert taken_up > 50


def encodable(document: object) -> bool:
    """Whether JSON can say it."""
    try:
        msgspec.json.encode(document)
    except (OverflowError, msgspec.EncodeError, RecursionError):
        return False
    return True


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("findings.0.path", "/etc/passwd", "'/etc/passwd' must be a regression file in the folder that findings go to"),
        ("findings.0.path", "regressions/../../a.json", "must be a regression file in the folder that findings go to"),
        ("findings.0.known_as", "a.json", "must be a regression file in the folder that findings go to"),
        ("findings.0.replaces", "link/a.json", "must be a regression file in the folder that findings go to"),
        ("findings.0.path", "regressions/..", "must be a regression file in the folder that findings go to"),
        ("findings.0.kernel", "other", "'other' must be one of the kernels - at `$.findings[0].kernel`"),
        ("findings.0.case.seq_lens", [-1], "seq_lens[0]=-1"),
        ("findings.0.case.seq_lens", [1 << 20] * 64, "GiB"),
        ("findings.0.failed", 4, "failed=4 must be between 0 and runs=3"),
        ("pending.0.preceding.0.head_size", 0, "at `$.pending[0].preceding[0]`"),
        ("interval_s", 0.0, ">= 1.0, found 0.0 - at `$.interval_s`"),
        ("asked.workers", 100_000, "found 100000 - at `$.asked.workers`"),
        ("asked.oracles", ["no name"], 'found "no name" - at `$.asked.oracles[0]`'),
        ("asked.device", "tpu", 'found "tpu" - at `$.asked.device`'),
        ("seed", -1, "found -1 - at `$.seed`"),
        ("kernels.0.ratios", {"float16": {"2000000000": 1}}, "at `key` in `$.kernels[0].ratios[...]`"),
    ],
)
def test_what_is_wrong_with_a_state_is_said_with_place_and_rule(
    place: str, value: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could repair the file, or tell a bug of attnfuzz from a file that somebody made up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".attnfuzz").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    document: Any = a_full_document()
    holder = document
    *outer, last = place.split(".")
    for key in outer:
        holder = holder[int(key) if key.isdigit() else key]
    holder[last] = value
    outcome = outcome_of(Path(".attnfuzz"), msgspec.json.encode(document))
    assert isinstance(outcome, str)
    assert words in outcome


def test_a_state_of_any_size_is_not_read(tmp_path: Path) -> None:
    """Gigabytes of nothing would fill the memory."""
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StateError, match="larger than"):
        load_state(tmp_path)


def test_only_a_finding_of_its_own_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that names somebody's regression file as that of a finding would have it removed once that shrinks."""
    monkeypatch.chdir(tmp_path)
    mine, other = a_finding(), a_finding()
    other.case = a_case(5)
    paths = [write_regression(one.regression("cpu"), Path("regressions")) for one in (mine, other)]
    outside = write_regression(mine.regression("cpu"), Path("outside"))
    for path, is_replaced in ((paths[0], True), (paths[1], False), (outside, False)):
        before = path.read_bytes()
        folder = SaveFolder(Path("regressions"), device="cpu", warn=lambda text: None)
        finding = a_finding()
        finding.path = path
        folder.adopt(finding)
        folder.forget(finding)
        assert path.exists() == (not is_replaced)
        path.write_bytes(before)
