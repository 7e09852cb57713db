"""Where a case's tensors live: poisoned memory with red zones, for inputs, outputs and what kernels allocate."""
