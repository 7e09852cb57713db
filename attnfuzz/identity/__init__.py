"""Which bug a failure is, decided here and nowhere else.

`bug` says when a failure is *predicted* by a bug that is known, which takes no run, and when two findings are one;
`asking` runs nearby cases where that does not tell. Oracles and kinds do not separate bugs, since they say where
a mistake was seen: other results, another cause, or a relative that fails without what the known bug needs do.
"""
