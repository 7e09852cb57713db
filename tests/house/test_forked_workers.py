"""tests/forked_workers.py: tests in processes that are forked once everything is collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = os.fspath(Path(__file__).parents[2])
_COLLECTED_ONCE = """
    import os
    import pytest
    with open("imports", "a") as file:
        file.write(__name__ + "\\n")

    @pytest.fixture(scope="module")
    def process():
        yield os.getpid()
        print("process is taken down")
"""
_A = (
    _COLLECTED_ONCE
    + """
    def test_prints(process, tmp_path, capfd):
        os.system("echo heard")
        assert capfd.readouterr().out == "heard\\n"
        (tmp_path / "mine").touch()

    def test_dies(process):
        os._exit(3)

    def test_follows(process):
        assert process == os.getpid()

    def test_is_wrong(process):
        print("what it says")
        assert process is None
"""
)
_B = (
    _COLLECTED_ONCE
    + """
    @pytest.mark.skip(reason="not here")
    def test_is_left_out(): ...

    @pytest.mark.xfail(strict=True)
    def test_is_expected(): raise OSError

    def test_is_right(process): ...
"""
)


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(test_a=_A, test_b=_B)
    monkeypatch.syspath_prepend(_ROOT)  # pytester has a process of its own import it from there
    return pytester.runpytest_subprocess("-p", "tests.forked_workers", "--forks", "2", *arguments)


def test_each_outcome_is_told_once(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` would pass though a test failed, or died, or was never run."""
    ran = run(pytester, monkeypatch)
    ran.assert_outcomes(passed=3, failed=2, skipped=1, xfailed=1)
    assert ran.ret == 1
    ran.stdout.fnmatch_lines_random(
        [
            "*the test's process ended with status 3*",
            "FAILED test_a.py::test_dies*",
            "FAILED test_a.py::test_is_wrong*",
            "what it says",
            "process is taken down",
        ]
    )
    assert sorted((pytester.path / "imports").read_text().split()) == ["test_a", "test_b"]


def test_enough_failures_end_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-x` would run on for minutes."""
    ran = run(pytester, monkeypatch, "-x", "test_a.py")
    ran.assert_outcomes(passed=1, failed=1)
    ran.stdout.fnmatch_lines(["*stopping after 1 failures*"])


def test_what_cannot_be_collected_is_an_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a file with a mistake would be missing unnoticed."""
    pytester.makepyfile(test_c="import nothing_of_that_name")
    ran = run(pytester, monkeypatch)
    ran.assert_outcomes(errors=1)
    assert ran.ret == pytest.ExitCode.INTERRUPTED
