"""All providers, whether installed or not."""

from __future__ import annotations

from attnfuzz.bench.kernels.messages import ProviderReply
from attnfuzz.bench.kernels.providers.flash_attention import FLASH_ATTENTION
from attnfuzz.bench.kernels.providers.flashinfer import FLASHINFER
from attnfuzz.bench.kernels.providers.provider import Provider
from attnfuzz.bench.kernels.providers.pytorch import PYTORCH
from attnfuzz.bench.kernels.providers.servers import SERVERS
from attnfuzz.environment import installed

__all__ = ["PROVIDERS", "described"]

PROVIDERS: tuple[Provider, ...] = (*PYTORCH, *FLASH_ATTENTION, *FLASHINFER, *SERVERS)


def described(provider: Provider) -> ProviderReply:
    """What the driver needs to know of it."""
    return ProviderReply(
        name=provider.name,
        about=provider.about,
        version=installed(provider.package),
        kinds=provider.kinds,
        takes_pages=provider.takes_pages,
        options=provider.options,
    )
