"""What another campaign has found: as it travels from machine to machine, and as it is kept here. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from attnfuzz.campaign.identity.signature import Signature, Symptom, Told, are_same_bug
from attnfuzz.campaign.messages import Known
from attnfuzz.corpus import FindingRecord, Regression, RegressionError, decode_regression, encode_regression
from attnfuzz.minimise import size_key

__all__ = ["FORMAT", "MAX_BYTES", "Elsewhere", "FoundElsewhere", "decode_found", "encode_found"]

FORMAT = "attnfuzz.shared/1"
MAX_BYTES = 1 << 18
"""Of one finding, which has a few hundred; a larger entry in a database is something else."""
_MAX_KNOWN = 16
_MAX_FEATURES = 64
_MAX_CHARACTERS = 256

_NO_REGRESSION = b"null"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: str
    host: str
    known: tuple[Known, ...]
    regression: msgspec.Raw = msgspec.Raw(_NO_REGRESSION)


class FoundElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """A bug that the machine called ``host`` has found.

    ``known`` is what its later failures look like. ``regression`` is its smallest case there, None if all that is told
    is another way in which a bug shows.
    """

    host: str
    known: tuple[Known, ...]
    regression: Regression | None = None

    @property
    def signature(self) -> Signature:
        """Symptom and features of the smallest case."""
        first = self.known[0]
        symptom = Symptom(first.kernel, first.oracle, first.kind)
        if self.regression is not None:
            symptom = Symptom.of(first.kernel, self.regression.finding)
        return Signature(symptom, first.features)

    @property
    def said(self) -> FindingRecord | None:
        """What an oracle says of its smallest case, if that is known."""
        return None if self.regression is None else self.regression.finding

    @property
    def in_contract(self) -> bool:
        """Whether no declaration would end it, for all that was told."""
        return self.regression is None or self.regression.finding.remedy is None

    @property
    def is_flaky(self) -> bool:
        """Whether some runs pass."""
        return self.known[0].flaky

    def __str__(self) -> str:
        message = f": {self.regression.finding.message[:_MAX_CHARACTERS]}" if self.regression is not None else ""
        return f"{self.signature.symptom.kernel} {self.signature}, found on {self.host}{message}"


class Elsewhere:
    """The bugs that other campaigns have found, each once with its smallest case."""

    def __init__(self) -> None:
        self._found: list[FoundElsewhere] = []

    def add(self, found: FoundElsewhere) -> bool:
        """Whether ``found`` is a bug that was not known to be known elsewhere."""
        if found.regression is None:
            return False
        for i, other in enumerate(self._found):
            if are_same_bug(other, found):
                self._found[i] = min(other, found, key=_size)
                return False
        self._found.append(found)
        return True

    def besides(self, findings: Iterable[Told]) -> tuple[FoundElsewhere, ...]:
        """Those that are not among ``findings`` of this campaign."""
        own = list(findings)
        return tuple(found for found in self._found if not any(are_same_bug(found, one) for one in own))


def encode_found(found: FoundElsewhere) -> bytes:
    """JSON; equal findings give equal bytes."""
    regression = encode_regression(found.regression) if found.regression is not None else _NO_REGRESSION
    entry = _Entry(format=FORMAT, host=found.host, known=found.known, regression=msgspec.Raw(regression))
    return msgspec.json.encode(entry, order="deterministic")


def decode_found(data: bytes, *, kernel: str, source: str) -> FoundElsewhere:
    """Read strictly what another machine says of ``kernel``; ``source`` names it in messages. Raises ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{source} holds an entry of {len(data)} bytes; one of attnfuzz has {MAX_BYTES} at most")
    try:
        entry = msgspec.json.decode(data, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{source} holds an entry that attnfuzz did not write ({error})") from error
    if entry.format != FORMAT or not entry.known:
        shown = entry.format[:_MAX_CHARACTERS]
        raise ValueError(f"{source} holds an entry of format {shown!r}; it must be {FORMAT!r} and name a bug")
    if any(known.kernel != kernel for known in entry.known):
        raise ValueError(f"{source} holds an entry for another kernel than {kernel}")
    if not _is_modest(entry):
        raise ValueError(f"{source} holds an entry whose names are longer or more than those of attnfuzz")
    raw = bytes(entry.regression)
    try:
        regression = decode_regression(raw, source) if raw != _NO_REGRESSION else None
    except RegressionError as error:
        raise ValueError(str(error)) from error
    if regression is not None and regression.kernel != kernel:
        raise ValueError(f"{source} holds an entry with a case of another kernel than {kernel}")
    return FoundElsewhere(host=entry.host, known=entry.known, regression=regression)


def _is_modest(entry: _Entry) -> bool:
    """Whether what is printed and compared of it is as short as what attnfuzz writes, and can be printed."""
    names = {entry.host, *(name for known in entry.known for name in (known.oracle, known.kind, *known.features))}
    return (
        len(entry.known) <= _MAX_KNOWN
        and all(len(known.features) <= _MAX_FEATURES for known in entry.known)
        and all(len(name) <= _MAX_CHARACTERS and name.isprintable() for name in names)
    )


def _size(found: FoundElsewhere) -> tuple[object, ...]:
    if found.regression is None:
        raise ValueError("only bugs with a case are kept; this one has none")
    return len(found.regression.preceding), *size_key(found.regression.case)
