"""Decode over K and V in one dense tensor each."""
