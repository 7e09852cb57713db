"""Bundled decode-attention kernels: the code attnfuzz is demonstrated on, in Triton and in PyTorch eager.

Files named after a kernel hold JIT code only; ``launch`` and ``launch_paged`` check arguments and launch;
``eager`` holds the PyTorch versions; ``bundled`` declares all of them to attnfuzz.
"""
