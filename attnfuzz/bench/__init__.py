"""Measures attnfuzz itself: cases per second, what the harness costs, what hostile kernels cost the others."""
