"""Judges of one kernel run: what may not happen whatever the inputs, and how far a result may be from the reference."""
