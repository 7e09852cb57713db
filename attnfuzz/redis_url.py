"""The address of a Redis server: ``redis://[USER:PASSWORD@]HOST[:PORT][/DB]``. Needs no Redis client."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["check_redis_url", "without_password"]

_SCHEMES = ("redis", "rediss")
_RULE = "must be redis://HOST[:PORT][/DB], or rediss:// for TLS"
_EXAMPLE = "write for example redis://head-node:6379/0"
_LARGEST_DATABASE = 1 << 16


def check_redis_url(url: str) -> str:
    """``url`` as it is. Raises ValueError, without a password that it may hold, if it is no address of a server."""
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # an unclosed bracket, a port that is no number
        raise ValueError(f"{shown!r} {_RULE} ({error}); {_EXAMPLE}") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError(f"{shown!r} {_RULE}; {_EXAMPLE}")
    if port == 0 or parts.query or parts.fragment or not _is_database(parts.path):
        wrong = "port 0" if port == 0 else repr(f"{parts.path}{'?' if parts.query else ''}{parts.query}")
        raise ValueError(f"{shown!r} {_RULE}, and cannot have {wrong}; {_EXAMPLE}")
    return url


def without_password(url: str) -> str:
    """``url`` fit to be shown and saved."""
    before, separator, place = url.rpartition("@")
    if not separator or "//" not in before:
        return url
    scheme, slashes, secret = before.partition("//")
    user = secret.partition(":")[0]
    return f"{scheme}{slashes}{user}:***@{place}"


def _is_database(path: str) -> bool:
    number = path.strip("/")
    return not number or (number.isascii() and number.isdecimal() and int(number) < _LARGEST_DATABASE)
