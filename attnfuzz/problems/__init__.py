"""Cases: their fields, the shapes that follow, and what kernels declare to take of them. Torch-free."""
