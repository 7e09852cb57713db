"""Parts of an adapter: an engine, and kernels that exist where the engine has the functions that they call."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from attnfuzz.declaration import Absent, Builder, EnginePlan, Kernel, KernelFunction, kernel
from attnfuzz.environment import installed
from attnfuzz.problems.cases import BundledProblem
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.own import Problem
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.untrusted_text import text_of, type_name


@dataclass(frozen=True)
class Engine:
    """``package``: the distribution whose version counts. ``tried``: the versions that its adapters were tried with.

    ``written_for``: versions whose signatures they follow, where none of them has run yet. ``settled``: versions of
    which it has been found out what kernels take that run on a CPU too (`attnfuzz declare`). ``builder`` builds the
    modules that the engine compiles when they are first called; without one they are built one after the other.
    ``gpu_only``: none of its kernels runs elsewhere.
    """

    package: str
    tried: tuple[str, ...]
    written_for: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    builder: Builder | None = None
    gpu_only: bool = False

    def kernel(
        self,
        problem: BundledProblem | Problem,
        *,
        needs: Mapping[str, tuple[str, ...]],
        supports: Supports | Callable[..., Supports] = Supports(),  # noqa: B008 - frozen
        options: Mapping[str, tuple[OptionValue, ...]] | None = None,
        numerics: Numerics | None = None,
        gpu_only: bool = False,
        amd_only: bool = False,
    ) -> Callable[[KernelFunction], Kernel | Absent]:
        """As `attnfuzz.kernel`, for any problem. The function gets what it ``needs`` by keyword, beside inputs and
        options.

        Each need has places, ``module:attribute``, of which the first that the installed version has is taken. Where
        there is none, what the decorated function becomes says so in one sentence in place of being a kernel. What the
        kernel ``supports`` may be a function of these needs, where the engine states it.

        ``amd_only``: it has launch options that compilers for other GPUs refuse. Triton's interpreter ignores them.

        The function may return a call without arguments in place of results. What it does itself is then the plan: what
        a server does once for a batch, and no benchmark times.
        """

        def declare(function: KernelFunction) -> Kernel | Absent:
            named = problem if isinstance(problem, str) else type(problem).__name__
            on_gpu_only = gpu_only or self.gpu_only
            called = tuple(" or ".join(places) for places in needs.values())
            absent = functools.partial(Absent, function.__name__, problem=named, needs=called)
            if on_gpu_only and not self.on_gpu():
                return absent(why=f"{self.package} runs it on a GPU only")
            if amd_only and self.on_gpu() and not _is_amd():
                return absent(why=f"{self.package} runs it on AMD's GPUs only")
            try:
                found_at = {name: self._first_of(places) for name, places in needs.items()}
                plan = EnginePlan(function, found_at, self.builder)
            except LookupError as error:
                return absent(why=str(error.args[0]))
            found = {name: value for name, (_, value) in plan.needs.items()}

            @functools.wraps(function)
            def call(inputs: object, **chosen: OptionValue) -> Any:
                result = plan(inputs, **chosen)
                return result() if callable(result) else result

            try:
                stated = supports if isinstance(supports, Supports) else supports(**found)
            except (AttributeError, TypeError, ValueError) as error:  # another version may state it in another way
                why = f"{self._present} does not state what it supports as expected: {text_of(error)}; {self._tried}"
                return absent(why=why)
            declared = kernel(problem, supports=stated, options=options, numerics=numerics)(call)
            version = installed(self.package)
            versions = {} if version is None else {self.package: version}
            calls = tuple(place for place, value in plan.needs.values() if _is_function(value))
            declaration = msgspec.structs.replace(
                declared.declaration,
                versions=versions,
                calls=calls,
                builds_apart=self.builder is not None and self.builder.keeps_apart,
                is_settled=version in self.settled and not on_gpu_only and not amd_only,
            )
            return Kernel(call, declaration, plan=plan)

        return declare

    @staticmethod
    def on_gpu() -> bool:
        """Whether kernels run on a GPU in this process: without one, Triton's interpreter has been asked for."""
        return os.environ.get("TRITON_INTERPRET") != "1"

    @property
    def _tried(self) -> str:
        if not self.tried:
            return f"this adapter follows {self.package} {' and '.join(self.written_for)}, and has not been tried"
        return f"this adapter was tried with {self.package} {' and '.join(self.tried)}"

    @property
    def _present(self) -> str:
        return f"{self.package} {installed(self.package)}"

    def _first_of(self, places: tuple[str, ...]) -> tuple[str, Any]:
        """The place, and what is there. Raises LookupError, with a sentence."""
        for place in places:
            module, _, attribute = place.partition(":")
            try:
                return place, functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise LookupError(f"{module} does not import: {text_of(error)}; {self._tried}") from error
            except AttributeError:
                continue
            except (ImportError, OSError, RuntimeError) as error:
                raise LookupError(
                    f"{module} does not import: {type_name(error)}: {text_of(error)}; {self._tried}"
                ) from error
        if installed(self.package) is None:
            raise LookupError(f"{self.package} is not installed; {self._tried}")
        raise LookupError(f"{self._present} has no {' or '.join(places)}; {self._tried}")


def _is_amd() -> bool:
    import torch

    return torch.version.hip is not None


def _is_function(need: object) -> bool:
    """Rather than a class, or a constant."""
    return callable(need) and not isinstance(need, type)
