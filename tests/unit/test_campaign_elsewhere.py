"""attnfuzz.campaign.elsewhere: what comes from another machine is read strictly, and kept once."""

from __future__ import annotations

import pytest

from attnfuzz.campaign.elsewhere import MAX_BYTES, Elsewhere, FoundElsewhere, decode_found, encode_found
from attnfuzz.campaign.messages import Known
from tests.unit.saved_findings import TARGET, a_finding


def found(length: int, *features: str, kind: str = "out:value", host: str = "node1") -> FoundElsewhere:
    known = Known(kernel=TARGET, oracle="accuracy", kind=kind, features=frozenset(features))
    return FoundElsewhere(host=host, known=(known,), regression=a_finding(length, *features, kind=kind))


def test_a_finding_survives_the_journey() -> None:
    """Another machine would look for another bug, or replay another case."""
    one = found(2, "seq_len>1", "strides:q")
    assert decode_found(encode_found(one), kernel=TARGET, source="here") == one
    assert encode_found(one) == encode_found(found(2, "strides:q", "seq_len>1"))
    without_case = FoundElsewhere(host="node1", known=one.known)
    assert decode_found(encode_found(without_case), kernel=TARGET, source="here") == without_case


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "did not write"),
        (b"\xff", "did not write"),
        (b"[" * 100_000, "did not write"),
        (b" " * (MAX_BYTES + 1), "bytes"),
        (b'{"format": "attnfuzz.shared/2", "host": "x", "known": []}', "format 'attnfuzz.shared/2'"),
        (b'{"format": "attnfuzz.shared/1", "host": "x", "known": []}', "name a bug"),
        (b'{"format": "attnfuzz.shared/1", "host": "x", "known": [], "run": "me"}', "did not write"),
        (encode_found(found(2)).replace(b'"seq_lens": [\n      2', b'"seq_lens": [\n      -2'), "between 0 and"),
        (encode_found(found(2)).replace(b"mine.py", b"yours.py"), "another kernel"),
        (encode_found(found(2)).replace(b'"kernel": "mine.py', b'"kernel": "../yours.py'), "a case of another kernel"),
        (encode_found(found(2, host="x" * 300)), "longer or more"),
        (encode_found(found(2, host="\x1b[2J")), "longer or more"),
        (encode_found(found(2, *(f"f{i}" for i in range(65)))), "longer or more"),
        (encode_found(FoundElsewhere(host="x", known=found(2).known * 17)), "longer or more"),
        (b'{"format": "' + b"x" * 100_000 + b'", "host": "x", "known": []}', "x{256}'; it must be"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(data: bytes, words: str) -> None:
    """A server may hold anything, and a campaign must not fall over it."""
    with pytest.raises(ValueError, match=words) as caught:
        decode_found(data, kernel=TARGET, source="redis://head")
    assert str(caught.value).startswith("redis://head")


def test_a_bug_found_by_two_machines_is_kept_once_in_its_smallest_case() -> None:
    """The report would list a bug once for each machine."""
    elsewhere = Elsewhere()
    assert elsewhere.add(found(9, "seq_len>1"))
    assert not elsewhere.add(found(2, "seq_len>1", host="node2"))
    assert not elsewhere.add(found(5, "seq_len>1"))
    assert elsewhere.besides([]) == (found(2, "seq_len>1", host="node2"),)


def test_what_was_found_here_too_is_not_known_elsewhere_only() -> None:
    """One bug would be told twice in one report."""
    elsewhere = Elsewhere()
    for one in (found(2, "seq_len>1"), found(3, "strides:q")):
        elsewhere.add(one)
    assert elsewhere.besides([found(7, "seq_len>1")]) == (found(3, "strides:q"),)


def test_another_way_in_which_a_bug_shows_is_no_bug() -> None:
    """Duplicates would be reported after all."""
    elsewhere = Elsewhere()
    assert not elsewhere.add(FoundElsewhere(host="node1", known=found(2).known))
    assert elsewhere.besides([]) == ()


def test_it_says_which_bug_where() -> None:
    """Whoever reads the note wants to know whom to ask."""
    words = "mine.py:mine accuracy/out:value [seq_len>1], found on node1: wrong for 2 tokens"
    assert str(found(2, "seq_len>1")) == words
