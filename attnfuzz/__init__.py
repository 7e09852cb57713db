"""attnfuzz: differential testing and fuzzing of LLM decode-attention kernels."""
