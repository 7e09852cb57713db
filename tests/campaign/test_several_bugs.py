"""One kernel with several bugs: as many findings, however many symptoms each of them has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.cases.facets.heads import SEVERAL_HEADS
from attnfuzz.cases.facets.storage import KV_STRIDES_DIFFER
from attnfuzz.cases.features import general_features
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, SourceLine
from tests.common.named_features import words
from tests.common.search_bench import Bug, findings

KERNEL = Declaration(
    name="pretended",
    problem="dense_decode",
    supports=Supports(strides="any", dtypes=("float16",), head_sizes=(16, 32)),
    target="kernels.py:pretended",
)


def failure(oracle: OracleName, kind: str) -> Failure:
    return Failure(oracle=oracle, kind=kind, message=f"{oracle} objects")


def as_address(case: DenseDecodeCase) -> Failure:
    """How a wrong address shows depends on what lies there."""
    if max(case.seq_lens) > 8:
        return failure("dead_memory", "out")
    return failure("unwritten", "out") if case.num_seqs > 1 else failure("accuracy", "out:value")


def strides_of_k_for_v(case: DenseDecodeCase) -> Failure | None:
    return as_address(case) if KV_STRIDES_DIFFER in general_features(case) else None


def has_gaps(case: DenseDecodeCase, tensor: str) -> bool:
    return case.strides.get(tensor, "contiguous") not in ("contiguous", "offset")


def strides_of_k_ignored(case: DenseDecodeCase) -> Failure | None:
    return as_address(case) if has_gaps(case, "k") else None


def strides_of_v_ignored(case: DenseDecodeCase) -> Failure | None:
    return as_address(case) if has_gaps(case, "v") else None


def strides_of_q_ignored(case: DenseDecodeCase) -> Failure | None:
    return failure("accuracy", "out:value") if has_gaps(case, "q") else None


def strides_of_out_ignored(case: DenseDecodeCase) -> Failure | None:
    return failure("red_zone", "write between out") if has_gaps(case, "out") else None


def odd_group(case: DenseDecodeCase) -> Failure | None:
    return failure("accuracy", "out:value") if case.gqa_ratio in (3, 5, 6, 7) else None


def empty_sequence(case: DenseDecodeCase) -> Failure | None:
    return failure("accuracy", "out:nan") if 0 in case.seq_lens else None


def long_sequence(case: DenseDecodeCase) -> Failure | None:
    return failure("accuracy", "out:value") if max(case.seq_lens) > 16 else None


def large_group(case: DenseDecodeCase) -> Failure | None:
    return failure("exception", "ZeroDivisionError in f") if case.gqa_ratio >= 8 else None


def rows_transposed(case: DenseDecodeCase) -> Failure | None:
    return failure("accuracy", "out:value") if case.num_q_heads > 1 and case.num_seqs > 1 else None


def kv_head_by_their_number(case: DenseDecodeCase) -> Failure | None:
    """Past the only KV head lies dead memory; past the first of several, the next."""
    if case.num_q_heads == 1 or case.num_kv_heads == case.gqa_ratio:
        return None
    return failure("dead_memory", "out") if case.num_kv_heads == 1 else failure("accuracy", "out:value")


def written_for_head_size_64(case: DenseDecodeCase) -> Failure | None:
    if case.head_size == 64 or max(case.seq_lens) <= 1:
        return None
    if case.head_size > 64:
        return failure("accuracy", "out:value")
    return failure("crash", "SIGSEGV") if case.num_seqs > 2 else failure("dead_memory", "out")


def out_with_strides_of_q(case: DenseDecodeCase) -> Failure | None:
    """Rows of the output lie where those of q would."""
    q, out = (case.strides.get(name, "contiguous") for name in ("q", "out"))
    if q == out or case.num_seqs == 1:
        return None
    return failure("red_zone", "write after out") if out == "contiguous" else failure("red_zone", "write between out")


def signatures(found: list[Finding]) -> set[str]:
    return {str(finding.signature) for finding in found}


def test_five_bugs_are_five_findings(tmp_path: Path) -> None:
    """A maintainer would read the same bug eight times, and the fifth bug never."""
    bugs = (large_group, strides_of_k_for_v, empty_sequence, odd_group, long_sequence)
    found = findings(KERNEL, tmp_path, *bugs)
    assert len(found) == 5, signatures(found)
    hit = [{bug.__name__ for bug in bugs if bug(finding.case) is not None} for finding in found]  # type: ignore[arg-type]  # dense cases
    assert sorted(map(tuple, hit)) == sorted((bug.__name__,) for bug in bugs)
    assert len(list(tmp_path.glob("*.json"))) == 5


def test_strides_of_k_taken_for_v_are_one_finding_that_says_so(tmp_path: Path) -> None:
    """The smallest case has unusual strides in one tensor, which would send the maintainer to that tensor's code."""
    (finding,) = findings(KERNEL, tmp_path, strides_of_k_for_v)
    assert KV_STRIDES_DIFFER in finding.features
    assert not any("=" in word for word in words(finding.features))


@pytest.mark.parametrize(
    ("bugs", "told"),
    [
        ((strides_of_k_ignored, strides_of_v_ignored), 2),  # two places in the code
        ((strides_of_k_for_v, strides_of_v_ignored), 2),  # of both tensors, and of one
        ((strides_of_k_for_v, empty_sequence), 2),  # the one spoils cases that show the other
        ((strides_of_out_ignored, strides_of_q_ignored), 2),
        ((out_with_strides_of_q,), 1),  # which is about both
    ],
    ids=["k and v", "k for v and v", "k for v and empty", "out and q", "out like q"],
)
@pytest.mark.by_day("k and v", "k for v and empty", "out like q")
def test_bugs_of_addresses_are_as_many_findings_as_places_in_the_code(
    bugs: tuple[Bug, ...], told: int, tmp_path: Path
) -> None:
    """The second would be taken for the first and stay when that is mended; or one be told once for each tensor."""
    found = findings(KERNEL, tmp_path, *bugs, cases=600)
    assert len(found) == told, signatures(found)
    if strides_of_k_ignored in bugs:
        assert {"k", "v"} == {name for finding in found for name in finding.case.strides}
    assert empty_sequence not in bugs or "accuracy/out:nan [empty sequence]" in signatures(found)


def test_query_heads_on_one_kv_head_or_on_several_are_one_finding(tmp_path: Path) -> None:
    """The smallest case has either, as luck has it, and each would be told as a bug of its own."""
    for number, bug in enumerate((rows_transposed, kv_head_by_their_number)):
        (finding,) = findings(KERNEL, tmp_path / str(number), bug, cases=600)
        assert SEVERAL_HEADS in finding.features


def test_a_head_size_that_is_written_into_the_kernel_is_one_finding_that_says_which(tmp_path: Path) -> None:
    """Wrong addresses show as numbers, dead memory and crashes: six findings, of which none says what they share."""
    supports = msgspec.structs.replace(KERNEL.supports, head_sizes=(16, 32, 64, 128))
    kernel = msgspec.structs.replace(KERNEL, supports=supports)
    (finding,) = findings(kernel, tmp_path, written_for_head_size_64, cases=600)
    assert words(finding.features) == {"head_size other than 64", "seq_len>1"}


def test_numbers_that_matter_do_not_tell_of_a_head_size(tmp_path: Path) -> None:
    """Another head size has other numbers, of which some pass by luck: what needs them would be told apart by that."""
    supports = msgspec.structs.replace(KERNEL.supports, head_sizes=(16, 64))
    kernel = msgspec.structs.replace(KERNEL, supports=supports)

    def lucky(case: DenseDecodeCase) -> Failure | None:
        is_hit = case.head_size == 16 and case.values.logit_exponent > 0
        return failure("accuracy", "out:value") if is_hit else None

    (finding,) = findings(kernel, tmp_path, lucky, cases=600)
    assert not any(feature.role == "other" for feature in finding.features)


@pytest.mark.parametrize(("lines", "bugs"), [((31, 31), 1), ((31, 47), 2)], ids=["one line", "two lines"])
@pytest.mark.by_day("one line")
def test_accesses_astray_are_as_many_bugs_as_lines(lines: tuple[int, int], bugs: int, tmp_path: Path) -> None:
    """One load without a mask was a read past a tensor and a crash; two loads must not be told as one."""
    past, far = (SourceLine(file="kernels.py", line=line) for line in lines)

    def past_the_end(case: DenseDecodeCase) -> Failure | None:
        read = Failure(oracle="guard_page", kind="read past k", message="read", tensor="k", sources=(past,))
        return read if case.gqa_ratio == 3 else None

    def far_away(case: DenseDecodeCase) -> Failure | None:
        crash = Failure(oracle="crash", kind="SIGSEGV", message="died", sources=(far,))
        return crash if 0 in case.seq_lens else None

    found = findings(KERNEL, tmp_path, past_the_end, far_away, cases=600)
    assert len(found) == bugs, signatures(found)
