"""The tensors of a case: allocated, written, handed to a kernel, and what is to come of them."""
