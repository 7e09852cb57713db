"""The problems that come with attnfuzz, a file each: what kernels get, what is computed, how cases are drawn."""
