"""What a wrong number points to: mistakes are replayed in float64, and the first that gives this number is named.

Attention is linear in V, so what a kernel would return if it dropped a token, counted it twice or read another head
follows from the weights and values at hand. A `Suspect` is a family of such mistakes; `attribution` picks one.
"""

from attnfuzz.oracles.diagnosis.explain import Compared as Compared
from attnfuzz.oracles.diagnosis.explain import explain as explain
from attnfuzz.oracles.diagnosis.explain import explain_lse as explain_lse
from attnfuzz.oracles.diagnosis.explain import explain_row as explain_row
from attnfuzz.oracles.diagnosis.explain import lse_mistakes as lse_mistakes
from attnfuzz.oracles.diagnosis.explain import output_mistakes as output_mistakes
from attnfuzz.oracles.diagnosis.explain import past_the_end_within_bounds as past_the_end_within_bounds
from attnfuzz.oracles.diagnosis.row import Diagnosis as Diagnosis

__all__ = [
    "Compared",
    "Diagnosis",
    "explain",
    "explain_lse",
    "explain_row",
    "lse_mistakes",
    "output_mistakes",
    "past_the_end_within_bounds",
]
