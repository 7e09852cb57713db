"""Solution files of FlashInfer-Bench: what is taken, what is refused, and where the sources go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnfuzz.corpus.solution import SolutionError, load_solution, unpack
from tests.unit.solutions import a_solution, write_solution


def with_path(path: str) -> dict[str, Any]:
    solution = a_solution()
    solution["sources"].append({"path": path, "content": "raise SystemExit('run')"})
    return solution


def test_sources_are_written_as_they_are_and_nothing_runs(tmp_path: Path) -> None:
    """Loading a stranger's file would execute it, or the kernel be another one."""
    solution = a_solution("raise SystemExit('run')\r\n")
    target = unpack(load_solution(write_solution(tmp_path, solution)), tmp_path)
    assert target == f"{tmp_path / 'solution.py'}:solution"
    written = (tmp_path / "solution_sources" / "src" / "main.py").read_bytes()
    assert written == b"raise SystemExit('run')\r\n"
    kernel_file = (tmp_path / "solution.py").read_text()
    compile(kernel_file, "solution.py", "exec")
    assert "module='solution_sources.src.main'" in kernel_file
    assert "name='a_decode_kernel'" in kernel_file


@pytest.mark.parametrize(
    "path",
    [
        "../out.py", "a/../../out.py", "/tmp/out.py", "a//b.py", "./a.py", "a/", "a\\b.py", "a\0b.py", "ä.py",
        "C:/a.py", "a" * 201, "/".join("a" * 17), "",
    ],
)  # fmt: skip
def test_a_path_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    """A stranger's file would be written over another one."""
    with pytest.raises(SolutionError):
        load_solution(write_solution(tmp_path, with_path(path)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"definition": "gqa_paged_decode_h4_kv3_d64_ps1"}, "no multiple of its KV heads"),
        ({"definition": "mla_paged_decode_h16_ckv512_kpe64_ps1"}, "is none that attnfuzz knows"),
        ({"definition": "gqa_paged_decode_h0_kv1_d64_ps1"}, "is none that attnfuzz knows"),
        ({"spec": {"language": "cuda"}}, "spec.language='cuda' must be one of python, triton"),
        ({"spec": {"entry_point": "main.py::run"}}, "names a file that is not among the sources"),
        ({"spec": {"entry_point": "src/main.py::run()"}}, "must read file.py::function"),
        ({"spec": {"entry_point": "src/main.py"}}, "must read file.py::function"),
        ({"spec": {"destination_passing_style": "yes"}}, "Expected `bool`"),
        ({"sources": []}, "length >= 1"),
        ({"sources": [{"path": "src/main.py", "content": 1}]}, "Expected `str`"),
        ({"name": ""}, "length >= 1"),
    ],
)
def test_what_is_not_known_is_one_sentence(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A kernel of another problem would be judged as attention, or a mistake in a file be a traceback."""
    with pytest.raises(SolutionError, match=r"^solution '") as raised:
        load_solution(write_solution(tmp_path, a_solution(**changes)))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_stand_beside_each_other_are_refused(tmp_path: Path) -> None:
    """One would take the other's place."""
    for path, words in (("src/main.py", "twice"), ("src/main.py/x.py", "as a folder")):
        with pytest.raises(SolutionError, match=words):
            load_solution(write_solution(tmp_path, with_path(path)))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'"\\ud800"', b"[" * 100_000, b"{}", b"null"])
def test_a_file_that_is_no_solution_is_one_sentence(data: bytes, tmp_path: Path) -> None:
    """A hostile file would end the command in a traceback."""
    file = tmp_path / "solution.json"
    file.write_bytes(data)
    with pytest.raises(SolutionError, match=r"^solution '"):
        load_solution(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Its sources would fill the disk."""
    solution = a_solution()
    solution["sources"].append({"path": "data.txt", "content": "x" * (5 << 20)})
    with pytest.raises(SolutionError, match="larger than"):
        load_solution(write_solution(tmp_path, solution))
    with pytest.raises(SolutionError, match="cannot be read"):
        load_solution(tmp_path / "nowhere.json")


def test_fields_that_are_not_looked_at_do_no_harm(tmp_path: Path) -> None:
    """Files of a newer FlashInfer-Bench would be refused."""
    solution = a_solution(description=None, extra={"a": [1]})
    solution["spec"]["binding"] = None
    assert load_solution(write_solution(tmp_path, solution)).definition == solution["definition"]
