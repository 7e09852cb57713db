"""What runner and judging service say to each other about explaining a failing case: JSON, torch-free."""

import msgspec

from attnfuzz.explaining.explanation import Explanation

__all__ = ["ExplainReply", "ExplainRequest"]


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Explain what the kernel `target` does wrong on `case`, the JSON of a case of its problem.

    No run of the kernel begins after so many `seconds`.
    """

    target: str
    case: msgspec.Raw
    seconds: float


class ExplainReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`last`: the process may not be usable after what the kernel did in it, and ends."""

    explanation: Explanation
    last: bool = False
