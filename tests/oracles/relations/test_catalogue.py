"""Which relations there are, and which of them judge a case."""

from attnfuzz.oracles.relations import catalogue
from attnfuzz.oracles.verdict import RELATION_ORACLES, USUAL_ORACLES


def test_the_names_that_can_be_asked_for_are_those_of_the_catalogue() -> None:
    """A relation could not be asked for, or one that does not exist would judge nothing without a word."""
    assert tuple(relation.name for relation in catalogue.RELATIONS) == RELATION_ORACLES
    assert not set(RELATION_ORACLES) & set(USUAL_ORACLES)
