"""Prefill, decode and mixed batches: query tokens times heads in one block."""
