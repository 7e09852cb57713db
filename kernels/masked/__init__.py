"""Attention under a mask, and what launches it."""
