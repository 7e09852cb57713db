"""Decides what is drawn next: cases, formats, and turns of the kernels."""
