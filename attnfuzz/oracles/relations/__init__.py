"""Oracles that run the kernel again on a case whose result follows from the first one, without any tolerance if it can.

Accuracy holds each run against float64, so by the triangle inequality two runs within their bounds are within the sum
of both: a relation that compares by bounds sees nothing that accuracy does not see on the changed case. What these are
for is numbers that are wrong within their bounds and yet depend on something that they must not depend on. Relations
compare bits wherever the mathematics or the kernel's declaration promises them.
"""
