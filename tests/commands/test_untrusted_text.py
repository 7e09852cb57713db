"""What kernels and files say, made safe, and errors of attnfuzz itself in a sentence."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnfuzz.internal_errors import gpu_memory_ran_out, in_one_sentence
from attnfuzz.untrusted_text import (
    DETAILS_BYTES,
    TEXT_BYTES,
    Frame,
    check_text,
    code_line,
    only_printable,
    printable,
    printable_lines,
    text_of,
)
from attnfuzz.verdict import Failure

ANY_TEXT = st.text(st.characters(), max_size=200) | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl"]))


@settings(deadline=None)
@given(text=ANY_TEXT, times=st.sampled_from([1, 50, 9_000]), lines=st.booleans())
def test_any_text_becomes_fit_to_be_shown(text: str, times: int, lines: bool) -> None:
    """A terminal, a page or a file of JSON would get what it obeys or refuses, or more than a reader can take."""
    shown = printable(text * times, lines=lines)
    assert len(shown.encode()) <= TEXT_BYTES
    assert {unicodedata.category(one) for one in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"} <= ({"Cc"} if lines else set())
    assert set(shown) & {"\r", "\x1b", "\t"} == set()
    assert printable(shown, lines=lines) == shown


@settings(deadline=None)
@given(lines=st.lists(ANY_TEXT, max_size=40), times=st.sampled_from([1, 300]))
def test_any_lines_become_fit_to_be_shown(lines: list[str], times: int) -> None:
    """As above, of all that follows a message; cleaned again on its way, what is shown would not be what is saved."""
    shown = printable_lines(lines * times)
    assert sum(len(line.encode()) + 1 for line in shown) <= DETAILS_BYTES
    assert not any("\n" in line for line in shown)
    assert printable_lines(shown) == shown


def test_ordinary_words_stay_as_they_are() -> None:
    """A path, a formula or a name in another alphabet could not be read any more."""
    for text in ("/home/zoë/ядро.py:3, in λ", "out × 2 ≤ 3 µs", r"C:\kernels\mine.py", ""):
        assert printable(text) == text
    assert printable("a\tb\r\nc", lines=True) == "a    b\nc"
    assert printable("a\nb") == r"a\nb"


def test_what_is_left_out_is_counted() -> None:
    """A reader would take the part for the whole."""
    shown = printable("begins " + "x" * 50_000_000 + " ends")
    assert shown.startswith("begins x")
    assert shown.endswith("x ends")
    (left_out,) = re.findall(r"\((\d+) characters left out\)", shown)
    assert int(left_out) + shown.count("x") == 50_000_000
    lines = printable_lines(f"line {i}" for i in range(100_000))
    assert (lines[0], lines[-1]) == ("line 0", "line 99999")
    assert f"... ({100_000 - len(lines) + 1} lines left out)" in lines


def test_a_failure_is_clean_wherever_it_comes_from() -> None:
    """What an executor sends, in which the kernel runs, would not be cleaned by whoever reads it."""
    dirty: dict[str, Any] = {
        "oracle": "exception",
        "kind": "\x1b[2J",
        "message": "a\nb\x00",
        "details": ["c\nd", "\u202e"],
    }
    for failure in (Failure(**dirty), msgspec.json.decode(msgspec.json.encode(dirty), type=Failure)):
        assert (failure.kind, failure.message) == (r"\x1b[2J", r"a\nb\x00")
        assert failure.details == ("c", "d", r"\u202e")
        assert msgspec.structs.replace(failure, message="\x07").message == r"\x07"


def test_an_exception_that_refuses_to_say_anything_is_named() -> None:
    """Its text is asked for while a verdict is written, which would be lost."""

    class Mute(Exception):  # noqa: N818 - it is none of ours
        def __str__(self) -> str:
            raise SystemExit(3)

    assert text_of(Mute()) == "(asked for its text, it raised SystemExit)"


def test_identities_are_refused_not_changed() -> None:
    """Two kernels, or two options, would become one."""
    check_text("name", "mine")
    for wrong in ("\x1b", "x" * 201, 7, "a\nb"):
        with pytest.raises(ValueError, match=r"name=.* must be text of at most 200 bytes without control characters"):
            check_text("name", wrong)


def test_only_files_of_source_are_looked_at(tmp_path: Path) -> None:
    """A process that prints a stack of its own making could have the driver read a device for ever."""
    source = tmp_path / "a.py"
    source.write_text("first\n  second \x1b[2J\n", encoding="utf-8")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sparse = tmp_path / "sparse.py"
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
    assert code_line(str(source), 2) == r"second \x1b[2J"
    assert Frame(str(source), 1, "f").with_source() == f"{source}:1, in f: first"
    for path in (pipe, sparse, tmp_path, "/dev/zero", "/proc/self/maps", "/no/such", "nul\x00", "\ud800"):
        assert code_line(str(path), 1) == ""


def test_a_statement_is_told_to_its_end_if_that_is_near(tmp_path: Path) -> None:
    """Of `block = tl.load(` nobody could tell what is loaded, and a launch would be told with all its arguments."""
    load, launch = "block = tl.load(\n    table + i\n).to(tl.int64)\n", "kernel[grid](\n" + "    x,\n" * 9 + ")\n"
    source = tmp_path / "a.py"
    source.write_text(load + launch, encoding="utf-8")
    assert code_line(str(source), 1) == "block = tl.load(table + i).to(tl.int64)"
    assert code_line(str(source), 4) == "kernel[grid](..."


def test_text_of_any_length_keeps_its_lines() -> None:
    """A whole file, such as a script, would lose its middle or its line ends."""
    assert only_printable("a\x1b\n" * 5_000) == "a\\x1b\n" * 5_000


TORCH_ERROR = """Traceback (most recent call last):
  File "worker.py", line 3, in main
    x = torch.empty(1, device="cuda")
        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
torch.AcceleratorError: CUDA error: {words}
Search for `{name}' in https://docs.nvidia.com/cuda/ for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_the_sentence_is_the_error_and_not_the_advice_that_torch_appends() -> None:
    """Every CUDA error would be told as "Compile with `TORCH_USE_CUDA_DSA`"."""
    text = TORCH_ERROR.format(words="invalid argument", name="cudaErrorInvalidValue")
    assert in_one_sentence(text).startswith(
        "attnfuzz itself failed: torch.AcceleratorError: CUDA error: invalid argument"
    )


def test_a_bare_error_of_one_line_is_the_sentence() -> None:
    """A file would be named that says no more."""
    assert in_one_sentence("no space left\n") == "no space left"


@pytest.mark.parametrize(
    "text",
    [
        TORCH_ERROR.format(words="out of memory", name="cudaErrorMemoryAllocation"),
        "the service raised in the executor:\n" + TORCH_ERROR.format(words="out of memory", name="cudaErrorMemory..."),
        "paged_naive on {} cannot be judged: CUDA out of memory. Tried to allocate 126.00 MiB. GPU 0 has a total ...",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "HIP out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_full_gpu_is_told_as_such(text: str) -> None:
    """A user would be asked to report as a bug of attnfuzz what somebody else's process does to the GPU."""
    assert gpu_memory_ran_out(text)
    sentence = in_one_sentence(text)
    assert sentence.startswith("the GPU has no memory left (")
    assert "report" not in sentence
    assert "\n" not in sentence


def test_other_errors_of_a_gpu_are_not_taken_for_a_full_one() -> None:
    """A lost GPU would be told as one without memory."""
    assert not gpu_memory_ran_out("CUDA error: an illegal memory access was encountered")
