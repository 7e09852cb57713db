"""Bundled decode-attention kernels: the code attnfuzz is demonstrated on, in Triton and in PyTorch eager.

Each folder holds kernels, which are JIT code only, and in ``launch`` what checks arguments and launches them;
``common`` holds what they share. ``paged.paged_simple`` is the one to read first. ``eager`` holds the PyTorch versions;
``bundled`` declares all of them to attnfuzz.
"""
