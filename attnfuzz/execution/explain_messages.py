"""What runner and judging service say to each other about explaining a failing case: JSON, torch-free."""

import msgspec

from attnfuzz.explaining.explanation import Explanation
from attnfuzz.oracles.verdict import OracleName

__all__ = ["ExplainReply", "ExplainRequest"]


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
