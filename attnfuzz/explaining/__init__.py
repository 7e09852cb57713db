"""Find what a wrong result points to: mistakes are replayed on a row, of one run or of measured weights, and told.

A `row` is what one query token and head average. `mistakes` says what a mistake gives of one, and which give what came
out; `tokens`, `formulas`, `merges` and `low_precision` make them. `diagnose` replays all of them on the wrong rows of a
run, and has `neighbours` of the case decide which is told; of roundings, `precision` decides by runs in which each
shows by itself.

`explain` makes further runs. Attention is linear in V: with basis vectors for V, the output is the weight that each
place of the cache was given (`weights`). That is a row as well (`measured_row`), on which the same mistakes are
replayed, beside what only weights of places can tell. Where a value that must not matter enters the result
is found by changing parts of memory and bisecting (`influences`). `ablation` changes the case instead. `operations`
finds the line of the kernel that a rounding comes from. Only `explanation` and `ablation` are for the driver; the rest
needs torch.
"""
