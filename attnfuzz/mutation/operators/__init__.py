"""What may go wrong in an attention kernel: each operator makes one change at a time at every place that it fits.

An operator is a function from a `Function` to the changes that it makes there; `catalogue` names all of them.
"""
