"""Decode over pages that layers of several kinds share."""
