"""How large drawn cases may be: small for Triton's interpreter, up to thousands of tokens for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Upper limits of one case. Where even the smallest supported shape exceeds a limit, that shape is drawn.

    * ``max_seqs``, ``max_seq_len``, ``max_tokens`` (of all sequences together), ``max_heads`` (query heads),
      ``max_splits``.
    * Elements: ``max_head_elements`` (query heads times head size), ``max_page_elements`` (one page of K or V),
      ``max_cache_elements`` (K or V of all tokens; of a dense one, padding included).
    * ``tile``: the most tokens of a step that count as one tile of work, of a kernel that has its tile as an option.
    * ``work``: choices for the work of one case, each as likely as the others, simplest first. Its unit is what one
      program of a kernel does with one tile of 16 tokens: a sequence of 40 tokens and 4 query heads counts 12.
    """

    max_seqs: int
    max_seq_len: int
    max_tokens: int
    max_heads: int
    max_splits: int
    max_head_elements: int
    max_page_elements: int
    max_cache_elements: int
    tile: int = 16
    work: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "work":
                if not value or min(value) < 1:
                    raise ValueError(f"Sizes(work={value!r}): must be a non-empty tuple of integers >= 1")
            elif not isinstance(value, int) or value < 1:
                raise ValueError(f"Sizes({field.name}={value!r}): must be an integer >= 1")


# Triton's interpreter took 2.5 ms for a program and 4.5 ms for a tile on a busy machine of 2 cores, and every case that
# passes runs the kernel twice.
CPU_SIZES = Sizes(
    max_seqs=6,
    max_seq_len=300,
    max_tokens=600,
    max_heads=48,
    max_splits=17,
    max_head_elements=4096,
    max_page_elements=1 << 15,
    max_cache_elements=1 << 18,
    tile=64,  # an operation on 64 rows takes little longer than one on 16
    work=(4, 6, 6, 8, 12, 16, 40),
)

GPU_SIZES = Sizes(
    max_seqs=64,
    max_seq_len=8192,
    max_tokens=16384,
    max_heads=64,
    max_splits=32,
    max_head_elements=16384,
    max_page_elements=1 << 17,
    max_cache_elements=1 << 23,
    tile=16,
    work=(8, 16, 32, 64, 256, 1024, 8192),
)
