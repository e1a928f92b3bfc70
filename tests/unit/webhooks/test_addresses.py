"""Addresses that a webhook may lead to, however they are spelled."""

from __future__ import annotations

import ipaddress

import pytest

from penstock.producer.webhooks.addresses import Networks, check_literal, check_url, literal_address
from penstock.shared.errors import ConfigurationError, ValidationError


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.31.255.255",
        "192.168.0.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:10.0.0.1",
        "64:ff9b::169.254.169.254",
        "2002:a9fe:a9fe::",
        "2001:0:4136:e378:8000:63bf:5601:5601",  # Teredo, to 169.254.169.254
        "192.0.0.9",
        "192.0.2.1",
        "192.31.196.1",
        "192.52.193.1",
        "192.88.99.1",
        "192.175.48.1",
        "198.51.100.1",
        "203.0.113.1",
        "::10.0.0.1",
        "::8.8.8.8",
        "::ffff:0:10.0.0.1",
        "64:ff9b:1::8.8.8.8",
        "100::1",
        "100:0:0:1::1",
        "2001:1::1",
        "2001:2::1",
        "2001:4:112::1",
        "2001:20::1",
        "2001:db8::1",
        "2606:4700::5efe:10.0.0.1",
        "2606:4700::200:5efe:10.0.0.1",
        "2620:4f:8000::1",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fe80::5efe:8.8.8.8",
        "fec0::1",
        "feff::1",
        "ff0e::1",
    ],
)
def test_private_addresses_are_called_only_if_allowed(address: str) -> None:
    parsed = ipaddress.ip_address(address)
    assert not Networks().permits(parsed)
    assert not Networks(["10.9.0.0/16", "fd00:1::/32"]).permits(parsed)
    assert Networks(["all"]).permits(parsed)
    assert Networks([f"{address}/{parsed.max_prefixlen}"]).permits(parsed)


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::8.8.8.8", "2606:4700::5efe:8.8.8.8"],
)
def test_public_addresses_are_called(address: str) -> None:
    assert Networks().permits(ipaddress.ip_address(address))


def test_a_named_network_counts_inside_ipv6_too() -> None:
    assert Networks(["10.0.0.0/8"]).permits(ipaddress.ip_address("::ffff:10.0.0.1"))
    with pytest.raises(ConfigurationError, match="allowed_networks"):
        Networks(["the office"])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "a.localhost", "127.1", "2130706433", "0x7f.1", "0177.0.0.1"]
)
def test_loopback_is_known_however_it_is_spelled(host: str) -> None:
    address = literal_address(host)
    assert address is not None
    assert address.is_loopback
    with pytest.raises(ValidationError, match="not a public address"):
        check_literal(f"http://{host}/", Networks())


def test_a_name_is_no_address() -> None:
    assert literal_address("example.com") is None
    check_literal("https://example.com/hook", Networks())


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "example.com/hook",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://",
        "http://a:b@example.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://[::1/",
        "http://example.com/\r\nHost: other",
        "http://example.com/ a",
        "https://example.com/" + "a" * 2048,
    ],
)
def test_invalid_urls_are_refused_by_name(url: object) -> None:
    with pytest.raises(ValidationError, match="webhook_url"):
        check_url(url)
