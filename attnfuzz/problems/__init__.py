"""What is computed: cases, the tensors built from them, and the float64 reference.

Torch-free: supports, recipes, cases, hashing, strides, shapes, block_table, limits.
With torch: allocation, layouts, reference, one module per problem, and registry, which finds them.
"""
