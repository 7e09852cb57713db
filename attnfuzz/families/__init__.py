"""Problems that engines have and that are made of the same parts as a user's own: `attnfuzz.Problem`, one file each.

A kernel is declared with an instance: ``@attnfuzz.kernel(CacheWrite(block_size=attnfuzz.Choice((16,))))``.
"""

from attnfuzz.families.block_sparse import BlockSparse as BlockSparse
from attnfuzz.families.cache_write import CacheWrite as CacheWrite
from attnfuzz.families.history import History as History
from attnfuzz.families.hybrid_decode import HybridDecode as HybridDecode
from attnfuzz.families.indexer_topk import IndexerTopk as IndexerTopk
from attnfuzz.families.latent_verify import LatentVerify as LatentVerify
from attnfuzz.families.merge_ranks import MergeRanks as MergeRanks
from attnfuzz.families.packed_decode import PackedDecode as PackedDecode
from attnfuzz.families.recurrent_decode import RecurrentDecode as RecurrentDecode
from attnfuzz.families.sparse_decode import SparseDecode as SparseDecode
from attnfuzz.families.turbo import TurboDecode as TurboDecode
from attnfuzz.families.turbo import TurboWrite as TurboWrite
from attnfuzz.families.written_decode import WrittenDecode as WrittenDecode

__all__ = [
    "BlockSparse",
    "CacheWrite",
    "History",
    "HybridDecode",
    "IndexerTopk",
    "LatentVerify",
    "MergeRanks",
    "PackedDecode",
    "RecurrentDecode",
    "SparseDecode",
    "TurboDecode",
    "TurboWrite",
    "WrittenDecode",
]
