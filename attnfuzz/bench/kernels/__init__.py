"""Times of attention kernels beside those of what else is installed, on one GPU, in one run."""
