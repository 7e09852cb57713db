"""attnfuzz.campaign.finding_book: what workers report becomes findings, one for each bug."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.declaration_inference import LeftOut
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.finding_book import FindingBook
from attnfuzz.campaign.messages import Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.result import FindingEvent, Reporter
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.report.findings import finding_lines
from attnfuzz.verdict import Cause, Failure
from tests.common.named_features import named, words

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
WRONG = Failure(oracle="accuracy", kind="out:value", message="wrong")
HANG = Failure(oracle="hang", kind="timeout", message="still running")


def raw(seq_len: int, **fields: Any) -> msgspec.Raw:
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25, **fields)
    return msgspec.Raw(encode_case(case))


class Events(Reporter):
    """Keeps what is reported of findings."""

    def __init__(self) -> None:
        self.seen: list[tuple[FindingEvent, Finding]] = []

    def finding(self, event: FindingEvent, finding: Finding) -> None:
        self.seen.append((event, finding))


class Story:
    """A book, and workers that tell it things."""

    def __init__(self, folder: Path) -> None:
        saver = SaveFolder(folder, device="cpu", warn=lambda text: None)
        self.folder = folder
        self.events = Events()
        self.book = FindingBook({KERNEL.target: KERNEL}, started=time.monotonic(), folder=saver, reporter=self.events)

    def found(self, name: str, seq_len: int, failure: Failure = WRONG, **fields: Any) -> None:
        self.book.found(Found(finding=name, kernel=KERNEL.target, case=raw(seq_len, **fields), failure=failure))

    def confirmed(self, name: str, failed: int = 3) -> None:
        self.book.confirmed(Confirmed(finding=name, failed=failed, runs=3))

    def minimised(self, name: str, *features: str, complete: bool = True, same_as: str = "") -> None:
        needed = named(*features)
        self.book.minimised(Minimised(finding=name, features=needed, bugs=(), complete=complete, same_as=same_as))

    def told(self, name: str, seq_len: int, *features: str, failure: Failure = WRONG, **fields: Any) -> None:
        """A finding from its first case to its last."""
        closed = {name: fields.pop(name) for name in ("complete", "same_as") if name in fields}
        failed = fields.pop("failed", 3)
        self.found(name, seq_len, failure, **fields)
        self.confirmed(name, failed)
        self.minimised(name, *features, **closed)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.json"))


def said_of(finding: Finding) -> tuple[str, ...]:
    return finding_lines(finding.regression("cpu").finding, finding.case)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_nothing_is_saved_before_it_is_confirmed_and_the_unshrunk_case_then(story: Story) -> None:
    """An unconfirmed failure is no finding; a confirmed one must survive whatever happens while it is shrunk."""
    story.found("0-1", 50)
    assert story.files() == []
    story.confirmed("0-1")
    assert len(story.files()) == 1
    assert story.book.findings[0].shrunk_s is None


def test_what_was_seen_once_is_not_called_confirmed(story: Story) -> None:
    """The log would say "confirmed" of what the report says was seen once."""
    story.found("0-1", 50)
    (once,) = story.book.abandon(0)
    assert [event for event, _ in story.events.seen] == ["found", "shrunk"]
    assert once.certainty() == "seen once; time ran out before it was confirmed"
    assert story.book.findings == [once]


@pytest.mark.parametrize("confirmed_first", [True, False])
def test_of_two_that_were_not_shrunk_the_confirmed_one_stands_for_the_bug(story: Story, confirmed_first: bool) -> None:
    """The log would have said of the bug that it was confirmed, and the report that it was seen once."""
    order = ("0-1", "1-1") if confirmed_first else ("1-1", "0-1")
    for name in order:
        story.found(name, 20 if name == "0-1" else 10)
    story.confirmed("0-1")
    for name in order:
        story.book.abandon(int(name[0]))
    (kept,) = story.book.findings
    assert (kept.runs, kept.certainty()) == (3, "")


def test_the_smallest_case_is_kept(story: Story) -> None:
    """Shrinking that does not reach the file was for nothing."""
    story.found("0-1", 50)
    story.confirmed("0-1")
    before = story.files()
    story.book.smaller(Smaller(finding="0-1", case=raw(2), failure=WRONG))
    story.minimised("0-1", "seq_len>1")
    (finding,) = story.book.findings
    assert story.files() != before
    assert len(story.files()) == 1
    assert finding.steps == 1
    assert finding.shrunk_s is not None
    assert str(finding.signature) == "accuracy/out:value [seq_len>1]"


@pytest.mark.parametrize("order", [(2, 9), (9, 2)])
def test_the_same_signature_twice_is_one_finding_in_its_smaller_case(story: Story, order: tuple[int, int]) -> None:
    """Two workers find the same bug at the same time; which of them is done first must not matter."""
    for worker, seq_len in enumerate(order):
        story.found(f"{worker}-1", seq_len)
        story.confirmed(f"{worker}-1")
    for worker in range(2):
        story.minimised(f"{worker}-1", "seq_len>1")
    (finding,) = story.book.findings
    assert finding.case == msgspec.structs.replace(finding.case, seq_lens=(2,))
    assert len(story.files()) == 1


@pytest.mark.parametrize("shrunk_first", [True, False])
def test_the_case_that_is_done_with_stands_for_a_bug(story: Story, shrunk_first: bool) -> None:
    """A case whose shrinking was cut off may seem to need less, and is no case to show to anybody."""
    for name, seq_len in (("0-1", 2), ("1-1", 50)):
        story.found(name, seq_len)
        story.confirmed(name)

    def shrunk() -> None:
        story.minimised("0-1", "strides:k", "gqa_ratio>1")

    def cut_off() -> None:
        story.minimised("1-1", "strides:k", complete=False)

    for step in (shrunk, cut_off) if shrunk_first else (cut_off, shrunk):
        step()
    (finding,) = story.book.findings
    assert finding.shrunk_s is not None
    assert finding.case == msgspec.structs.replace(finding.case, seq_lens=(2,))


DEAD = Failure(oracle="dead_memory", kind="out:value", message="wrong, too")
DIES = Failure(oracle="crash", kind="SIGSEGV", message="dead")
DIFFERS = Failure(oracle="determinism", kind="out", message="differs")
RAISES = Failure(oracle="exception", kind="ValueError", message="wrong, too")
Told = tuple[tuple[str, ...], dict[str, Any]]
TWO: dict[str, tuple[Told, Told, int]] = {
    "found in the other order the second would have passed for known": (
        (("seq_len>1", "ragged"), {}), (("seq_len>1",), {}), 1,
    ),
    "merging too much hides bugs": ((("seq_len>1",), {}), (("ragged",), {}), 2),
    "nothing tells two apart that a campaign had no time for": (
        (("gqa_ratio>1", "seq_len>1"), {"complete": False}), (("strides:q", "seq_len>1"), {"complete": False}), 1,
    ),
    "another symptom that was not shrunk is the bug that its case has room for": (
        (("seq_len>1",), {}), (("seq_len>1", "strides:q"), {"failure": DEAD, "complete": False}), 1,
    ),
    "it has not what the first one needs": (
        (("seq_len>1",), {}), (("strides:q",), {"failure": DEAD, "complete": False}), 2,
    ),
    "an exception is no number": (
        (("seq_len>1",), {}), (("seq_len>1", "strides:q"), {"failure": RAISES, "complete": False}), 2,
    ),
    "nor is a hang": ((("seq_len>1",), {}), (("seq_len>1",), {"failure": HANG, "complete": False}), 2),
    "a race shows as chance has it": (
        (("num_seqs>1",), {"failure": DIFFERS, "failed": 1}), (("num_seqs>1",), {"failure": DEAD, "failed": 1}), 1,
    ),
    "and shrinking it ends anywhere": (
        (("gqa_ratio>1",), {"failed": 1}), (("num_kv_heads>1",), {"failed": 1}), 1,
    ),
    "a flaky crash is not lost in flaky numbers": (
        (("gqa_ratio>1",), {"failed": 1}), (("num_kv_heads>1",), {"failure": DIES, "failed": 1}), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", TWO)
def test_two_that_are_told_are_one_finding_or_two(why: str, story: Story) -> None:
    """One bug would be read once for each case that it was seen in, or of two bugs only one."""
    first, second, findings = TWO[why]
    for name, seq_len, (features, fields) in (("0-1", 5, first), ("1-1", 7, second)):
        story.told(name, seq_len, *features, **fields)
    assert len(story.book.findings) == len(story.files()) == findings
    shortest = min(first[0], second[0], key=len)
    assert findings == 2 or len(story.book.findings[0].features) == len(shortest)


def test_other_symptoms_of_a_bug_are_named_with_it_in_one_file(story: Story) -> None:
    """Whoever mends the bug should see all that it does, once, and still have everything that was looked into."""
    stride = Failure(oracle="unwritten", kind="out", message="never written")
    for name, seq_len, failure, more in (("0-1", 5, WRONG, ()), ("0-2", 7, stride, ("num_seqs>1",))):
        story.told(name, seq_len, "strides:k", *more, failure=failure)
    (finding,) = story.book.findings
    (path,) = story.files()
    line = "also shows as: unwritten/out [num_seqs>1, strides:k]: never written"
    assert finding.case == msgspec.structs.replace(finding.case, seq_lens=(5,))
    assert said_of(finding) == (line,)
    saved = load_regression(story.folder / path)
    assert finding_lines(saved.finding, saved.case) == (line,)


def test_a_symptom_that_says_the_same_in_many_cases_is_named_once(story: Story) -> None:
    """Eight lines that differ only in how the pages lie would bury what the bug is."""
    nobody = Failure(oracle="unwritten", kind="out", message="never written")
    story.told("0-0", 4, "strides:k")
    for name, seq_len, features in (("0-1", 5, ("num_seqs>1", "ragged")), ("0-2", 7, ("num_seqs>1",))):
        story.told(name, seq_len, "strides:k", *features, failure=nobody)
    (finding,) = story.book.findings
    assert said_of(finding) == ("also shows as: unwritten/out [num_seqs>1, strides:k]: never written",)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_question_with_the_cause_of_a_bug_is_none(is_same: bool, story: Story) -> None:
    """A kernel's author would be asked whether empty sequences are meant, of a mistake that shows without them."""
    told, other = (Cause(mistake="idle_splits", way=way, words=f"a split has {way}") for way in ("lse = 0", "no lse"))
    empty = msgspec.structs.replace(WRONG, kind="lse:value", tensor="lse", causes=(told,))
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(0,), scale=0.25)
    question = LeftOut("empty_sequences", False, (True,), "wrong", "lse is wrong", case=case, failure=empty)
    story.book.ask(question, KERNEL)
    cause = told if is_same else other
    story.told("0-1", 2, "seq_len>1", failure=msgspec.structs.replace(WRONG, causes=(cause,)))
    assert [finding.is_question for finding in story.book.findings] == ([False] if is_same else [True, False])


def test_what_may_be_any_of_several_bugs_is_told_of_none(story: Story) -> None:
    """Of two bugs one would be said to read memory that holds no token, which the other does."""
    for name, needed in (("0-1", "window"), ("0-2", "soft_cap")):
        story.told(name, 5, needed)
    story.told(
        "0-3",
        9,
        "window",
        "soft_cap",
        complete=False,
        failure=Failure(oracle="dead_memory", kind="out", message="changes"),
    )
    *told, undecided = story.book.findings
    assert [one.also for one in told] == [(), ()]
    assert undecided.is_unfinished


def test_what_was_merged_moves_on_with_the_finding_that_takes_its_place(story: Story) -> None:
    """A third symptom, needing less, must not lose the first two."""
    for name, oracle, more in (("0-1", "accuracy", 2), ("0-2", "unwritten", 1), ("0-3", "dead_memory", 0)):
        story.told(
            name,
            5 + more,
            "strides:k",
            *("num_seqs>1", "seq_len>1")[:more],
            failure=Failure(oracle=oracle, kind="out", message=oracle),
        )
    (finding,) = story.book.findings
    assert finding.symptom.oracle == "dead_memory"
    assert [sight.oracle for sight in finding.also] == ["unwritten", "accuracy"]


def test_a_finding_that_stands_for_two_says_what_ends_both(story: Story) -> None:
    """What a user declares would leave him with the symptom that was merged."""
    for name, seq_len, kind in (("0-1", 1, "every_other"), ("0-2", 2, "padded_rows")):
        story.told(
            name,
            seq_len,
            "strides:k",
            f"strides:k={kind}",
            *(["seq_len>1"] if seq_len > 1 else []),
            strides={"k": kind},
        )
    (finding,) = story.book.findings
    (path,) = story.files()
    line = 'if the kernel is only meant for contiguous tensors, declare Supports(strides="contiguous")'
    assert [one for one in said_of(finding) if "declare" in one] == [line]
    saved = load_regression(story.folder / path)
    assert line in finding_lines(saved.finding, saved.case)


def test_a_missing_lse_is_one_finding_whatever_shows_it(story: Story) -> None:
    """Where the output is wrong too that is told, so what is left needs an empty sequence here and two tokens there."""
    missing = Failure(
        oracle="unwritten", kind="lse", message="lse[seq 0, head 0] was never written", remedy={"lse": "none"}
    )
    of_one_row = msgspec.structs.replace(missing, remedy={})
    for name, seq_len, failure, feature in (
        ("0-1", 0, missing, "empty sequence"),
        ("0-2", 16, missing, "seq_len>1"),
        ("0-3", 16, of_one_row, "num_q_heads>1"),
    ):
        story.told(name, seq_len, feature, failure=failure)
    assert [words(finding.features) for finding in story.book.findings] == [{"seq_len>1"}, {"num_q_heads>1"}]
    assert any("also shows as: unwritten/lse [empty sequence]" in one for one in said_of(story.book.findings[0]))


def test_of_equal_findings_the_one_that_is_explained_is_kept(story: Story) -> None:
    """That memory was dead says less than which token was dropped."""
    told = Failure(
        oracle="accuracy",
        kind="out:value",
        message="out = 1.0; token 1 is dropped",
        causes=(Cause(mistake="tokens_dropped"),),
    )
    bare = Failure(oracle="dead_memory", kind="out", message="out depends on dead memory")
    for name, seq_len, failure in (("0-1", 5, bare), ("0-2", 7, told)):
        story.told(name, seq_len, "strides:k", failure=failure)
    assert [finding.failure.message for finding in story.book.findings] == [told.message]


def test_ignored_page_ids_stand_for_all_that_is_read_instead(story: Story) -> None:
    """The dead memory that was read would be kept, which predicts no other: the next would be told as another bug."""
    ignored = Failure(
        oracle="page_relocation",
        kind="ignored page ids",
        message="read each page where the table says",
        causes=(Cause(mistake="ignored_page_ids"),),
    )
    dead = Failure(oracle="dead_memory", kind="out", message="out depends on dead memory")
    story.told("0-1", 5, "seq_len>1", failure=dead)
    story.told("0-2", 7, failure=ignored)
    story.told("0-3", 9, "head_size>16", "seq_len>1", failure=dead)
    assert [finding.failure.message for finding in story.book.findings] == [ignored.message]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_what_a_merged_finding_predicts_is_the_bug_that_it_was_merged_with(
    order: tuple[int, ...], story: Story
) -> None:
    """Large scores gave infinity in place of a wrong number: told beneath it, and again with more that the case has."""
    known = Cause(mistake="partial_lse", words="no")
    infinite = Failure(oracle="accuracy", kind="out:inf", message="infinite")
    told: list[tuple[int, tuple[str, ...], Failure]] = [
        (1, (), msgspec.structs.replace(WRONG, causes=(known,))),
        (2, ("logit_exponent>0",), msgspec.structs.replace(infinite, causes=(known,))),
        (3, ("logit_exponent>0", "head_size>16"), infinite),
    ]
    for number in order:
        length, features, failure = told[number]
        story.told(f"0-{number}", length, *features, failure=failure)
    assert [finding.failure.kind for finding in story.book.findings] == ["out:value"]
    assert len(story.files()) == 1


def test_the_cases_of_what_is_merged_count_for_what_it_is_merged_with(story: Story) -> None:
    """The bug that shows most would be told to have been seen once for each worker that met it first."""
    for name, seq_len in (("0-1", 5), ("1-1", 7)):
        story.found(name, seq_len)
        story.confirmed(name)
    tags = [finding.tag for finding in story.book.findings]
    story.minimised("0-1", "seq_len>1")
    story.book.seen_again({tags[0]: 10})
    story.minimised("1-1", "seq_len>1")
    story.book.seen_again({tags[1]: 100, "000000": 5})
    (finding,) = story.book.findings
    assert finding.cases_seen == 112
    assert [one.same_as for event, one in story.events.seen if event == "known"] == [finding.tag]
    assert {story.book.standing_for(tag) for tag in tags} == {finding.tag}
    assert story.book.standing_for("000000") == ""
    story.found("1-2", 9)
    story.confirmed("1-2")
    known = msgspec.structs.replace(finding.bug, finding=tags[1])
    again = story.book.duplicate(Duplicate(finding="1-2", bugs=(known,))).tag
    story.book.seen_again({again: 1000})
    assert finding.cases_seen == 1113


def test_what_relatives_tell_to_be_one_bug_is_one_finding_as_it_is_seen_in_one_run(story: Story) -> None:
    """What a case needs does not always show that; and of the two a relation's word says less."""
    story.told("0-1", 5, "gqa_ratio>1", failure=Failure(oracle="containment", kind="nan in K", message="nan"))
    story.told("0-2", 7, "num_kv_heads>1", same_as=story.book.findings[0].tag)
    (finding,) = story.book.findings
    assert finding.failure == WRONG
    assert [sight.oracle for sight in finding.also] == ["containment"]


def test_a_duplicate_is_forgotten_with_its_file(story: Story) -> None:
    """What comes down to a known bug has been saved on the way, and must not stay."""
    story.found("0-1", 50)
    story.confirmed("0-1")
    assert story.book.duplicate(Duplicate(finding="0-1", bugs=())).same_as == ""
    assert story.book.findings == []
    assert story.files() == []


def test_a_wrong_number_that_did_not_come_back_is_a_flaky_finding(story: Story) -> None:
    """No load makes numbers wrong: a build would pass although a kernel has shown that it fails now and then."""
    for name in ("0-1", "0-2"):
        story.found(name, 5)
        story.book.unconfirmed_by(Unconfirmed(finding=name, runs=20))
    (finding,) = story.book.findings
    assert finding.certainty() == "flaky: failed 1 of 21 runs"
    assert story.book.unconfirmed == []
    (file,) = story.files()
    saved = load_regression(story.folder / file)
    assert (saved.finding.failed, saved.finding.runs) == (1, 21)


GONE = [("crash", "memory"), ("crash", "leak"), ("crash", "SIGKILL"), ("exception", "OutOfMemoryError in decode")]
KILLED = Failure(oracle="crash", kind="SIGXCPU", message="killed by SIGXCPU")


@pytest.mark.parametrize(
    ("failure", "times", "lost_together", "doubts"),
    [
        *((Failure(oracle=oracle, kind=kind, message="gone"), 2, False, 1) for oracle, kind in GONE),
        (HANG, 1, False, 0),  # a slow case
        (HANG, 2, True, 0),
        (HANG, 3, True, 1),  # one that stops itself in its third call hangs every batch, and no case alone
        (KILLED, 1, True, 1),
    ],
)
def test_what_the_machine_may_have_done_goes_to_the_side_list_once(
    failure: Failure, times: int, lost_together: bool, doubts: int, story: Story
) -> None:
    """A kernel would be accused of what its neighbours on the machine did, or nobody hear that a process has died."""
    for number in range(times):
        story.found(f"0-{number}", 5, failure)
        story.book.unconfirmed_by(Unconfirmed(finding=f"0-{number}", runs=3, lost_together=lost_together))
    assert [finding.failure for finding in story.book.unconfirmed] == [failure] * doubts
    assert (story.book.findings, story.files()) == ([], [])


def test_what_a_lost_worker_was_at_is_kept(story: Story) -> None:
    """The end of the budget, or of a worker, must not lose what it had found."""
    story.found("0-1", 50)
    story.found("1-1", 9)
    story.confirmed("1-1")
    assert [finding.name for finding in story.book.abandon(0)] == ["0-1"]
    assert [finding.name for finding in story.book.findings] == ["1-1", "0-1"]
    assert "seen once" in story.book.findings[1].certainty()
    assert len(story.files()) == 2


def test_a_hang_nobody_confirmed_is_not_a_finding_at_the_end(story: Story) -> None:
    """At the end of the budget, a slow case and a hang cannot be told apart."""
    story.found("0-1", 50, HANG)
    story.book.abandon(0)
    assert story.book.findings == []
    assert len(story.book.unconfirmed) == 1
