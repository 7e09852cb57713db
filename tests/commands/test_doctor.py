"""What is installed, and what doctor says of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from attnfuzz import doctor, environment
from attnfuzz.doctor import Line, examine
from attnfuzz.environment import installed, interpreter_problem, version_numbers


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    return {line.name: line for line in examine()}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the process that looks for one."""
    monkeypatch.setattr(doctor, "_probe", lambda what, **_: {"cuda": False, "works": what == "interpreter"})


def find(name: str) -> Line:
    """One line of a fresh examination, none of the later ones being made."""
    return next(line for line in examine() if line.name == name)


@pytest.mark.night
def test_this_machine_is_fit(lines: dict[str, Line]) -> None:
    """The machine that passes the tests would be called unfit, or a part not be examined."""
    assert set(lines) == {
        "python", "torch", "triton", "numpy", "hypothesis", "device", "interpreter", "kernel cache", "addresses",
        "faults", "executor",
    }  # fmt: skip
    assert [line for line in lines.values() if line.status == "problem"] == []


@pytest.mark.usefixtures("no_gpu")
def test_want_of_addresses_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know why an oracle never objects where the system counts addresses as memory."""
    monkeypatch.setattr(doctor, "why_unavailable", lambda: "the system gives no 64 GiB of addresses; allow it")
    line = find("addresses")
    assert (line.status, line.remedy) == ("note", "allow it")
    assert line.text == "the system gives no 64 GiB of addresses: the oracle page_relocation judges no case"


@pytest.mark.usefixtures("no_gpu")
def test_unknown_faults_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know why accesses outside are never found."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    line = find("faults")
    assert (line.status, line.remedy) == ("note", "run it on such a machine")
    assert line.text == (
        "what a process died of is known on Linux on x86-64 only, not on linux on riscv64: "
        "the oracle guard_page judges no case"
    )


@pytest.mark.usefixtures("no_gpu")
def test_executor_is_restarted() -> None:
    """The cost of a crash, which decides how fast a crashing kernel is shrunk, would not be told."""
    assert find("executor").text.startswith("restarts in ")


def test_old_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported version would be accepted, or refused without a remedy."""
    monkeypatch.setattr(doctor, "installed", {"torch": "2.9.1"}.get)
    assert find("torch") == Line("torch", "problem", "2.9.1 is older than 2.11", 'pip install "torch>=2.11"')


def test_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package would end the report with a traceback."""
    monkeypatch.setattr(doctor, "installed", {"torch": "2.13.0"}.get)
    assert find("hypothesis").text == "not installed"


def test_nothing_is_started_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line that matters would drown in errors that follow from it."""
    monkeypatch.setattr(doctor, "installed", {}.get)
    assert [line.name for line in examine()] == ["python", "torch", "triton", "numpy", "hypothesis"]


@pytest.mark.usefixtures("no_gpu")
def test_interpreter_problem_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 with NumPy 2.4 would show as an obscure TypeError of a kernel."""
    monkeypatch.setattr(environment, "installed", {"triton": "3.6.0", "numpy": "2.4.1"}.get)
    line = find("interpreter")
    assert line.status == "problem"
    assert line.remedy.startswith('pip install "numpy<2.4"')


@pytest.mark.usefixtures("no_gpu")
def test_unwritable_cache_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels could not be compiled, and the reason would only show in a traceback."""
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked / "cache"))
    line = find("kernel cache")
    assert (line.status, line.remedy) == ("problem", "set TRITON_CACHE_DIR to a folder that can")


def test_failing_probe_shows_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason why torch cannot be loaded would be lost."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find("device").text == "ImportError: libcudart.so.13 is missing"


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
