"""Chooses a kernel's options by measuring: micro-benchmarks over ragged batches, then a small decision tree."""
