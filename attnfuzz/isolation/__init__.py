"""Running code that may crash, hang or eat memory in processes of its own.

A `Zygote` imports what is slow to import; each `Executor` is forked from it in milliseconds, answers calls to a
`Service`, and takes nothing with it when it dies.
"""

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import (
    Died,
    ExecutorUnavailable,
    Outcome,
    Reply,
    ServiceError,
    TimedOut,
)
from attnfuzz.isolation.serve import ExitAfterReply, Service
from attnfuzz.isolation.zygote_client import Zygote

__all__ = [
    "Died",
    "Executor",
    "ExecutorUnavailable",
    "ExitAfterReply",
    "Outcome",
    "Reply",
    "Service",
    "ServiceError",
    "TimedOut",
    "Zygote",
]
