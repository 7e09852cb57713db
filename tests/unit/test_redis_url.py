"""attnfuzz.redis_url: an address is checked before a campaign starts, and its password is never shown."""

from __future__ import annotations

import pytest

from attnfuzz.redis_url import check_redis_url, without_password


@pytest.mark.parametrize(
    "url", ["redis://head", "redis://head:7000", "redis://10.0.0.1:7000/3", "rediss://u:p@head/0", "redis://[::1]:1/0"]
)
def test_an_address_passes(url: str) -> None:
    """A valid server would be refused."""
    assert check_redis_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "head:6379",
        "http://head",
        "redis://",
        "redis://head:port",
        "redis://head:70000",
        "redis://head:0",
        "redis://head/zero",
        "redis://head/0/1",
        "redis://head/0?db=2",
        "redis://[::1",
        "",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """The client would fail later, in a thread, with words of its own."""
    with pytest.raises(ValueError, match=r"must be redis://HOST\[:PORT\]\[/DB\].*; write for example"):
        check_redis_url(url)


def test_the_password_is_not_shown() -> None:
    """Logs of a cluster are read by many."""
    assert without_password("redis://user:secret@head/0") == "redis://user:***@head/0"
    assert without_password("redis://:sec@ret@head/0") == "redis://:***@head/0"
    assert without_password("redis://head/0") == "redis://head/0"
    with pytest.raises(ValueError, match="must be") as caught:
        check_redis_url("http://user:secret@head")
    assert "secret" not in str(caught.value)
