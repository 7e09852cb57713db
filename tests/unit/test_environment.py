"""Versions that cannot work together: attnfuzz.environment."""

from importlib.metadata import PackageNotFoundError

import pytest

from attnfuzz import environment
from attnfuzz.environment import installed, interpreter_problem, version_numbers


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    pretended: dict[str, str | None] = {}
    monkeypatch.setattr(environment, "installed", pretended.get)
    return pretended


@pytest.mark.parametrize(
    ("triton", "numpy", "broken"),
    [
        ("3.6.0", "2.4.0", True),
        ("3.6.0", "2.4.6", True),
        ("3.6.0+git1234", "2.10.1", True),
        ("3.6.0", "2.3.5", False),
        ("3.7.1", "2.4.6", False),
        (None, "2.4.6", True),
        ("3.6.0", None, False),
    ],
)
def test_interpreter_problem(
    versions: dict[str, str | None], triton: str | None, numpy: str | None, broken: bool
) -> None:
    """The pair that cannot interpret kernels would go unnoticed, or a good pair be refused."""
    versions.update(triton=triton, numpy=numpy)
    assert (interpreter_problem() is not None) is broken


def test_interpreter_problem_names_versions_and_remedy(versions: dict[str, str | None]) -> None:
    """A user would be told that something is wrong, but not what to do."""
    versions.update(triton="3.6.0", numpy="2.4.1")
    problem = interpreter_problem()
    assert problem is not None
    for part in ("3.6.0", "2.4.1", 'pip install "numpy<2.4"', "Triton 3.7"):
        assert part in problem


def test_triton_is_found_under_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with an AMD GPU Triton would count as missing, and the remedy overwrite the one that works."""

    def version(name: str) -> str:
        if name != "triton-rocm":
            raise PackageNotFoundError
        return "3.7.1"

    monkeypatch.setattr(environment, "version", version)
    monkeypatch.setattr(environment, "installed", installed.__wrapped__)
    assert environment.installed("triton") == "3.7.1"
    assert environment.installed("torch") is None


def test_a_missing_triton_is_told_with_its_remedy(versions: dict[str, str | None]) -> None:
    """Since torch for the CPU brings none, this is what a user meets who installs no more than that."""
    versions.update(triton=None, numpy="2.4.1")
    assert "not installed" in (interpreter_problem() or "")
    assert "pip install 'attnfuzz[interpreter]'" in (interpreter_problem() or "")


def test_installed_finds_versions_without_importing() -> None:
    """A missing package would raise, or an installed one not be found."""
    assert installed("pytest") == pytest.__version__
    assert installed("no-such-package") is None


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("3.6", (3, 6)), ("2.11.0a0+git1", (2, 11, 0)), ("unknown", ())]
)
def test_version_numbers(text: str, numbers: tuple[int, ...]) -> None:
    """Local and nightly versions would be compared wrongly."""
    assert version_numbers(text) == numbers
