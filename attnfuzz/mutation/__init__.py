"""How good a suite is: mutants of a Triton kernel's source, each with one bug, and what finds them.

`operators` say what may go wrong, `mutants` makes the changes in the code that a kernel reaches, and `measurement` sets
attnfuzz's search (`hunting`), or a command of the user's, on each of them.
"""
