"""Attention states over disjoint keys become one."""
