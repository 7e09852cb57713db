"""What a case is made of, and how it is changed. Torch-free."""
