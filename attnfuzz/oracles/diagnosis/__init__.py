"""What a wrong number points to: mistakes are replayed in float64, and the first that gives this number is named.

Attention is linear in V, so what a kernel would return if it dropped a token, counted it twice or read another head
follows from the weights and values at hand. A `Suspect` is a family of such mistakes; `attribution` picks one.
"""

from attnfuzz.oracles.diagnosis.explain import explain as explain

__all__ = ["explain"]
