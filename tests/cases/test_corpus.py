"""Saved cases, those that older versions wrote among them, and solutions of FlashInfer-Bench."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.corpus import (
    FindingRecord,
    Regression,
    RegressionError,
    current_environment,
    decode_regression,
    encode_regression,
    load_regression,
    regression_files,
    regression_name,
    write_regression,
)
from attnfuzz.corpus.reading import MAX_FILE_BYTES
from attnfuzz.corpus.solution import SolutionError, load_solution, unpack
from attnfuzz.own_files import OwnFolder
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.recipes import Pages
from attnfuzz.untrusted_text import printable
from attnfuzz.verdict import Failure, SourceLine
from tests.common.solutions import a_solution, write_solution
from tests.sample_cases import paged_case

FAILURE = Failure(oracle="accuracy", kind="out:value", message="element (0, 0, 0) is wrong", details=("got 1.0",))


def a_regression(**changes: Any) -> Regression:
    fields: dict[str, Any] = {
        "problem": "dense_decode",
        "kernel": "my_kernels.py:my_decode",
        "case": DenseDecodeCase(num_q_heads=2, head_size=16, num_kv_heads=1, seq_lens=(3, 1), scale=0.25),
        "finding": FindingRecord.of(FAILURE, frozenset({"gqa_ratio>1", "ragged"})),
        "environment": current_environment("cpu"),
    }
    return Regression(**{**fields, **changes})


def as_document(regression: Regression) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encode_regression(regression))
    return document


def read_document(document: object) -> Regression:
    return decode_regression(json.dumps(document).encode(), "file.json")


def set_at(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    inner = document
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return document


SOURCES = (SourceLine(file="k.py", line=41, text="qk = tl.sum(q * k, 1)"), SourceLine(file="other.py", line=2))
CASES = tuple(DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(n,), scale=0.25) for n in (1, 2))


@pytest.mark.parametrize(
    ("changes", "place", "rare"),
    [
        ({"note": "see the tracker", "status": "fixed"}, "status", ()),
        (
            {"finding": FindingRecord.of(msgspec.structs.replace(FAILURE, sources=SOURCES))},
            "finding",
            ("sources", "cause"),
        ),
        ({"finding": FindingRecord.of(FAILURE, failed=3, runs=20)}, "finding", ("failed", "runs")),
        ({"preceding": CASES}, "", ("preceding",)),
        ({"issue": "https://example.org/issues/12#comment"}, "", ("issue",)),
    ],
    ids=["plain", "lines of a cause", "the rate of a flaky one", "cases before it", "its issue"],
)
def test_a_regression_survives_a_round_trip(
    changes: dict[str, Any], place: str, rare: tuple[str, ...], tmp_path: Path
) -> None:
    """A saved case would replay another bug, or pass alone; and older versions could read no new file."""
    regression = a_regression(**changes)
    path = write_regression(regression, tmp_path / "deep" / "folder")
    assert load_regression(path) == regression
    plain = as_document(a_regression())
    assert not set(rare) & set(plain[place] if place else plain), "left out where there is nothing to say"


def test_the_file_has_the_documented_fields_in_order() -> None:
    """Other tools read these names, and reviewers read the file from the top."""
    document = as_document(a_regression())
    assert list(document) == ["format", "problem", "kernel", "case", "finding", "status", "note", "environment"]
    assert document["format"] == "attnfuzz.regression/1"
    assert document["status"] == "open"
    assert document["finding"]["features"] == ["gqa_ratio>1", "ragged"]
    assert set(document["environment"]) == {"versions", "device", "date"}


def test_encoding_is_indented_and_deterministic() -> None:
    """Unstable bytes would show as changes in every review."""
    data = encode_regression(a_regression())
    assert data == encode_regression(a_regression())
    assert b'\n  "problem": "dense_decode",\n' in data
    assert data.endswith(b"}\n")


def test_the_name_tells_problem_kernel_and_oracle() -> None:
    """File names are a fixed format, and must be safe whatever the kernel's target looks like."""
    name = regression_name(a_regression(kernel="/some dir/my-kernels.py:my_decode"))
    assert name.startswith("dense_decode-my_decode-accuracy-")
    assert len(name.removesuffix(".json").rpartition("-")[2]) == 8


def test_the_name_depends_on_case_and_kernel_only() -> None:
    """Two cases under one name would overwrite each other; a new date must not make a new file."""
    base = regression_name(a_regression())
    other_case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(3, 1), scale=0.25)
    assert regression_name(a_regression(note="x", status="fixed")) == base
    assert regression_name(a_regression(case=other_case)) != base
    assert regression_name(a_regression(kernel="other.py:my_decode")) != base


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("case.seq_lens", [1, -2], ["seq_lens[1]=-2", "$.case", "between 0 and"]),
        ("case.num_q_heads", "two", ["Expected `int`", '"two"', "$.case.num_q_heads"]),
        ("case.tile", 3, ["unknown field `tile`", "$.case", "remove that field"]),
        ("case.seq_lens", [100, "x"], ["Expected `int`", '"x"', "$.case.seq_lens[1]"]),
        ("severity", 3, ["unknown field `severity`", "remove that field"]),
        ("problem", "prefill", ["'prefill'", "$.problem", "paged_decode, dense_decode"]),
        ("finding.oracle", "a psychic", ['"a psychic"', "$.finding.oracle"]),
        ("status", "maybe", ["'maybe'", "$.status"]),
        ("kernel", 5, ["Expected `str`", "found 5", "$.kernel"]),
        ("case", [], ["Expected `object`", "$.case"]),
        ("format", "attnfuzz.regression/2", ["attnfuzz.regression/2", "newer attnfuzz", "upgrade"]),
        ("format", "something", ['"something"', "$.format", "attnfuzz.regression/1"]),
        ("format", None, ["null", "$.format"]),
        ("preceding", [{"num_q_heads": 1}], ["missing required field", "$.preceding[0]"]),
        ("preceding", 3, ["Expected `array`", "found 3", "$.preceding"]),
        ("preceding", [{}] * 65, ["65 cases", "at most 64", "$.preceding"]),
        ("finding.failed", 2, ["failed=2", "runs=0", "$.finding"]),
        ("finding.runs", "many", ["Expected `int`", '"many"', "$.finding.runs"]),
        ("finding.sources", [{"file": "k.py", "line": 0}], ["$.finding.sources[0].line"]),
        *(
            ("issue", hostile, ["at `$.issue`; give the address of the issue"])
            for hostile in ("javascript:alert(1)", "https://a b", "https://a\x1b[2J", "https://a\n", "12")
        ),
    ],
)
def test_what_is_wrong_is_named_with_file_path_and_value(path: str, value: object, words: list[str]) -> None:
    """A vague error sends the user looking through the JSON by hand."""
    with pytest.raises(RegressionError) as caught:
        read_document(set_at(as_document(a_regression()), path, value))
    message = str(caught.value)
    assert message.startswith("file.json")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("field", ["format", "problem", "kernel", "case", "finding"])
def test_a_missing_field_is_named(field: str) -> None:
    """A file cut by hand must not be read as if the rest had defaults."""
    document = as_document(a_regression())
    del document[field]
    with pytest.raises(RegressionError, match=field):
        read_document(document)


@pytest.mark.parametrize(
    "data", [b"", b'{"format": "attnfuzz.re', b"\xff\xfe", b"[" * 200_000, b"[]", b'"text"', b'{"a": NaN}']
)
def test_damaged_json_is_one_sentence(data: bytes) -> None:
    """A truncated or binary file must not end in a traceback."""
    with pytest.raises(RegressionError, match=r"^file\.json"):
        decode_regression(data, "file.json")


@pytest.mark.parametrize("kernel", ["paged_*", "*", "", "kernels.py:mine_?", "kernels:", "kernels:[am]ine"])
def test_a_kernel_that_may_be_several_is_refused(kernel: str) -> None:
    """Any one of them would be run for the one that the case failed on, and be called repaired."""
    with pytest.raises(
        RegressionError, match=r"^file\.json: .* may stand for several kernels, .*at `\$\.kernel`; name"
    ):
        read_document({**as_document(a_regression()), "kernel": kernel})


@pytest.mark.parametrize("kernel", ["paged_naive", "my [1] kernels/a*.py:mine", "kernels.mine:mine", "kernels.py"])
def test_a_kernel_of_any_place_is_read(kernel: str) -> None:
    """A folder's name may hold what would be a glob in a kernel's."""
    assert read_document({**as_document(a_regression()), "kernel": kernel}).kernel == kernel


@pytest.mark.parametrize("place", ["case", "preceding"])
def test_a_case_of_ten_terabytes_is_refused_before_it_is_built(place: str) -> None:
    """Loading a file from a stranger must not fill the machine, whichever of its cases that takes."""
    document = as_document(a_regression(preceding=CASES))
    case = document["case"] if place == "case" else document["preceding"][1]
    case |= {"seq_lens": [1 << 24], "num_q_heads": 1024, "num_kv_heads": 1024, "head_size": 1024}
    with pytest.raises(RegressionError, match=rf"TiB.*limit is 1 GiB.*\$\.{place}"):
        read_document(document)


def test_lists_of_all_cases_count_together() -> None:
    """Each of 64 cases would pass alone, and all of them are held at once."""
    case = paged_case(head_size=8, scale=1.0, block_size=16, seq_lens=(1,) * 256, pages=Pages(extra_columns=8192))
    document = as_document(a_regression(problem="paged_decode", case=case))
    read_document(document | {"preceding": [document["case"]] * 2})
    with pytest.raises(RegressionError, match=r"take 1\d\d MiB as lists .* or leave out preceding cases"):
        read_document(document | {"preceding": [document["case"]] * 4})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("case.options", {f"o{i}": i for i in range(257)}),
        ("finding.details", ["a detail"] * 257),
        ("finding.features", [f"f{i}" for i in range(257)]),
        ("finding.sources", [{"file": "k.py", "line": 1}] * 257),
        ("environment.versions", {f"v{i}": "1" for i in range(257)}),
    ],
)
def test_more_entries_than_anybody_reads_are_refused(path: str, value: object) -> None:
    """Each becomes a line of a table, and 100,000 of them took minutes to show."""
    with pytest.raises(RegressionError, match=rf"257 entries, of at most 256 - at `\$\.{path}`; shorten the list"):
        read_document(set_at(as_document(a_regression()), path, value))


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    """A full disk or a crash in the middle must not leave half a regression."""
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        OwnFolder(tmp_path).write(path.name, "text instead of bytes")  # type: ignore[arg-type]  # a broken caller's
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_can_be_read_by_others(tmp_path: Path) -> None:
    """mkstemp makes files that only the owner may read; a shared checkout needs the ordinary mode."""
    path = write_regression(a_regression(), tmp_path)
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_folders_stand_for_their_json_files(tmp_path: Path) -> None:
    """Replaying a folder must take every regression in it once, and nothing else."""
    for name in ("b.json", "a.json", "README.md"):
        (tmp_path / name).touch()
    files = regression_files([tmp_path / "b.json", tmp_path])
    assert [path.name for path in files] == ["b.json", "a.json"]
    for name in ("none.json", "a" * 300):  # reading them says what is wrong
        assert regression_files([tmp_path / name]) == [tmp_path / name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe.json", "cannot be read (it is a named pipe, no file); give a regression file"),
        ("device.json", "cannot be read (it is a device, no file); give a regression file"),
        ("folder.json", "cannot be read (it is a folder, no file); give a regression file"),
        ("loop.json", "cannot be read (Too many levels of symbolic links); give a regression file"),
        ("a" * 300, "cannot be read (File name too long); give a regression file"),
        ("none.json", "does not exist; give the path of a regression file or of a folder of them"),
        ("large.json", f"cannot be read (larger than {MAX_FILE_BYTES} bytes); give a regression file"),
        ("nul\0.json", "does not exist; give the path of a regression file or of a folder of them"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, reason: str) -> None:
    """A named pipe among regressions held every command up, and names that no file can have ended in tracebacks."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "large.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(RegressionError, match=re.escape(f"{printable(str(tmp_path / name))} {reason}")):
        load_regression(tmp_path / name)


ROOT = Path(__file__).parents[2]
WRITTEN_BEFORE = sorted((Path(__file__).parent / "formats").glob("regression-*.json"))
"""As written by the attnfuzz of the day in the name. Files are added when the format grows, and never changed."""


def lost(before: Any, after: Any, place: str = "$") -> list[str]:
    """Where ``after`` does not say what ``before`` says."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [one for key in before for one in lost(before[key], after.get(key), f"{place}.{key}")]
    return [] if before == after else [place]


@pytest.mark.parametrize("path", WRITTEN_BEFORE, ids=lambda path: path.stem)
def test_what_older_versions_wrote_is_read(path: Path) -> None:
    """A saved case that cannot be read, or has lost a part, protects nobody any more."""
    data = path.read_bytes()
    read = decode_regression(data, path.name)
    written = encode_regression(read)
    assert lost(json.loads(data), json.loads(written)) == []
    assert decode_regression(written, path.name) == read


def test_files_of_the_past_say_all_that_a_regression_can() -> None:
    """A field that none of them has could be renamed unnoticed."""
    documents = [json.loads(path.read_bytes()) for path in WRITTEN_BEFORE]
    said = {key for document in documents for key in document}
    assert said >= {"preceding", "assumed", "assumed_numerics", "fields", "finding", "status", "note", "environment"}
    said = {key for document in documents for key in document["finding"]}
    assert said >= {"failed", "runs", "tensor", "cause", "maybe", "blame", "also", "remedy"}


def test_every_format_has_its_promise() -> None:
    """Whoever keeps a file could not know for how long."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "attnfuzz").rglob("*.py")))
    named = set(re.findall(r"attnfuzz\.[a-z-]+/\d+", source)) | {"attnfuzz.regression/1"}
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    promised = re.findall(r"`(attnfuzz\.[a-z-]+/\d+)`", page)
    assert sorted(promised) == sorted(named)


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
