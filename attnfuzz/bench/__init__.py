"""Times of kernels, and the choice of their options."""
