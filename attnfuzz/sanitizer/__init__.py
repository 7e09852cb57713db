"""Cases under NVIDIA's compute-sanitizer, which looks at each access of a kernel: far slower, and sees other things.

An ordinary executor cannot be sanitized: it is forked from a process that has everything imported, while the tool has
to start what it looks at. So cases are run by processes of their own (`target`), a batch in each.
"""
