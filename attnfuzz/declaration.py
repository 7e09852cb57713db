"""Declaring a kernel under test and finding it again by name, module or file. Torch-free."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from attnfuzz.adapters import module_of
from attnfuzz.data_files import is_regular_file
from attnfuzz.environment import TRITON_REMEDY
from attnfuzz.oracles.own import OwnOracle, oracles_beside
from attnfuzz.oracles.registry import OracleName
from attnfuzz.overlay import original_of, spec_from_file
from attnfuzz.problems.cases import PROBLEMS, BundledProblem, Problem
from attnfuzz.problems.choices import without_lse
from attnfuzz.problems.combinations import settled
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.open_cases import PROMISES, OpenProblem, implemented, narrowed
from attnfuzz.problems.own import Problem as OwnProblem
from attnfuzz.problems.own import describe, moved
from attnfuzz.problems.simplest import check_combinations
from attnfuzz.problems.supports import OptionValue, Supports, check_options
from attnfuzz.project import search_path, why_foreign
from attnfuzz.untrusted_text import check_text, places, printable, text_of, type_name

BUNDLED_MODULE = "attnfuzz.kernels.bundled"

_COMPOSITION = "attnfuzz.composition"
_TARGET_BYTES = 8192
"""The longest path (PATH_MAX) and a name."""

KernelFunction = Callable[..., Any]


class KernelLoadError(ValueError):
    """A kernel named by the user cannot be loaded; the message is one sentence with value and remedy."""


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kernel as the driver knows it: this travels over the pipe, the function stays in the executor.

    ``target`` loads exactly this kernel again: a bundled name, ``module:name`` or ``path/to/file.py:name``.
    ``assumed`` names the fields of ``supports`` and of ``numerics`` that the kernel's file leaves open, and that say
    what was found out.
    ``versions``: of the packages that the kernel belongs to, where it is an engine's; ``calls``: the functions of the
    engine that it calls, as ``module:attribute``.
    ``needs_preparing``: it has something to do before its first case, and nobody has done it yet.
    ``builds_apart``: what it builds when it is called may be built beside other kernels' builds, and its engine has a
    `Builder`.
    ``is_settled``: it is an engine's, in Triton, and of what it leaves open it has been found out that it means the
    default.
    ``oracles``: those that its file defines (`attnfuzz.oracle`).
    ``lengths``: numbers in its source that the length of a sequence may be compared with.
    A function that ``supports`` has for ``where`` becomes a table. Raises ValueError for names and options that could
    not be shown, or not be sent as JSON, and for what ``where`` names and cases of the problem do not have.
    """

    name: str
    problem: Problem
    supports: Supports = Supports()
    options: dict[str, tuple[OptionValue, ...]] = {}
    numerics: Numerics = Numerics()
    target: str = ""
    assumed: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    calls: tuple[str, ...] = ()
    needs_preparing: bool = False
    builds_apart: bool = False
    is_settled: bool = False
    oracles: tuple[OracleName, ...] = ()
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("target", self.target, _TARGET_BYTES)
        for package, version in self.versions.items():
            check_text("a package in versions", package)
            check_text(f"versions[{package!r}]", version)
        for place in self.calls:
            check_text("a function in calls", place)
        check_options(self.options)
        for name, kind in (("supports", Supports), ("numerics", Numerics)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r:.80} must be an attnfuzz.{kind.__name__}(...)")
        if self.problem == "split_decode" and self.supports.lse == "none":
            raise ValueError(
                'Supports(lse="none"): states of split_decode are merged by their log-sum-exp; leave it out, or say '
                '"base2"'
            )
        msgspec.structs.force_setattr(self, "supports", settled(self.problem, self.supports, self.options))

    @property
    def is_bundled(self) -> bool:
        """Whether it comes with attnfuzz, and says all that there is to say of it."""
        return ":" not in self.target


class Builder(Protocol):
    """A compiler of an engine's ``modules``, which are called so, and keeps them in a folder that ``setting`` chooses.

    It builds for one process, which calls no kernel.
    """

    modules: str
    setting: str

    @property
    def folder(self) -> str:
        """Where modules are kept, once `begin` has been called."""

    @property
    def keeps_apart(self) -> bool:
        """Whether modules may be built at once; without, `begin` builds nothing."""

    def begin(self, calls: Sequence[Callable[[], object]]) -> list[list[str]]:
        """Begin to build all that ``calls`` need; of each the names of the modules that are not there yet."""

    @property
    def built(self) -> int:
        """How many of these are there now."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is built any more."""


@dataclass(frozen=True)
class EnginePlan:
    """An adapter's ``function`` and its ``needs``: parts of its engine by name, each beside its place,
    ``module:attribute``. The function returns results, or the call that gives them. ``builder``: the engine's."""

    function: KernelFunction
    needs: Mapping[str, tuple[str, Any]]
    builder: Builder | None = None

    def __call__(self, inputs: object, **options: OptionValue) -> Any:
        return self.function(inputs, **{name: found for name, (_, found) in self.needs.items()}, **options)


class Kernel:
    """A callable with its declaration; ``kernel(inputs, **options)`` runs it, ``prepare()`` goes before its first."""

    def __init__(
        self,
        function: KernelFunction,
        declaration: Declaration,
        prepare: Callable[[], object] | None = None,
        plan: EnginePlan | None = None,
    ) -> None:
        self.function = function
        self.prepare = prepare
        self._plan = plan
        self.declaration = declaration
        self.__name__ = declaration.name
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    @functools.cached_property
    def oracles(self) -> tuple[OwnOracle, ...]:
        """The oracles that stand beside its function, once its file has been imported. Raises ValueError for names
        twice."""
        return oracles_beside(self.__module__)

    def __call__(self, inputs: object, **options: OptionValue) -> Any:
        return self.function(inputs, **options)

    def plan(self, inputs: object, **options: OptionValue) -> Callable[[], Any] | None:
        """Do what a server does once for a batch, and all layers share: what is left is the call.

        None of a kernel that has nothing to do beforehand.
        """
        call = None if self._plan is None else self._plan(inputs, **options)
        return call if callable(call) else None

    @property
    def engine_plan(self) -> EnginePlan | None:
        """How an adapter calls its engine; None of a kernel that is not made by one."""
        return self._plan

    def planned(self, inputs: object, **options: OptionValue) -> Callable[[], Any]:
        """The call that `plan` leaves, or all of it."""
        return self.plan(inputs, **options) or functools.partial(self, inputs, **options)

    def without_lse(self) -> Kernel:
        """This kernel, as if it returned its output alone."""
        return self.declared(supports=without_lse(self.declaration.problem, self.declaration.supports))

    def declared(self, **changes: Any) -> Kernel:
        """This kernel with other fields of its declaration."""
        return Kernel(self.function, msgspec.structs.replace(self.declaration, **changes), self.prepare, self._plan)

    def __repr__(self) -> str:
        return f"<attnfuzz kernel {self.declaration.target or self.declaration.name} ({self.declaration.problem})>"


class Absent(msgspec.Struct, frozen=True):
    """A kernel that cannot be had here; ``why`` is a sentence. ``needs``: the places of what its adapter calls."""

    name: str
    why: str
    problem: str = ""
    needs: tuple[str, ...] = ()


def kernel(
    problem: BundledProblem | OwnProblem,
    *,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    numerics: Numerics | None = None,
    name: str | None = None,
    prepare: Callable[[], object] | None = None,
) -> Callable[[KernelFunction], Kernel]:
    """Declare the decorated function as a kernel under test for ``problem``, a bundled one or an `attnfuzz.Problem`.

    The function gets the inputs and its drawn ``options`` by keyword. It returns ``(out, lse)``, only ``out``,
    or None after writing into ``inputs.out`` and ``inputs.lse``. Raises ValueError for a declaration that cannot hold.

    ``prepare`` is called once, in one process, before the kernel's first case: for building what all processes load
    from disk afterwards. A campaign searches other kernels meanwhile. It has all the time and memory that it needs, and
    none of that counts as the kernel's; what it leaves in its own process is lost.
    """
    if inspect.isfunction(problem):
        raise ValueError(
            f"@attnfuzz.kernel stands before {problem.__name__} without parentheses; name the problem that it is for: "
            '@attnfuzz.kernel("paged_decode")'
        )
    own = isinstance(problem, OwnProblem)
    if not own and problem not in PROBLEMS:
        raise ValueError(f"problem={problem!r} must be one of {PROBLEMS}, or an instance of an attnfuzz.Problem")
    choices = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    check_options(choices)
    described: Problem
    if isinstance(problem, OwnProblem):
        described, supports = _described(problem, supports or Supports())
        if numerics is not None:
            raise ValueError(
                f"numerics= is for bundled problems; {described} has a bound of its own, so its reference passes "
                "Numerics(...) to attnfuzz.attention(numerics=...)"
            )
    else:
        described = problem
    if isinstance(supports, Supports):
        supports = settled(described, supports, choices)
        check_combinations(described, supports, choices)

    def declare(function: KernelFunction) -> Kernel:
        declaration = Declaration(
            name=name or function.__name__,
            problem=described,
            supports=supports or Supports(),
            options=choices,
            numerics=numerics or Numerics(),
            target=_target_of(function),
            needs_preparing=prepare is not None,
        )
        return Kernel(function, declaration, prepare)

    return declare


def _described(problem: OwnProblem, supports: Supports) -> tuple[Problem, Supports]:
    """The ``problem`` in words, as a kernel with ``supports`` takes it, and the promises beyond that."""
    if not isinstance(supports, Supports):
        raise ValueError(f"supports={supports!r:.80} must be an attnfuzz.Supports(...)")
    described = implemented(narrowed(describe(problem), supports), problem)
    return described, Supports(**{name: said for name, said in supports.declared().items() if name in PROMISES})


def _placed(kernel: Kernel, module: ModuleType, prefix: str, target: str) -> Kernel:
    """``kernel`` as ``target``, and its problem by the same name of their file, if they share one."""
    problem = kernel.declaration.problem
    file = getattr(module, "__file__", None)
    if isinstance(problem, OpenProblem) and prefix and file is not None:
        problem = moved(problem, original_of(file), prefix)
    oracles = tuple(one.name for one in kernel.oracles)
    return kernel.declared(target=target, problem=problem, oracles=oracles)


def load_kernels(target: str, *, within: Path | None = None, folder: Path | None = None) -> list[Kernel]:
    """Kernels named by ``target``: a bundled name or glob, ``engine:name``, ``module[:name]``, ``file.py[:name]``.

    And ``KERNEL+MERGE`` or ``WRITER+READER``, two of these as one (see `attnfuzz.composition`).

    ``within`` is the root of a project, for a target that no user has typed but a file names: then nothing is imported
    but the bundled kernels and what lies in there. ``folder`` is where relative paths begin, if that is not the working
    directory, which code under test may have left. Imports the module, so only executors call it. Raises
    KernelLoadError.
    """
    folder = Path() if folder is None else folder
    if (parts := parts_of(target, folder)) is not None:
        return [_composed(target, *([*load_kernels(part, within=within, folder=folder)] for part in parts))]
    place, _, name = target.rpartition(":") if _has_name(target) else (target, "", "")
    if not place and not name:  # an empty variable of a script, which must not come to mean every kernel
        raise KernelLoadError(f"{target!r} names no kernel; give a name, or '*' for all bundled ones")
    if place.endswith(".py"):
        if within is not None:
            _check_own(folder / place, target, within)
        return _select(_import_file(Path(place), folder), name, place, prefix=place)
    if place and (name or "." in place):
        module = module_of(place)
        if module != place:  # adapters are attnfuzz's own, or installed
            found = _select(_import_module(module), name, f"the adapters of {place}", prefix=place)
            return [kernel.declared(name=kernel.declaration.target) for kernel in found]
        return _select(_import_module(place, within, folder), name, place, prefix=place)
    return _select(_import_module(BUNDLED_MODULE), place or name, "the bundled kernels", prefix="")


def absent_kernels(target: str) -> list[Absent]:
    """The adapters of an engine that ``target`` names and that cannot be had here. Raises KernelLoadError."""
    place, _, pattern = target.rpartition(":")
    if (module := module_of(place)) == place:
        return []
    absent = [value for value in vars(_import_module(module)).values() if issubclass(type(value), Absent)]
    named = [one for one in absent if fnmatch.fnmatchcase(one.name, pattern)]
    return [msgspec.structs.replace(one, name=f"{place}:{one.name}") for one in named]


def parts_of(target: str, folder: Path = Path()) -> tuple[str, str] | None:
    """The two kernels that ``KERNEL+MERGE`` names; None for the name of one, whose file may have a + in its name.

    ``folder``: where a relative path begins.
    """
    first, plus, second = target.partition("+")
    place = target if target.endswith(".py") else target.rpartition(":")[0]
    if not plus or not first or not second or (place.endswith(".py") and is_regular_file(folder / place)):
        return None
    return first, second


def _composed(target: str, attention: list[Kernel], merge: list[Kernel]) -> Kernel:
    for found, name in zip((attention, merge), target.split("+", 1), strict=True):
        if len(found) != 1:
            raise KernelLoadError(f"{target}: {name} names {len(found)} kernels; two are composed, so name one")
    compose = importlib.import_module(_COMPOSITION).compose  # needs torch, which whoever loads kernels has
    composed: Kernel = compose(attention[0], merge[0])
    return composed


def _check_own(file: Path, target: str, root: Path) -> None:
    """Raise KernelLoadError unless ``file`` may run because another file names it."""
    try:
        why = why_foreign(file, root)
    except (OSError, ValueError) as error:  # too long, or with a NUL
        raise KernelLoadError(
            f"kernel {target!r} is in no file that there can be ({error}); correct its name"
        ) from error
    if why:
        raise KernelLoadError(
            f"kernel {target!r} {why}, and what a file names does not run from there; if you trust it, say --trust "
            "(pytest: --attnfuzz-trust)"
        )


def _has_name(target: str) -> bool:
    return ":" in target and not target.endswith(".py")


def _select(module: ModuleType, pattern: str, place: str, *, prefix: str) -> list[Kernel]:
    found = {attribute: value for attribute, value in vars(module).items() if issubclass(type(value), Kernel)}
    by_name = {(value.declaration.name if not prefix else attribute): value for attribute, value in found.items()}
    names = [name for name in by_name if fnmatch.fnmatchcase(name, pattern or "*")]
    if not names:
        absent = [value for value in vars(module).values() if issubclass(type(value), Absent)]
        for one in absent:
            if fnmatch.fnmatchcase(one.name, pattern or "*"):
                raise KernelLoadError(f"{prefix}:{one.name} cannot be had: {one.why}")
        raise KernelLoadError(_nothing_found(pattern, place, [*by_name, *(one.name for one in absent)]))
    try:
        return [_placed(by_name[name], module, prefix, f"{prefix}:{name}" if prefix else name) for name in names]
    except ValueError as error:  # a folder or a name that could not be shown
        raise KernelLoadError(f"a kernel cannot be loaded from {printable(place)}: {error}") from error


def _nothing_found(pattern: str, place: str, names: list[str]) -> str:
    if not names:
        return (
            f"{place} declares no kernel; decorate a function with @attnfuzz.kernel(PROBLEM), there or in a file "
            "beside it that imports it"
        )
    close = difflib.get_close_matches(pattern, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(names))}"
    return f"no kernel {pattern!r} in {place}; {hint}"


def _import_file(path: Path, folder: Path) -> ModuleType:
    if not is_regular_file(folder / path):
        raise KernelLoadError(f"kernel file {str(path)!r} does not exist; give the path to a Python file")
    resolved = (folder / path).resolve()
    try:
        str(resolved).encode()
    except UnicodeEncodeError:  # neither saved cases nor messages between processes, both JSON, could name it
        place = printable(str(resolved.parent))
        raise KernelLoadError(
            f"kernel file {str(path)!r} lies in {place}, which is not UTF-8; rename the folder"
        ) from None
    module_name = f"attnfuzz_user_{resolved.stem}_{zlib.crc32(str(resolved).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = spec_from_file(module_name, resolved)
    if spec is None or spec.loader is None:
        raise KernelLoadError(f"kernel file {str(path)!r} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    _find_neighbours_in(str(resolved.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file raises, SystemExit included, becomes one sentence
        sys.modules.pop(module_name, None)
        if issubclass(type(error), KeyboardInterrupt):
            raise
        where = _place_in(resolved, error)
        raise KernelLoadError(f"{path} does not import: {_reason(error)}{where}{_remedy(error)}") from error
    return module


def _find_neighbours_in(folder: str) -> None:
    """Let a kernel's file import those beside it: after what is installed, before what lies in a clone of attnfuzz.

    Nothing there is taken for torch or a module of Python's own, and a clone's ``kernels`` not for the user's.
    """
    if folder in sys.path:
        return
    root = str(Path(__file__).resolve().parents[1])
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    behind = max((n + 1 for n, entry in enumerate(sys.path) if entry in installed), default=0)
    place = sys.path.index(root) if root in sys.path else len(sys.path)
    sys.path.insert(place if place >= behind else len(sys.path), folder)


def _place_in(file: Path, error: BaseException) -> str:
    """The last line of ``file`` that led to ``error``, in brackets; empty for a file that could not be compiled."""
    lines = [place.line for place in places(error) if Path(place.path) == file]
    return f" (line {lines[-1]})" if lines else ""


def _reason(error: BaseException) -> str:
    return f"{type_name(error)}: {text_of(error)}"


def _remedy(error: BaseException) -> str:
    """How to mend a module that is missing or a field that does not exist; empty for other errors."""
    missing = error.name if type(error) is ModuleNotFoundError else None
    if isinstance(missing, str):
        if missing.partition(".")[0] == "triton":
            return f"; {TRITON_REMEDY}"
        return "; install it beside attnfuzz (pip install -e . for this project), or set PYTHONPATH to its folder"
    unknown = _UNKNOWN_FIELD.fullmatch(text_of(error)) if type(error) is TypeError else None
    return "" if unknown is None else _nearest_field(unknown["name"])


_UNKNOWN_FIELD = re.compile("Unexpected keyword argument '(?P<name>\\w+)'")
"""Message of msgspec about a field that a struct does not have, for which it has no type of exception."""


def _nearest_field(name: str) -> str:
    """The field of a declaration that may have been meant."""
    for kind in (Supports, Numerics):
        if close := difflib.get_close_matches(name, kind.__struct_fields__, n=1):
            return f"; did you mean {kind.__name__}({close[0]}=...)?"
    return ""


def _import_module(name: str, within: Path | None = None, folder: Path | None = None) -> ModuleType:
    """``within`` and ``folder``: as of `load_kernels`."""
    if name != BUNDLED_MODULE:
        for place in search_path(None if folder is None else folder.absolute()):
            _find_neighbours_in(place)
    try:
        if name != BUNDLED_MODULE and within is not None:
            _check_module(name, within)
        return importlib.import_module(name)
    except (KeyboardInterrupt, KernelLoadError):
        raise
    except BaseException as error:  # as above
        missing = error.name if type(error) is ModuleNotFoundError else None
        if isinstance(missing, str) and name.startswith(missing):
            raise KernelLoadError(f"no module named {name!r}; check the name and sys.path, or give a file") from error
        raise KernelLoadError(f"module {name!r} does not import: {_reason(error)}{_remedy(error)}") from error


def _check_module(name: str, root: Path) -> None:
    """Raise KernelLoadError unless ``name`` and the packages around it are the project's own; imports the packages."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)):
        raise KernelLoadError(f"{name!r} is no name of a module; write module:name or path/to/file.py:name")
    for length in range(1, len(parts) + 1):
        part = ".".join(parts[:length])
        spec = importlib.util.find_spec(part)  # imports the packages around it, each of which has been looked at
        if spec is None:
            raise ModuleNotFoundError(f"No module named {part!r}", name=part)
        if spec.origin is not None and not spec.has_location:
            raise KernelLoadError(
                f"kernel module {name!r} is a part of Python itself; name a file or module of the project's own"
            )
        if spec.origin is not None:  # a folder without __init__.py runs nothing
            _check_own(Path(spec.origin), name, root)


def _target_of(function: KernelFunction) -> str:
    """Where another process finds ``function``; empty for one that is not at the top level of a file."""
    code = getattr(function, "__code__", None)
    if code is None or "<locals>" in function.__qualname__ or not Path(code.co_filename).is_file():
        return ""
    return f"{original_of(code.co_filename)}:{function.__name__}"
