"""Oracles: what may not happen in a run whatever the inputs, and how far a result may be from the reference."""
