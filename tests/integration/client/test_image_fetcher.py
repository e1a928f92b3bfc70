"""The gateway fetches images from addresses that were checked, or from none."""

from __future__ import annotations

import io
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.gateway.images import ImageFetcher
from penstock.producer.inputs.images import split_prompt
from penstock.producer.openai.errors import OpenAIError
from penstock.shared.params.images import MAX_IMAGE_BYTES

from ..jobs.test_sender import NameServer, Server

Image = pytest.importorskip("PIL.Image")
LOOPBACK = ("127.0.0.0/8",)


def png() -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (3, 2), (255, 0, 0)).save(written, "PNG")
    return written.getvalue()


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Make the certificate of pictures.test, which this process trusts."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pictures.test"]
    command += ["-addext", "subjectAltName=DNS:pictures.test", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    NameServer(monkeypatch, **{"pictures.test": ["127.0.0.1"] * 9})
    return made


@pytest.fixture
async def fetcher() -> AsyncIterator[ImageFetcher]:
    made = ImageFetcher(is_allowed=True, networks=LOOPBACK, timeout_s=20.0)
    yield made
    await made.close()


def messages(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def answer(body: bytes, head: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def told(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(OpenAIError) as caught:
        await fetcher.fetched([messages(url)], "acme")
    error = caught.value
    assert (error.status, error.error_code) == (400, "invalid_image_url")
    assert error.param == "messages[0].content[1].image_url.url"
    return error.message


async def test_an_address_becomes_the_image_that_it_answers(fetcher: ImageFetcher, tls: ssl.SSLContext) -> None:
    async with Server(answer(png()), tls) as server:
        url = f"https://pictures.test:{server.port}/cat.png?a=b"
        prompts = await fetcher.fetched([messages(url), messages(url), "text"], "acme")
        assert [head.partition(b" HTTP")[0] for head in server.heads] == [b"GET /cat.png?a=b"]
    for prompt in prompts[:2]:
        bare, (image,) = split_prompt(prompt)
        assert image.data == png()
        assert bare[0]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}]
    assert prompts[2] == "text"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer(b"", b"HTTP/1.1 302 Found\r\nlocation: https://pictures.test/"), "answered with status 302"),
        (answer(b"no", b"HTTP/1.1 404 Not Found"), "answered with status 404"),
        (answer(b"<html>"), "is no image of a kind that is read"),
        (answer(png() + bytes(MAX_IMAGE_BYTES)), f"and at most {MAX_IMAGE_BYTES} may be sent"),
        (b"what\r\n\r\n", "cannot be fetched"),
    ],
    # Not the bytes: pytest puts the name of a test into the environment.
    ids=["redirect", "missing", "page", "large", "no HTTP"],
)
async def test_responses_that_are_no_images_are_refused(
    fetcher: ImageFetcher, tls: ssl.SSLContext, reply: bytes, words: str
) -> None:
    async with Server(reply, tls) as server:
        assert words in await told(fetcher, f"https://pictures.test:{server.port}/")


async def test_images_are_fetched_only_if_allowed_from_public_addresses_by_https(
    fetcher: ImageFetcher, tls: ssl.SSLContext
) -> None:
    guarded, none = ImageFetcher(is_allowed=True), ImageFetcher(is_allowed=False)
    async with Server(answer(png()), tls) as server:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "169.254.169.254"):
            assert "not a public address" in await told(guarded, f"https://{host}:{server.port}/")
        assert "this gateway does not fetch images" in await told(none, f"https://127.0.0.1:{server.port}/")
        assert "must be a data URL or begin with https" in await told(fetcher, f"http://127.0.0.1:{server.port}/")
        assert server.heads == []
    await guarded.close()
    data = messages("data:image/png;base64,AAAA")
    assert await none.fetched([data], "acme") == [data]
