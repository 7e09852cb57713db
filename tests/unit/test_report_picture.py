"""attnfuzz.report.drawing: the picture of a case for a terminal."""

import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from attnfuzz.corpus import FindingRecord
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.variants import Variant
from attnfuzz.report.drawing import picture
from attnfuzz.verdict import MOST_PLACES, Blame


def drawn(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def paged(**fields: object) -> PagedDecodeCase:
    base: dict[str, object] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
    return PagedDecodeCase(**{**base, **fields})  # type: ignore[arg-type]  # each test gives fields of the right type


def dense(**fields: Any) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, scale=1.0, **fields)


def at(*, details: tuple[str, ...] = (), **places: Any) -> FindingRecord:
    return FindingRecord(oracle="accuracy", message="out is wrong", details=details, blame=Blame(**places))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(paged(seq_lens=(5,)), ["│ ████   ││ █···   │"], id="dead-slots"),
        pytest.param(paged(seq_lens=(3,), values=Values(needles=(Needle(0, 1, 0),))), ["│ █◆█·   │"], id="needles"),
        pytest.param(paged(seq_lens=(0, 3)), ["\nseq 0 empty\n"], id="empty-sequences"),
        pytest.param(
            paged(seq_lens=(4, 4), pages=Pages(shared_blocks=1, spare_blocks=2)),
            ["page 0 shared", "page 0 shared", "of 3 pages in the cache, no sequence owns: 1, 2"],
            id="shared-and-spare-pages",
        ),
        pytest.param(
            paged(seq_lens=(4,), pages=Pages(extra_columns=2, padding="garbage")),
            ["unused block-table entries: -1, 2147483647"],
            id="unused-table-entries",
        ),
        pytest.param(
            SplitDecodeCase(
                num_q_heads=1, num_kv_heads=1, head_size=16, scale=1.0, block_size=4, seq_lens=(5,), num_splits=4
            ),
            ["0-1 | 2-3 | 4-4 | empty"],
            id="splits",
        ),
        pytest.param(paged(seq_lens=(5,), options={"num_splits": 2}), ["0-2 | 3-4"], id="splits-of-an-option"),
        pytest.param(dense(seq_lens=(2, 3), extra_rows=1), ["│ ██·· "], id="dense-rows-past-the-length"),
        pytest.param(
            MergeStatesCase(
                num_q_heads=2, head_size=16, num_tokens=1, lse_pairs=(("finite", "-inf"), ("+inf", "high"))
            ),
            ["0 1 +inf (empty) high"],
            id="merged-states",
        ),
    ],
)
def test_what_a_case_is_about_is_drawn(case: Case, words: list[str]) -> None:
    """What a cause hangs on, such as a partial page or an empty sequence, would not be seen."""
    text = "\n".join(drawn(picture(case)))
    squeezed = re.sub(" +", " ", text)  # columns of a table
    for word in words:
        assert max(text.count(word), squeezed.count(word)) == words.count(word)


def test_pages_carry_physical_ids() -> None:
    """Boxes would be titled by position and hide what the block table says."""
    lines = drawn(picture(paged(seq_lens=(5,), pages=Pages(order="reversed"))))
    assert any("page 1 " in line and line.index("page 1") < line.index("page 0") for line in lines if "page 0" in line)


def test_failing_token_is_marked() -> None:
    """The token that the oracle names would look like any other."""
    lines = drawn(
        picture(paged(seq_lens=(5,)), at(details=("token 4 of sequence 0 is dropped",), tokens=((0, 4),), seqs=(0,)))
    )
    assert any("│ ✗···   │" in line for line in lines)
    assert any(line.startswith("seq 0 ✗") for line in lines)
    assert lines[-1] == "token 4 of sequence 0 is dropped"


def test_long_sequences_are_cut_but_keep_the_failing_page() -> None:
    """A sequence of thousands of pages would fill the terminal, or the cut would hide what matters."""
    lines = drawn(picture(paged(seq_lens=(4000,)), at(tokens=((0, 2002),))))
    text = "\n".join(lines)
    assert len(lines) < 60
    assert "██✗█" in text
    assert "page 500 " in text
    assert "490 pages" in text


def test_many_sequences_are_cut_but_keep_the_failing_one() -> None:
    """A batch of hundreds would fill the terminal, or the cut would hide the failing sequence."""
    lines = drawn(picture(paged(seq_lens=(1,) * 300), at(seqs=(200,))))
    assert any(line.startswith("seq 200 ✗") for line in lines)
    assert "... and 283 more sequences" in lines


def test_failing_state_is_marked_and_kept() -> None:
    """The token and head of a merge that fail would not be seen among hundreds."""
    case = MergeStatesCase(num_q_heads=2, head_size=16, num_tokens=200)
    lines = drawn(picture(case, at(rows=((150, 1),))))
    assert any(line.split() == ["150", "1", "finite", "finite", "✗", "fails"] for line in lines)
    assert "... and 367 more pairs" in lines


def test_field_table_lists_defaults_if_asked() -> None:
    """The two fields that a case is about would drown in forty that say nothing, or those could not be seen at all."""
    case = paged(seq_lens=(4,), layout="HND")
    rows = dict(line.split(maxsplit=1) for line in drawn(picture(case)) if " " in line.strip())
    assert rows["layout"] == '"HND"'
    assert "pages.order" not in rows
    rows = dict(
        line.split(maxsplit=1) for line in drawn(picture(paged(seq_lens=(4,)), defaults=True)) if " " in line.strip()
    )
    assert rows["layout"] == '"NHD"'
    assert rows["pages.order"] == '"identity"'
    assert rows["seq_lens"] == "[4]"


def test_a_squeezed_row_keeps_what_fails() -> None:
    """Squeezing many tokens into one cell would lose the failing one."""
    lines = drawn(picture(dense(seq_lens=(128,)), at(tokens=((0, 1),))))
    assert f"│ ✗{'█' * 63} │" in "\n".join(lines)


def test_pages_wrap_at_the_console_width() -> None:
    """Boxes wider than the terminal would be torn apart."""
    lines = [line for line in drawn(picture(paged(seq_lens=(16,))), width=40) if set(line) & set("┌│└")]
    assert len(lines) == 6
    assert max(map(len, lines)) == 12 + 2 * 10


def test_a_case_of_many_parts_is_drawn_at_once() -> None:
    """What is not shown was looked at all the same, which took minutes for a file of a megabyte."""
    pages = paged(seq_lens=(1 << 18,), block_size=1, pages=Pages(shared_blocks=5))
    assert "262132 pages" in "\n".join(drawn(picture(pages)))
    everywhere = at(tokens=tuple((i, 3) for i in range(MOST_PLACES)), seqs=tuple(range(MOST_PLACES)))
    many = paged(seq_lens=(20,) * 20_000, pages=Pages(shared_blocks=2))
    assert sum("✗" in line for line in drawn(picture(many, everywhere))) < 100
    fields: dict[str, Any] = {
        "seq_lens": (7,) * 20_000,
        "query_lens": (1,) * 20_000,
        "num_q_heads": 1,
        "num_kv_heads": 1,
    }
    variant = Variant(window=2, freed_pages=True)
    freed = PagedAttentionCase(head_size=16, scale=0.25, block_size=4, variant=variant, **fields)
    assert "seq 15" in "\n".join(drawn(picture(freed)))
    states = MergeStatesCase(num_q_heads=64, head_size=1, num_tokens=1 << 20)
    assert f"{(64 << 20) - 32} more pairs" in "\n".join(drawn(picture(states)))
