"""Valid URLs with Sentinels, and the passwords that they must not show."""

from __future__ import annotations

import pytest
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from penstock.shared.errors import ConfigurationError
from penstock.shared.redis_access.sentinel import PrimaryPool
from penstock.shared.redis_access.url import parse_pool
from penstock.shared.values.shown import mask_url


def addresses(pool: PrimaryPool) -> list[tuple[str, int]]:
    kwargs = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    return [(address["host"], address["port"]) for address in kwargs]


def test_hosts_name_user_and_options() -> None:
    url = "redis+sentinel://me:p%40ss@h1:1,h2,[::1]:3/main/4?client_name=app&sentinel_username=s&sentinel_password=t"
    pool = parse_pool(url, socket_connect_timeout=2)
    assert isinstance(pool, PrimaryPool)
    assert addresses(pool) == [("h1", 1), ("h2", 26379), ("::1", 3)]
    assert pool.service_name == "main"
    arguments = pool.connection_kwargs
    expected = {"username": "me", "password": "p@ss", "db": 4, "client_name": "app", "socket_connect_timeout": 2}
    assert {name: arguments[name] for name in expected} == expected
    assert isinstance(pool.make_connection(), SentinelManagedConnection)
    assert not isinstance(pool.make_connection(), SentinelManagedSSLConnection)
    for sentinel in pool.sentinel_manager.sentinels:
        kwargs = sentinel.connection_pool.connection_kwargs
        assert (kwargs["username"], kwargs["password"]) == ("s", "t")


def test_tls_is_for_servers_and_sentinels() -> None:
    pool = parse_pool("rediss+sentinel://h1,h2/main?ssl_cert_reqs=none")
    assert isinstance(pool, PrimaryPool)
    assert isinstance(pool.make_connection(), SentinelManagedSSLConnection)
    for connections in (pool, *(sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels)):
        assert connections.connection_kwargs["ssl_cert_reqs"] == "none"
    for sentinel in pool.sentinel_manager.sentinels:
        assert "SSL" in sentinel.connection_pool.connection_class.__name__


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h1:1,h2:2",
        "redis+sentinel:///main",
        "redis+sentinel://h1:port/main",
        "redis+sentinel://h1,/main",
        "redis+sentinel://h1/main?db=one",
        "redis+sentinel://u:secret@h1/main?sentinel_name=x",
    ],
)
def test_unreadable_urls_are_refused_with_a_reason(url: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        parse_pool(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis+sentinel://u:p%40@h1:1,h2:2/main", "redis+sentinel://u:***@h1:1,h2:2/main"),
        ("rediss+sentinel://:p@[::1]:1,[::2]:2/m?db=1", "rediss+sentinel://:***@[::1]:1,[::2]:2/m?db=1"),
        (
            "redis+sentinel://h1/m?password=p&sentinel_password=q",
            "redis+sentinel://h1/m?password=***&sentinel_password=***",
        ),
        ("redis+sentinel://h1/m", "redis+sentinel://h1/m"),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
