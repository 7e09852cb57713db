"""Asking the oracles of a kernel's own file about a run that all usual oracles are content with."""

from collections.abc import Sequence

from attnfuzz.inputs.registry import problem_of
from attnfuzz.oracles.own import OracleError, OwnOracle, Run
from attnfuzz.trials.trial import Trial
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.verdict import Failure

_OF_ATTENTION = ("out", "lse")
"""Results that are compared; others are parts of partial results, whose other parts nobody knows."""


def check(oracles: Sequence[OwnOracle], trial: Trial) -> Failure | None:
    """The objection of the first of ``oracles`` that has one. Raises `OracleError` for one that cannot judge."""
    for oracle in oracles:
        said = _said(oracle, _run_of(trial))
        if said is not None:
            sentence, *more = said.splitlines()
            return Failure(oracle=oracle.name, kind="", message=sentence, details=tuple(more))
    return None


def _said(oracle: OwnOracle, run: Run) -> str | None:
    try:
        said = oracle(run)
    except AssertionError as error:
        return text_of(error) or f"this does not hold: {oracle.description or oracle.name}"
    except Exception as error:
        raise OracleError(
            f"the oracle {oracle.name} raised {type_name(error)}: {text_of(error)}; what is wrong with a kernel it "
            "returns, or says with an assert that fails"
        ) from error
    if said is None or (isinstance(said, str) and said):
        return said
    raise OracleError(f"the oracle {oracle.name} returned {said!r:.80}; it must return a sentence, or None")


def _run_of(trial: Trial) -> Run:
    case, supports = trial.case, trial.kernel.declaration.supports
    problem = problem_of(case)
    right = (pair for pair in trial.comparison if problem.targets is not None or pair.name in _OF_ATTENTION)
    return Run(
        case,
        results={name: result.detach().cpu().clone() for name, result in trial.first.results.items()},
        expected={pair.name: pair.expected.cpu().clone() for pair in right},
        build=lambda: problem.inputs(case, problem.filled(case, supports)),
    )
