"""The origins whose pages are let in, and the headers for their browsers."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.producer.gateway.cors import cors
from penstock.producer.gateway.settings import GatewaySettings
from penstock.shared.errors import ConfigurationError


def browser(*origins: str) -> TestClient:
    """Return an application behind the middleware that ``cors`` makes of the origins."""
    GatewaySettings(redis_url="redis://localhost", cors_origins=origins)
    app = Starlette(
        routes=[Route("/", lambda _: PlainTextResponse("hi"), methods=["POST", "GET"])], middleware=cors(origins)
    )
    return TestClient(app)


def allowed(client: TestClient, origin: str) -> str | None:
    """Return the origin that may read the answer, by the request itself and by its preflight."""
    plain = client.get("/", headers={"origin": origin})
    response = client.options("/", headers={"origin": origin, "access-control-request-method": "POST"})
    assert plain.status_code == 200
    assert (response.status_code == 200) == ("access-control-allow-origin" in plain.headers)
    for answer in (plain, response):
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.headers.get("access-control-allow-origin") == plain.headers.get("access-control-allow-origin")
    return plain.headers.get("access-control-allow-origin")


def test_pages_may_read_all_headers() -> None:
    plain = browser("https://example.org").get("/", headers={"origin": "https://example.org"})
    assert plain.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("https://example.org", ["https://example.org"], ["http://example.org", "https://a.example.org"]),
        (
            "https://*.example.org",
            ["https://a.example.org", "https://a.b-c.example.org"],
            [
                "https://example.org",
                "https://.example.org",
                "http://a.example.org",
                "https://a.example.org:8443",
                "https://a.example.org.evil.com",
                "https://evil.com/a.example.org",
                "https://aexample.org",
                "https://axexamplexorg",
                "null",
            ],
        ),
        ("https://app-*.example.org", ["https://app-7f3.example.org"], ["https://app-a.b.example.org"]),
        ("http://localhost:*", ["http://localhost:5173", "http://localhost"], ["http://localhost:5173.evil.com"]),
        ("http://[::1]:3000", ["http://[::1]:3000"], ["http://[::1]"]),
    ],
)
def test_a_pattern_matches_its_origins(pattern: str, inside: list[str], outside: list[str]) -> None:
    client = browser("https://other.example", pattern)
    assert [allowed(client, origin) for origin in inside] == inside
    assert [allowed(client, origin) for origin in outside] == [None] * len(outside)
    assert allowed(client, "https://other.example") == "https://other.example"
    assert "origin" in client.get("/", headers={"origin": outside[0]}).headers["vary"].lower()


def test_an_asterisk_lets_every_page_in_without_credentials() -> None:
    assert allowed(browser("*"), "https://anybody.example") == "*"


def test_headers_of_sdks_are_allowed() -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = "authorization,content-type,last-event-id,x-stainless-os"
    response = browser("https://*.org").options("/", headers=headers)
    assert response.status_code == 200
    allow_headers: Any = response.headers["access-control-allow-headers"]
    assert set(allow_headers.split(",")) >= {"authorization", "x-stainless-os"}


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://*", "https://*:8000", "https://example.org/", "https://Example.org", "ftp://a", "", "**"],
)
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cors_origins must be origins .*, got"):
        browser(origin)
