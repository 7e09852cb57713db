"""What runner and judging service say to each other about explaining a failing case: JSON, torch-free."""

import msgspec

from attnfuzz.explaining.explanation import Explanation
from attnfuzz.oracles.verdict import OracleName

__all__ = ["CauseLinesRequest", "ExplainReply", "ExplainRequest"]


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Explain what the kernel `target` does wrong on `case`, the JSON of a case of its problem, as `oracle` says.

    No run of the kernel begins after so many `seconds`.
    """

    target: str
    case: msgspec.Raw
    oracle: OracleName
    seconds: float


class ExplainReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`last`: the process may not be usable after what the kernel did in it, and ends."""

    explanation: Explanation
    last: bool = False


class CauseLinesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Find the lines of the kernel `target` at which one of the roundings `replays` is made, by a run of `case`.

    On a GPU this must be the first run of the process. What comes is an `ExplainReply`.
    """

    target: str
    case: msgspec.Raw
    replays: tuple[str, ...]
