"""Bundled decode-attention kernels: the code attnfuzz is demonstrated on, in Triton and in PyTorch eager.

Each folder holds kernels, which are JIT code only, and in ``launch`` what checks arguments and launches them;
``common`` holds what they share. ``paged.paged_simple`` is the one to read first, and of prompts
``q_block.q_block_simple``. ``eager`` holds the PyTorch versions;
``bundled`` declares all of them to attnfuzz.

Names in kernels begin with what they hold: ``p_`` a pointer to a tensor, ``stride_`` the elements from one entry of an
axis to the next, ``i_`` the number of a sequence, head, page or token, ``o_`` numbers along an axis or offsets of a
block, ``m_`` whether these are within the tensor, ``b_`` the block of values that is loaded or computed.
"""
