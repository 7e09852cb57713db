"""The pytest plugin: collects saved regression files. Imports the framework only inside hooks and what they call.

Every ``*.json`` regression file in the folder that ``[tool.attnfuzz] regressions`` of the root directory's
pyproject.toml names becomes one test on the kernel that it names and, if that table says ``on = ["*"]``, one on
each bundled kernel that supports the case. An ``open`` file is expected to fail on its own kernel, strictly unless it
is flaky; everything else must pass.
``device`` and ``tolerance`` of that table, or of a profile in it, hold for these tests.

In such a project, and in no other, the workers of pytest-xdist have a GPU each if there are several, and ``-n auto``
starts as many workers as share the GPUs well.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnfuzz.campaign.workers import WorkerChoice
    from attnfuzz.config import Settings
    from attnfuzz.corpus import Regression
    from attnfuzz.declaration import Declaration
    from attnfuzz.isolation.devices import Gpu
    from attnfuzz.judging.runner import Runner
    from attnfuzz.problems.declared_numerics import Tolerance

if "ATTNFUZZ_OVERLAY" in os.environ:  # before any kernel is imported: `attnfuzz mutants` has this run judge a mutant
    from attnfuzz.overlay import install_overlay

    install_overlay()

_FORMAT_MARK = b'"attnfuzz.regression/'
_TABLE_NAME = b"attnfuzz"
_SETTINGS: pytest.StashKey[Settings | None] = pytest.StashKey()
_FOLDER: pytest.StashKey[Path | None] = pytest.StashKey()
_GPUS: pytest.StashKey[list[Gpu]] = pytest.StashKey()
_WORKERS: pytest.StashKey[WorkerChoice] = pytest.StashKey()
_OTHERS: pytest.StashKey[list[Declaration]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where kernels run."""
    group = parser.getgroup("attnfuzz", "attention-kernel regressions")
    group.addoption(
        "--attnfuzz-device",
        choices=("auto", "cpu", "cuda"),
        help="where saved regressions run: auto is the GPU if there is one (default: as in pyproject.toml, else auto)",
    )
    group.addoption(
        "--attnfuzz-profile",
        metavar="NAME",
        help="take settings from [tool.attnfuzz.profiles.NAME] in pyproject.toml",
    )
    group.addoption(
        "--attnfuzz-trust",
        action="store_true",
        help="run the kernels that saved regressions name even if they lie outside of the root directory's project",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the project's settings. Raises UsageError with one sentence for settings that are not valid."""
    settings = _settings(config)
    folder = settings.regressions if settings is not None else None
    config.stash[_FOLDER] = folder.resolve() if folder is not None else None
    if settings is not None:
        _share_gpus(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The number that ``-n auto`` stands for, with ``--dist worksteal`` unless another is asked for; None if xdist's.

    Tests of kernels take from milliseconds to minutes, so that a fair share of them is not a fair share of the time.
    """
    if _settings(config) is None:
        return None
    from attnfuzz.testing.xdist_leases import choose_workers

    choice = choose_workers(config, _gpus(config))
    if choice is None:
        return None
    config.stash[_WORKERS] = choice
    if config.option.dist == "no":  # which xdist is about to replace by "load"
        config.option.dist = "worksteal"
    return choice.workers


def pytest_collection_finish(session: pytest.Session) -> None:
    """Repair Triton's interpreter for kernels that tests call themselves, if one of these tests uses attnfuzz.

    `attnfuzz.assert_close` would object to right kernels, which the interpreter computes wrongly.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" not in sys.modules:
        return
    if any(map(_uses_attnfuzz, {item.getparent(pytest.Module) for item in session.items})):
        from attnfuzz.triton_compat.interpreter import set_up_interpreter

        set_up_interpreter()


def _uses_attnfuzz(module: pytest.Module | None) -> bool:
    """Whether a file of tests names attnfuzz, or a function of it."""
    for value in () if module is None else vars(module.obj).values():
        name = value.__name__ if inspect.ismodule(value) else value.__module__ if inspect.isfunction(value) else ""
        if (name or "").partition(".")[0] == "attnfuzz":
            return True
    return False


def pytest_report_header(config: pytest.Config) -> str | None:
    """How ``-n auto`` was read, if it was by this plugin."""
    choice = config.stash.get(_WORKERS, None)
    is_in_force = choice is not None and len(config.option.tx) == choice.workers  # --maxprocesses may say less
    return f"attnfuzz: {choice.sentence}" if choice is not None and is_in_force else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A collector for a regression file; None for any other file."""
    if file_path.suffix != ".json" or file_path.parent.resolve() != parent.config.stash[_FOLDER]:
        return None
    from attnfuzz.corpus.reading import MAX_FILE_BYTES
    from attnfuzz.data_files import read_head

    with contextlib.suppress(OSError):  # which the collector says in a sentence of its own
        if _FORMAT_MARK not in read_head(file_path, MAX_FILE_BYTES):
            return None
    return RegressionFile.from_parent(parent, path=file_path)


def _share_gpus(config: pytest.Config) -> None:
    """Pin this process, if it is a worker; hand out leases, if it is the controller of some."""
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    is_controller = config.getoption("dist", "no") != "no" and bool(config.getoption("tx", None))
    if workerinput is None and not is_controller:
        return
    from attnfuzz.testing.xdist_leases import Leases, pin_worker

    if workerinput is not None:
        pin_worker(workerinput)
    elif len(gpus := _gpus(config)) > 1:
        config.pluginmanager.register(Leases(gpus), "attnfuzz leases")


def _gpus(config: pytest.Config) -> list[Gpu]:
    """Where kernels can run, as nvidia-smi says, which is asked once; none if they are to run on the CPU."""
    if _GPUS not in config.stash:
        from attnfuzz.isolation.devices import find_gpus

        config.stash[_GPUS] = find_gpus() if _device(config) != "cpu" else []
    return config.stash[_GPUS]


def _settings(config: pytest.Config) -> Settings | None:
    if _SETTINGS not in config.stash:
        config.stash[_SETTINGS] = _read_settings(config)
    return config.stash[_SETTINGS]


def _read_settings(config: pytest.Config) -> Settings | None:
    """The settings in the root directory's pyproject.toml; None, and nothing imported, if it names no attnfuzz."""
    pyproject = config.rootpath / "pyproject.toml"
    profile = config.getoption("--attnfuzz-profile")
    from attnfuzz.data_files import MOST_PYPROJECT_BYTES, read_head

    try:
        is_configured = _TABLE_NAME in read_head(pyproject, MOST_PYPROJECT_BYTES)
    except OSError:  # none there, or pytest has already complained
        is_configured = False
    if not is_configured and profile is None:
        return None
    from attnfuzz.config import ConfigurationError, find_pyproject, has_settings, read_settings

    if is_configured and find_pyproject(config.rootpath) is None:  # anybody may have put it there
        return None
    try:
        return read_settings(pyproject, profile=profile) if profile or has_settings(pyproject) else None
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None


class RegressionFile(pytest.File):
    """One saved case."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test per kernel. Raises CollectError with one sentence for a file that is not valid, or cannot be run."""
        from attnfuzz.campaign.saved.replay import resolve_target
        from attnfuzz.corpus import RegressionError, load_regression
        from attnfuzz.declaration import KernelLoadError
        from attnfuzz.internal_errors import in_one_sentence
        from attnfuzz.isolation.outcomes import ExecutorUnavailable
        from attnfuzz.project import project_root

        try:
            regression = load_regression(self.path)
            target = resolve_target(regression.kernel, self.path, project_root(self.config.rootpath))
            supporting = list(_supporting(self.config, regression))
        except (RegressionError, KernelLoadError, ExecutorUnavailable) as error:
            raise self.CollectError(in_one_sentence(str(error))) from None
        yield RegressionItem.from_parent(self, name=regression.kernel, target=target, regression=regression)
        for name in supporting:
            if name != regression.kernel:
                yield RegressionItem.from_parent(self, name=name, target=name, regression=regression)


class RegressionItem(pytest.Item):
    """One saved case on one kernel."""

    def __init__(self, *, target: str, regression: Regression, **pytest_arguments: Any) -> None:
        from attnfuzz.oracles.registry import oracle_of
        from attnfuzz.testing import KernelFailure

        super().__init__(**pytest_arguments)
        self.target = target
        self.regression = regression
        if regression.status == "open" and self.name == regression.kernel:
            where = f", {regression.issue}" if regression.issue else ""
            fixed = shlex.join(["attnfuzz", "triage", "--fixed", os.path.relpath(self.path)])
            reason = f"open{where}: {regression.finding.message}; once repaired: {fixed}"
            # a flaky case may pass in every run of one replay, others where their oracle has no say
            always = not regression.finding.is_flaky and oracle_of(regression.finding.oracle).judges_everywhere
            self.add_marker(pytest.mark.xfail(raises=KernelFailure, strict=always, reason=reason))

    def runtest(self) -> None:
        """Raises KernelFailure if the kernel fails the case."""
        from attnfuzz.campaign.saved.replay import SavedCase, load_named
        from attnfuzz.testing import check

        if self.name == self.regression.kernel:
            trust = self.config.getoption("--attnfuzz-trust")
            saved = SavedCase(self.path, self.regression)
            load_named(saved, _runner(self.config), trust=trust, start=self.config.rootpath)
        check(self.target, self.path, device=_device(self.config), tolerance=_tolerance(self.config))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The oracle's words and the command that replays the case, or what keeps it from running, not a traceback."""
        from attnfuzz.internal_errors import in_one_sentence, own_error
        from attnfuzz.isolation.outcomes import ExecutorUnavailable, ServiceError
        from attnfuzz.testing.kernel_failure import KernelFailure, failure_report

        error = excinfo.value
        if isinstance(error, KernelFailure):
            file = os.path.relpath(self.path, self.config.invocation_params.dir)
            command = shlex.join(["attnfuzz", "replay", file, "--kernel", self.name])
            return failure_report(error.failure, self.name, error.case, replay=command)
        if isinstance(error, ValueError | ExecutorUnavailable):
            return in_one_sentence(str(error))
        return own_error(error) if isinstance(error, ServiceError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is and what it is called."""
        return self.path, None, f"{self.path.stem} on {self.name}"


def _supporting(config: pytest.Config, regression: Regression) -> Iterator[str]:
    """Other kernels that the case is put to: of those that the project asks for, all that support it."""
    settings = _settings(config)
    if settings is None or settings.on is None:
        return
    from attnfuzz.cases.supported import adapt_options, supports_case
    from attnfuzz.corpus.regression import as_of

    if _OTHERS not in config.stash:
        config.stash[_OTHERS] = _runner(config).declarations(settings.on)
    for kernel in config.stash[_OTHERS]:
        try:
            now = as_of(regression, kernel.problem)
        except ValueError:  # no case of what the problem is by now
            continue
        case = adapt_options(now.case, kernel.options)
        if kernel.problem == now.problem and supports_case(kernel.supports, kernel.options, case):
            yield kernel.target


def _runner(config: pytest.Config) -> Runner:
    from attnfuzz.testing.loading import shared_runner

    return shared_runner(_device(config), tolerance=_tolerance(config))


def _device(config: pytest.Config) -> str:
    settings = _settings(config)
    device: str | None = config.getoption("--attnfuzz-device")
    return device or (settings.device if settings else None) or "auto"


def _tolerance(config: pytest.Config) -> Tolerance:
    settings = _settings(config)
    return (settings.tolerance if settings else None) or "bound"
