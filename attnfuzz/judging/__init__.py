"""Judging a case, or a batch: the runs of a kernel, what they should give, and the oracles asked in order."""
