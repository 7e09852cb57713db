"""Kernels of latent attention, and what launches them."""
