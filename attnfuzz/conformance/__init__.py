"""A fixed set of cases, put to the kernels of all engines: what passes, what fails, what is not supported."""

from attnfuzz.conformance.cases import ConformanceSet as ConformanceSet
from attnfuzz.conformance.cases import Entry as Entry
from attnfuzz.conformance.cases import load_set as load_set
from attnfuzz.conformance.running import Conformance as Conformance
from attnfuzz.conformance.running import Examined as Examined
from attnfuzz.conformance.running import Outcome as Outcome
from attnfuzz.conformance.running import examine as examine

__all__ = ["Conformance", "ConformanceSet", "Entry", "Examined", "Outcome", "examine", "load_set"]
