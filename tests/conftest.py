"""Set up the test run: Triton's interpreter, and shapes checked wherever a signature states them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnfuzz
from tests.shape_checks import check_inputs, check_shapes, check_signatures_of

if TYPE_CHECKING:
    from attnfuzz.judging.runner import Runner

pytest_plugins = ["pytester"]

gc.disable()  # until all is imported

# Read when triton is imported: here kernels are interpreted on every machine, executors choose for themselves.
# `TRITON_INTERPRET=0 pytest tests/kernels` compiles them for a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; threads of tiny tensors only get in their way

# `nohup` and a shell's `&` have signals ignored; what tests start would ignore them too, but inherits no handler.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)

# Processes that tests start, and those of other folders above all, import the attnfuzz that is tested, whatever the
# environment's own paths name first.
_ROOT = os.fspath(Path(attnfuzz.__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *(path for path in _PATHS if path not in ("", _ROOT))])


def pytest_configure() -> None:
    """Refuse to test another attnfuzz than the one beside the tests, which would pass for it."""
    root, found = Path(__file__).resolve().parents[1], Path(attnfuzz.__file__).resolve().parent
    if found != (root / "attnfuzz").resolve():
        raise pytest.UsageError(
            f"these tests are of {root / 'attnfuzz'}, but `import attnfuzz` finds {found}; "
            f"set PYTHONPATH={root}, or install that one: pip install -e {root}"
        )


_SLOW_CASES = (
    "split_decode-split_k_partials-accuracy-64c23ce1.json",
    "paged_decode-paged_split_k-accuracy-be7be1e9.json",
    "paged_decode-paged_split_k-determinism-09dbc1d8.json",
    "paged_decode-paged_split_k-accuracy-78b6b4fb.json",
    "paged_decode-paged_naive-accuracy-727b74b9.json",
    "paged_decode-paged_naive-accuracy-da823a0d.json",
    "paged_decode-paged_naive-exception-d2190d79.json",
    "dense_decode-dense_naive-dead_memory-76a56a89.json",
    "split_decode-split_k_partials-unwritten-61e7717f.json",
)
"""Of `regressions/`: a relation has the interpreter run each of their many programs some thirty times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave saved cases that take longer than most tests to the night."""
    for item in items:
        if item.path.name in _SLOW_CASES:
            item.add_marker(pytest.mark.night)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage more rarely, and not among what was imported: that took a tenth of the time of tests."""
    if not session.config.option.collectonly:
        import torch  # noqa: F401  # what nearly every test imports: a million objects
        import triton  # noqa: F401  # as above

        from attnfuzz.triton_compat.interpreter import set_up_interpreter

        set_up_interpreter()  # as executors do: kernels that a test runs itself took twice as long
        check_inputs()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave nothing to search: pytest looks for garbage ten times more, among all that tests have cached."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str
) -> Generator[None, list[pytest.Item] | None, list[pytest.Item] | None]:
    """Mark for the night what `by_day` leaves to it. Refuses a pattern that fits nothing."""
    made = yield
    items = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    if marker := next((item.get_closest_marker("by_day") for item in items), None):
        idle = [one for one in marker.args if not any(fnmatchcase(item.callspec.id, one) for item in items)]
        if idle:
            raise collector.CollectError(f"by_day of {name}: {idle} fit none of {[i.callspec.id for i in items]}")
        for item in set(items) - set(_by_day(items, marker.args)):
            item.add_marker(pytest.mark.night)
    return made


def _by_day(items: Sequence[pytest.Function], patterns: Sequence[str]) -> list[pytest.Function]:
    """Those whose id fits a pattern; without any, so many that each value of each list of parameters occurs."""
    if patterns:
        return [item for item in items if any(fnmatchcase(item.callspec.id, one) for one in patterns)]
    values = {item: set(_values(item)) for item in items}
    chosen, left = list[pytest.Function](), set().union(*values.values())
    while left:
        chosen.append(max(items, key=lambda item: len(left & values[item])))
        left -= values[chosen[-1]]
    return chosen


def _values(item: pytest.Function) -> Iterator[tuple[int, ...]]:
    """What ``item`` takes of each list of parameters."""
    for number, marker in enumerate(item.iter_markers("parametrize")):
        names = marker.args[0].split(",") if isinstance(marker.args[0], str) else marker.args[0]
        yield number, *(id(item.callspec.params[name.strip()]) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Check shapes in all tests, but if those of the night are left out, in a part of those of the day."""
    check_shapes(item.nodeid, by_day="not night" in item.config.option.markexpr)
    return (yield)


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """One for all tests that ask for no other."""
    from attnfuzz.judging.runner import Runner

    with Runner(device="cpu") as runner:
        yield runner


@pytest.fixture(scope="session", autouse=True)
def _one_zygote() -> Iterator[None]:
    """Executors on the CPU come from one process that has imported torch and triton, whichever runner asks for them."""
    from tests.shared_zygote import SharedZygote

    with pytest.MonkeyPatch.context() as patched:
        # Of a file that is written twice within a second, Python would take what it has compiled for the first.
        patched.setenv("PYTHONDONTWRITEBYTECODE", "1")
        with SharedZygote.for_all():
            yield


def _modules_with_shapes() -> Iterator[str]:
    """Only these are checked: beartype draws random numbers, which functions that strategies call may not."""
    package = Path(attnfuzz.__file__).parent
    for path in package.rglob("*.py"):
        if "\nfrom jaxtyping import" in path.read_text(encoding="utf-8"):
            yield ".".join((package.name, *path.relative_to(package).with_suffix("").parts))


check_signatures_of(_modules_with_shapes())
