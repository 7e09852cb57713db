"""Reading a regression file strictly: whatever is wrong with it is said in one sentence. Executes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.corpus.regression import (
    FORMAT,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_PRECEDING,
    Environment,
    FindingRecord,
    Issue,
    Regression,
    Status,
)
from attnfuzz.data_files import read_data_file
from attnfuzz.problems.cases import PROBLEMS, BundledProblem, Case, Problem, case_from_builtins
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.fields import Field
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, CaseTooLarge, check_lists, check_size
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.untrusted_text import SENTENCE_BYTES, printable

MAX_FILE_BYTES = 1 << 20
"""A regression file is a few hundred bytes; a larger file than this is something else and is not read."""

MAX_ENTRIES = 256
"""Most entries that a file lists by name: options of a case, details and features of a finding, versions."""

_SHOWN_CHARACTERS = 60
_GLOB = frozenset("*?[")
_AT = re.compile(r"(?P<rule>.*) - at (?P<key>`key` in )?`\$(?P<path>.*)`", re.DOTALL)
"""How msgspec says where a rule is broken."""


class RegressionError(ValueError):
    """A regression file cannot be used; the message is one sentence with file, path, value, rule and remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, SENTENCE_BYTES))


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    problem: BundledProblem
    kernel: str
    case: dict[str, Any]
    preceding: list[dict[str, Any]] = []
    assumed: Supports | None = None
    assumed_numerics: Numerics | None = None
    finding: FindingRecord
    status: Status = "open"
    issue: Issue = ""
    note: str = ""
    environment: Environment = Environment()


class _OpenEnvelope(_Envelope, forbid_unknown_fields=True, kw_only=True):
    """The file of a problem that a user's file defines, which is not loaded: the fields of its cases stand in it."""

    problem: str  # where the class is, in place of a bundled problem's name
    fields: dict[str, Field]


def load_regression(path: Path) -> Regression:
    """Read one file. Raises RegressionError; the file is never changed."""
    try:
        data = read_data_file(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        raise RegressionError(
            f"{path} does not exist; give the path of a regression file or of a folder of them"
        ) from None
    except OSError as error:
        raise RegressionError(f"{path} cannot be read ({error.strerror}); give a regression file") from None
    return decode_regression(data, str(path))


def decode_regression(data: bytes, source: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Regression:
    """Parse the bytes of a regression file; ``source`` names it in messages.

    ``limit_bytes`` bounds the memory that each case's tensors may take. Raises RegressionError.
    """
    if len(data) > MAX_FILE_BYTES:
        raise RegressionError(
            f"{source} is larger than {MAX_FILE_BYTES} bytes, so it is no regression file; see its path"
        )
    document = _parse(data, source)
    _check_format(document, source)
    try:
        envelope = msgspec.convert(document, type=_OpenEnvelope if "fields" in document else _Envelope)
        problem: Problem = envelope.problem
        if isinstance(envelope, _OpenEnvelope):
            problem = OpenProblem(place=envelope.problem, fields=envelope.fields)
    except msgspec.ValidationError as error:
        raise RegressionError(what_is_wrong(error, document, "$", source)) from error
    except ValueError as error:
        raise RegressionError(f"{source}: {error} - at `$.fields`; correct them or restore the file") from error
    _check_kernel(envelope.kernel, source)
    return _with_cases(envelope, problem, source, limit_bytes)


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RegressionError(f"{source} is not complete JSON ({reason}); restore or delete the file") from error
    if not isinstance(document, dict):
        raise RegressionError(f"{source} holds {_show(document)} at `$`, but a regression file is a JSON object")
    return document


def _check_format(document: dict[str, Any], source: str) -> None:
    found = document.get("format")
    if found == FORMAT:
        return
    match = re.fullmatch(rf"{re.escape(FORMAT_NAME)}/(\d{{1,9}})", found) if isinstance(found, str) else None
    if match and int(match[1]) > FORMAT_VERSION:
        raise RegressionError(
            f"{source} has format {found!r}, written by a newer attnfuzz; upgrade attnfuzz to read it"
        )
    shown = _show(found) if "format" in document else "nothing"
    raise RegressionError(f"{source} has {shown} at `$.format`, which must be {FORMAT!r}; it is no regression file")


def _check_kernel(kernel: str, source: str) -> None:
    """A glob stands for many kernels on a command line; a saved case is of one."""
    name = kernel if kernel.endswith(".py") else kernel.rpartition(":")[2]
    if not name or (not name.endswith(".py") and _GLOB & set(name)):
        raise RegressionError(
            f"{source}: {_show(kernel)} may stand for several kernels, but a saved case is of one - at `$.kernel`; "
            "name that one"
        )


def _with_cases(envelope: _Envelope, problem: Problem, source: str, limit_bytes: int) -> Regression:
    if len(envelope.preceding) > MAX_PRECEDING:
        raise RegressionError(
            f"{source}: {len(envelope.preceding)} cases, of at most {MAX_PRECEDING} - at `$.preceding`; "
            "leave out those that the failure does not need"
        )
    finding = envelope.finding
    _check_count(source, "$.finding.details", len(finding.details))
    _check_count(source, "$.finding.features", len(finding.features))
    _check_count(source, "$.finding.also", len(finding.also))
    _check_count(source, "$.finding.maybe", len(finding.maybe))
    _check_count(source, "$.finding.sources", len(finding.sources))
    _check_count(source, "$.environment.versions", len(envelope.environment.versions))

    def read(document: dict[str, Any], place: str) -> Case:
        options = document.get("options")
        _check_count(source, f"{place}.options", len(options) if isinstance(options, dict) else 0)
        try:
            case = case_from_builtins(problem, document)
            check_size(case, limit_bytes)
        except msgspec.ValidationError as error:
            raise RegressionError(what_is_wrong(error, document, place, source)) from error
        except CaseTooLarge as error:
            raise RegressionError(f"{source}: {error} - at `{place}`") from error
        return case

    if envelope.assumed is not None and envelope.assumed.where is not None:
        raise RegressionError(
            f"{source}: which values go together is for the kernel to declare - at `$.assumed.where`; leave it out"
        )
    fields = {name: getattr(envelope, name) for name in Regression.__struct_fields__} | {"problem": problem}
    fields["case"] = read(envelope.case, "$.case")
    fields["preceding"] = tuple(read(case, f"$.preceding[{i}]") for i, case in enumerate(envelope.preceding))
    try:
        check_lists((fields["case"], *fields["preceding"]))
    except CaseTooLarge as error:
        raise RegressionError(f"{source}: {error}, or leave out preceding cases") from error
    return Regression(**fields)


def _check_count(source: str, place: str, count: int) -> None:
    if count > MAX_ENTRIES:
        raise RegressionError(f"{source}: {count} entries, of at most {MAX_ENTRIES} - at `{place}`; shorten the list")


def what_is_wrong(error: msgspec.ValidationError, document: Any, root: str, source: str, remedy: str = "") -> str:
    """msgspec's sentence with the full path in the file, the value found there and what to do.

    ``document`` is what was read, at the place ``root`` of the file that ``source`` names.
    """
    match = _AT.fullmatch(str(error))
    rule, key, inner = (match["rule"], match["key"] or "", match["path"]) if match else (str(error), "", "")
    value = _Missing() if key else _value_at(document, inner)
    says_value = re.search(r"\w=", rule) is not None
    found = f", found {_show(value)}" if not isinstance(value, dict | _Missing) and not says_value else ""
    return f"{source}: {rule}{found} - at {key}`{root}{inner}`; {remedy or _remedy(rule, root + inner)}"


def _remedy(rule: str, path: str) -> str:
    if "unknown field" in rule:
        return "remove that field, or upgrade attnfuzz if a newer one wrote it"
    if "missing required field" in rule:
        return "add that field or restore the file"
    if path == "$.issue":
        return "give the address of the issue, https://..."
    if path == "$.problem":
        return f"choose one of {', '.join(PROBLEMS)}"
    return "correct that value or restore the file"


class _Missing:
    """No value is at the path."""


def _value_at(document: Any, path: str) -> Any:
    """The value at a msgspec path such as ``.seq_lens[1]``; ``_Missing`` where the path does not name one."""
    value = document
    for name, index in re.findall(r"\.(\w+)|\[([^]]*)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return _Missing()
    return value


def _show(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
