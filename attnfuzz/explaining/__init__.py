"""A finding explains itself: the weight of every token, where stray values enter, which change makes the case pass.

Attention is linear in V. A run with basis vectors for V therefore shows, in the output, the weight that each place of
the cache was given (`weights`). What is wrong with them is put into words (`reading`, `patterns`). Where a value that
must not matter enters the result is found by changing parts of memory and bisecting (`influences`). `ablation` changes
the case instead. Only `explanation` and `ablation` are for the driver; the rest needs torch and runs the kernel.
"""
