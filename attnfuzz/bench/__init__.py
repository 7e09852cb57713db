"""Measures attnfuzz itself (cases per second, what the harness and hostile kernels cost), and the times of kernels."""
