"""What bundled and user kernels are compared with, where it is installed: one module per project."""
