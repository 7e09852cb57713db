"""Decode and prefill over a block table, one query head a program."""
