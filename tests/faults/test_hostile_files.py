"""Files from strangers: what a saved case, a state or a server names runs only where it is the project's own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz import declaration
from attnfuzz.campaign.saved.replay import SavedCase, load_named
from attnfuzz.campaign.saved.state import AskedOf, CampaignState
from attnfuzz.corpus import write_regression
from attnfuzz.declaration import KernelLoadError
from attnfuzz.judging.runner import Runner
from tests.common import sanitizer_stand_in
from tests.common.saved_findings import a_finding

CLONE = Path(__file__).parents[2]
HONEST = """
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode")
def mine(inputs):
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
"""
# Found once a file is imported that nobody asked for.
EVIL = """
from pathlib import Path

Path({marker!r}).touch()
"""

Attack = Callable[[Path, Path, str], str]
"""Prepares a folder around a project, given both and the evil text, and returns the name of the kernel."""


def absolute(outside: Path, project: Path, evil: str) -> str:
    (outside / "evil.py").write_text(evil)
    return f"{outside / 'evil.py'}:mine"


def dots(outside: Path, project: Path, evil: str) -> str:
    absolute(outside, project, evil)
    return "../outside/evil.py:mine"


def dots_within_the_name(outside: Path, project: Path, evil: str) -> str:
    absolute(outside, project, evil)
    return "regressions/../../outside/evil.py:mine"


def linked_file(outside: Path, project: Path, evil: str) -> str:
    absolute(outside, project, evil)
    (project / "linked.py").symlink_to(outside / "evil.py")
    return "linked.py:mine"


def linked_folder(outside: Path, project: Path, evil: str) -> str:
    absolute(outside, project, evil)
    (project / "vendored").symlink_to(outside)
    return "vendored/evil.py:mine"


def module(outside: Path, project: Path, evil: str) -> str:
    (outside / "library_one.py").write_text(evil)
    return "library_one:mine"


def module_without_a_name(outside: Path, project: Path, evil: str) -> str:
    (outside / "library_two").mkdir()
    (outside / "library_two" / "__init__.py").write_text(evil)
    (outside / "library_two" / "kernels.py").write_text(HONEST)
    return "library_two.kernels"


def package_around_it(outside: Path, project: Path, evil: str) -> str:
    """The module lies in the project, the package that is imported before it does not."""
    (outside / "library_three").mkdir()
    (outside / "library_three" / "__init__.py").write_text(f"{evil}\n__path__.append({str(project / 'parts')!r})\n")
    (project / "parts").mkdir()
    (project / "parts" / "decode.py").write_text(HONEST)
    return "library_three.decode:mine"


def folder_without_init(outside: Path, project: Path, evil: str) -> str:
    (outside / "library_four").mkdir()
    (outside / "library_four" / "decode.py").write_text(evil)
    return "library_four.decode:mine"


def linked_package(outside: Path, project: Path, evil: str) -> str:
    (outside / "library_five").mkdir()
    (outside / "library_five" / "__init__.py").write_text(evil)
    (project / "linked_package").symlink_to(outside / "library_five")
    return "linked_package:mine"


def of_python_itself(outside: Path, project: Path, evil: str) -> str:
    """Importing antigravity starts a browser, which is the one that BROWSER names: here another program."""
    browser = outside / "browser"
    browser.write_text(f"#!{sys.executable}\n{evil}")
    browser.chmod(0o755)
    return "antigravity:mine"


def installed_in_the_project(outside: Path, project: Path, evil: str) -> str:
    folder = project / ".venv" / "lib" / "python3" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(evil)
    return f"{folder.relative_to(project)}/evil.py:mine"


def open_to_all(outside: Path, project: Path, evil: str) -> str:
    folder = project / "dropbox"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "evil.py").write_text(evil)
    return "dropbox/evil.py:mine"


def planted_above(outside: Path, project: Path, evil: str) -> str:
    (project.parent / "planted.py").write_text(evil)
    return "planted.py:mine"


ATTACKS: tuple[Attack, ...] = (
    absolute, dots, dots_within_the_name, linked_file, linked_folder, module, module_without_a_name, package_around_it,
    folder_without_init, linked_package, of_python_itself, installed_in_the_project, open_to_all, planted_above,
)  # fmt: skip


class Place:
    """A project with a kernel of its own, and a folder of somebody else's beside it, which is on Python's path."""

    def __init__(self, folder: Path) -> None:
        self.markers = folder / "markers"
        self.project, self.outside = folder / "project", folder / "outside"
        for made in (self.markers, self.project / "regressions", self.outside):
            made.mkdir(parents=True)
        (self.project / "mine.py").write_text(HONEST)
        (self.project / "pyproject.toml").write_text('[tool.attnfuzz]\nregressions = "regressions"\n')

    def prepare(self, attack: Attack) -> str:
        """What the attack has a file name."""
        evil = EVIL.format(marker=str(self.markers / attack.__name__)) + HONEST
        if attack is of_python_itself:
            evil = evil.removesuffix(HONEST)
        return attack(self.outside, self.project, evil)

    def save(self, kernel: str, length: int = 3) -> Path:
        """A saved case that names ``kernel``."""
        return write_regression(a_finding(length, kernel=kernel, kind=kernel), self.project / "regressions")

    def python(
        self, *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join((str(CLONE), str(self.outside)))
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or self.project,
            env={**os.environ, "PYTHONPATH": paths, "BROWSER": str(self.outside / "browser")} | (environment or {}),
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def attnfuzz(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "attnfuzz", *arguments, environment=environment)

    def what_ran(self) -> set[str]:
        """The attacks whose code was imported."""
        return {marker.name for marker in self.markers.iterdir()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def runner_and_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runner, Place]]:
    """One zygote for all attacks, started from the project."""
    place = Place(tmp_path_factory.mktemp("hostile"))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place.project)
        patched.setenv("PYTHONPATH", str(place.outside))
        patched.setenv("BROWSER", str(place.outside / "browser"))
        with Runner(device="cpu") as runner:
            yield runner, place


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.by_day("absolute", "module", "linked_file", "package_around_it", "open_to_all")
def test_a_file_has_no_foreign_code_run_unless_it_is_trusted(
    attack: Attack, runner_and_place: tuple[Runner, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaying a stranger's case would run the stranger's code; or what it names could not be run at all."""
    runner, place = runner_and_place
    monkeypatch.chdir(place.project)
    saved = SavedCase(place.project / "regressions" / "a.json", a_finding(3, kernel=place.prepare(attack)))
    runner.restart()
    with pytest.raises(KernelLoadError) as refused:
        load_named(saved, runner)
    assert str(refused.value).startswith(str(saved.path))
    assert "--kernel" in str(refused.value)
    assert attack.__name__ not in place.what_ran()
    if attack is planted_above:  # where nobody looks for it, trusted or not
        return
    assert "--trust" in str(refused.value)
    runner.restart()
    if attack is of_python_itself:
        with pytest.raises(KernelLoadError, match="declares no kernel"):
            load_named(saved, runner, trust=True)
    else:
        assert load_named(saved, runner, trust=True).name == "mine"
    assert attack.__name__ in place.what_ran(), "this attack would not have worked anyway"


@pytest.mark.parametrize("target", ["mine.py:mine", "mine:mine", "dense_eager", "attnfuzz.kernels.bundled:dense_eager"])
def test_the_projects_own_code_and_bundled_kernels_run(
    target: str, runner_and_place: tuple[Runner, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project's own saved cases, by file or module, would need --trust, which then nobody would think about."""
    runner, place = runner_and_place
    monkeypatch.chdir(place.project)
    saved = SavedCase(place.project / "regressions" / "a.json", a_finding(3, kernel=target))
    assert load_named(saved, runner).problem == "dense_decode"


@pytest.mark.parametrize(
    "target", ["sys:mine", "mine/../mine:mine", "..mine:mine", "__main__:mine", "a\0.py:mine", f"{'a' * 999}.py:mine"]
)
def test_names_that_are_none_are_refused(
    target: str, runner_and_place: tuple[Runner, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that Python's import understands in a way of its own would get around the rule, or end in a traceback."""
    runner, place = runner_and_place
    monkeypatch.chdir(place.project)
    saved = SavedCase(place.project / "regressions" / "a.json", a_finding(3, kernel=target))
    with pytest.raises(KernelLoadError):
        load_named(saved, runner)
    with pytest.raises(KernelLoadError):  # as a state's kernels are loaded
        runner.declarations([target], within=place.project)


@pytest.mark.parametrize(
    "command", ["replay --device cpu", "replay --device cpu --sanitizer memcheck", "explain --device cpu", "repro"]
)
@pytest.mark.by_day("explain*")
def test_no_command_runs_foreign_code(command: str, place: Place) -> None:
    """One command would be the way in that the others are not."""
    sanitizer_stand_in.install(place.outside)
    attacks = (absolute, module) if command.startswith("replay") else (module,)
    files = [place.save(place.prepare(attack)) for attack in attacks]
    path = f"{place.outside}{os.pathsep}{os.environ['PATH']}"
    run = place.attnfuzz(*command.split(), *map(str, files), PATH=path)
    assert place.what_ran() == set()
    assert (run.returncode, run.stdout) == (2, "")
    refusals = run.stderr.removeprefix("Error: ").splitlines()
    assert [line.partition(": ")[0] for line in refusals] == [str(file) for file in files]


@pytest.mark.night
def test_a_folder_of_files_is_refused_file_by_file(place: Place) -> None:
    """Of a hundred cases, one would not know which ones name foreign code."""
    files = [place.save(place.prepare(attack)) for attack in ATTACKS]
    place.save("mine.py:mine")
    run = place.attnfuzz("replay", "--device", "cpu")
    assert place.what_ran() == set()
    assert (run.returncode, run.stdout) == (2, "")
    assert sorted(file.name for file in files) == sorted(
        file.name for line in run.stderr.splitlines() for file in files if file.name in line
    )


def test_what_is_merged_is_kept_and_not_run(place: Place) -> None:
    """Bringing folders together, which verifies by default, would run whatever is named in one of them."""
    for attack in ATTACKS:
        place.save(place.prepare(attack))
    run = place.attnfuzz("merge", "regressions", "-o", "merged", "--device", "cpu")
    assert place.what_ran() == set()
    assert run.returncode == 1, run.stderr
    assert len(list((place.project / "merged").glob("*.json"))) == len(ATTACKS)


def test_pytest_collects_no_foreign_code(place: Place) -> None:
    """A test run, which starts in every pull request, would run what a file in it names."""
    for length, attack in enumerate(ATTACKS, 2):
        if attack is not planted_above:
            place.save(place.prepare(attack), length)
    run = place.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "regressions", "--attnfuzz-device", "cpu")
    assert place.what_ran() == set()
    assert run.returncode == 1, run.stdout
    assert run.stdout.count("\nFAILED ") == len(ATTACKS) - 1
    assert run.stdout.count("--attnfuzz-trust") >= len(ATTACKS) - 1


@pytest.mark.night
def test_pytest_runs_what_it_is_told_to_trust(place: Place) -> None:
    """Kernels beside the project could not be tested from it any more."""
    place.save(place.prepare(absolute))
    run = place.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "regressions", "--attnfuzz-trust")
    assert place.what_ran() == {"absolute"}
    assert "attnfuzz-trust" not in run.stdout


@pytest.mark.night
def test_the_user_names_the_code_himself(place: Place) -> None:
    """A kernel outside of the project could not be replayed even by those who mean it."""
    saved = place.save(place.prepare(module))
    trusted = place.attnfuzz("replay", str(saved), "--kernel", place.prepare(absolute), "--device", "cpu")
    assert trusted.returncode == 0, trusted.stderr
    assert place.what_ran() == {"absolute"}


@pytest.mark.night
def test_no_state_names_foreign_code(place: Place) -> None:
    """A folder that somebody packed would run its code as soon as a campaign is resumed there."""
    target = place.prepare(dots)
    asked = AskedOf(kernels=(target,), budget_s=60.0, save_folder="regressions", workers=1, device="cpu")
    state = CampaignState(asked=asked, seed=1, elapsed_s=1.0, parts=1, kernels=(), interval_s=1.0, throughput={})
    (place.project / ".attnfuzz").mkdir()
    (place.project / ".attnfuzz" / "state.json").write_bytes(msgspec.json.encode(state))
    run = place.attnfuzz("explore", "--resume")
    assert place.what_ran() == set()
    assert run.returncode == 2
    assert run.stderr.startswith("Error: .attnfuzz/state.json: kernel '../outside/evil.py:mine' lies in ")
    assert run.stderr.rstrip().endswith("attnfuzz explore ../outside/evil.py:mine --resume")
    for given in ((target,), ("--trust",)):
        (place.markers / "dots").unlink(missing_ok=True)
        place.attnfuzz("explore", *given, "--resume")  # refused for what else this state lacks, once that is loaded
        assert place.what_ran() == {"dots"}


@pytest.mark.night
def test_settings_of_a_folder_that_all_can_write_to_do_not_count(place: Place) -> None:
    """Another user's pyproject.toml in /tmp would name the kernels that a search below it runs."""
    shared = place.project.parent / "shared"
    work = shared / "work"
    work.mkdir(parents=True)
    shared.chmod(0o1777)
    place.prepare(absolute)
    (shared / "pyproject.toml").write_text(f'[tool.attnfuzz]\nkernels = ["{place.outside / "evil.py"}"]\n')
    arguments = ("-m", "attnfuzz", "explore", "--budget", "2s", "--workers", "1", "--device", "cpu")
    run = place.python(*arguments, cwd=work)
    assert place.what_ran() == set()
    assert "evil" not in run.stdout + run.stderr


SHADOWS = ("torch", "triton", "numpy", "hypothesis", "msgspec", "click", "rich", "typing", "json", "random")


def shadow(folder: Path, markers: Path) -> None:
    """Files that would be imported in place of installed modules and Python's own."""
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(EVIL.format(marker=str(markers / name)))


@pytest.mark.night
@pytest.mark.parametrize(
    "path",
    [pytest.param("", id="unset"), pytest.param(os.pathsep, id="empty entries"), pytest.param(".", id="relative")],
)
def test_nothing_in_the_working_directory_passes_for_an_installed_module(path: str, place: Place) -> None:
    """A torch.py that lies where one happens to be would run in every process of every command."""
    place.save("mine.py:mine")
    shadow(place.project, place.markers)
    (place.project / "neighbour.py").touch()
    (place.project / "mine.py").write_text(f"import random, click, rich, neighbour\n{HONEST}")
    paths = f"{CLONE}{os.pathsep}{path}" if path else str(CLONE)
    for arguments in (
        ["explore", "mine.py", "mine:mine", "--budget", "12s", "--workers", "1", "--device", "cpu"],
        ["replay", "--device", "cpu"],
        ["doctor"],
    ):
        run = place.attnfuzz(*arguments, PYTHONPATH=paths)
        assert place.what_ran() == set(), arguments
        assert "Traceback" not in run.stdout + run.stderr
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("home", ["purelib", "clone"])
def test_a_kernels_neighbours_come_behind_what_is_installed(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A click.py beside a kernel would be imported by whatever imports click, where attnfuzz itself is installed."""
    installed = sysconfig.get_path("purelib")
    root = installed if home == "purelib" else str(tmp_path / "clone")
    monkeypatch.setattr(declaration, "__file__", f"{root}/attnfuzz/declaration.py")
    for path in ([sysconfig.get_path("stdlib"), installed], [sysconfig.get_path("stdlib"), installed, root]):
        path = list(dict.fromkeys(path))
        monkeypatch.setattr(sys, "path", path)
        kernel = "import attnfuzz\n\n\n@attnfuzz.kernel('dense_decode')\ndef mine(inputs): ...\n"
        (tmp_path / "mine.py").write_text(kernel)
        for name in [name for name in sys.modules if name.startswith("attnfuzz_user_mine_")]:
            monkeypatch.delitem(sys.modules, name)
        declaration.load_kernels(f"{tmp_path / 'mine.py'}:mine")
        assert sys.path[:2] == [sysconfig.get_path("stdlib"), installed]
        assert sys.path[2] == str(tmp_path)


@pytest.mark.night
def test_a_clone_that_is_not_installed_runs_its_own_attnfuzz(tmp_path: Path) -> None:
    """`python -m attnfuzz` in a fresh clone would fail, run another attnfuzz, or import what lies in the clone."""
    clone, markers = tmp_path / "clone", tmp_path / "markers"
    clone.mkdir()
    markers.mkdir()
    for name in ("attnfuzz", "kernels", "strategies"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CLONE / name, clone / name, symlinks=True, ignore=ignored)
    shutil.copy(CLONE / "pyproject.toml", clone)
    note = f"Path({str(tmp_path / 'ran')!r}).write_text(attnfuzz.__file__)"
    (clone / "mine.py").write_text(f"from pathlib import Path\n{HONEST}\n{note}\n")
    shadow(clone, markers)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-m", "attnfuzz", "explore", "mine.py", "--budget", "6s", "--workers", "1"],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "ran").read_text() == str(clone / "attnfuzz" / "__init__.py")
    assert list(markers.iterdir()) == []
