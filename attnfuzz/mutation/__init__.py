"""How good a suite is: mutants of a Triton kernel's source, each with one bug, and what finds them.

`operators` say what may go wrong, `generation` makes the mutants of the code that a kernel reaches (`reachable`), and
`measurement` sets attnfuzz's search, or a command of the user's, on each of them.
"""
