"""Why two runs on the same inputs disagree: by themselves, by unwritten memory, or by dead memory."""

from typing import Literal

from attnfuzz.judging.trial import Trial

__all__ = ["Cause", "cause_of_difference"]

Cause = Literal["determinism", "unwritten", "dead_memory"]


def cause_of_difference(trial: Trial) -> Cause | None:
    """None if both runs agree. Takes up to two further runs."""
    if trial.second is None or not trial.symptoms.differs:
        return None
    promised = trial.kernel.declaration.supports.deterministic
    if promised and bool(trial.disagree(trial.first, trial.repeated)):
        return "determinism"
    return "unwritten" if bool(trial.disagree(trial.first, trial.prefilled_otherwise)) else "dead_memory"
