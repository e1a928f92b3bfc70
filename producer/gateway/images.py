"""Fetch the images that a body names by https, if the operator allows it.

The bytes are stored in Redis with the request, so a resumed request sees the same image even if the address serves
another one by then. The addresses allowed are the same as for webhooks: public ones, and networks that the operator
names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ...shared.errors import ValidationError
from ...shared.params.images import MAX_IMAGE_BYTES, MAX_IMAGES, check_image_bytes
from ...shared.values.shown import shown
from ..inputs.images import MAX_TOTAL_BYTES, image_url_of, is_data_url, is_image_part
from ..inputs.prompt import Prompt
from ..openai.errors import OpenAIError, bad_field
from ..webhooks.addresses import MAX_URL_CHARS, Networks
from ..webhooks.guarded_http import ForbiddenAddressError, GuardedHTTP

TIMEOUT_S = 10.0
_HEADERS = {"Accept": "image/png, image/jpeg, image/webp, image/gif", "User-Agent": "penstock"}
INVALID_URL = "invalid_image_url"


@dataclass
class _ByteBudget:
    """Number of bytes left for the images of one body."""

    num_bytes: int


class ImageFetcher:
    """Replaces the URLs of images by the images themselves.

    Args:
        is_allowed: whether URLs are fetched at all.
        networks: private networks that may be contacted too; see ``Networks``.
    """

    def __init__(self, *, is_allowed: bool, networks: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> None:
        self._is_allowed = is_allowed
        self._timeout_s = timeout_s
        self._networks = Networks(networks)
        self._http: GuardedHTTP | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def fetched(self, prompts: Sequence[Prompt], tenant: str) -> Sequence[Prompt]:
        """Return the prompts of a body of ``tenant`` with the bytes of their images.

        Raises:
            OpenAIError: 400, a URL may not be fetched, or returns no image; names the field.
        """
        fields = {url: field for prompt in prompts for field, url in _image_urls(prompt)}
        if not fields:
            return prompts
        if self._is_allowed and self._http is None:
            # In a thread, because it reads certificates from the disk.
            remedy = "start 'penstock gateway' with --image-network and its network"
            self._http = await asyncio.to_thread(
                GuardedHTTP, self._networks, connect_timeout_s=self._timeout_s / 3, remedy=remedy
            )
        if len(fields) > MAX_IMAGES:
            raise _image_refusal("messages", f"name {len(fields)} images; a request has at most {MAX_IMAGES}")
        budget = _ByteBudget(MAX_TOTAL_BYTES)
        contents = await asyncio.gather(*(self._fetch(field, url, budget, tenant) for url, field in fields.items()))
        images = dict(zip(fields, contents, strict=True))
        return [_with_images(prompt, images) for prompt in prompts]

    async def _fetch(self, field: str, url: str, budget: _ByteBudget, tenant: str) -> bytes:
        if urlsplit(url).scheme != "https" or len(url) > MAX_URL_CHARS:
            raise _image_refusal(field, f"must be a data URL or begin with https://, got {shown(url)}")
        if self._http is None:
            raise _image_refusal(
                field,
                "is an image URL, and this gateway does not fetch images; send the image as a data URL, or start "
                "'penstock gateway' with --fetch-images on",
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                return check_image_bytes(field, await self._read_image(self._http, field, url, budget, tenant))
        except ForbiddenAddressError as error:
            raise _image_refusal(field, f"must not be fetched: {error}") from error
        except TimeoutError as error:
            raise _image_refusal(field, f"was not received within {self._timeout_s:g} s, got {shown(url)}") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            if isinstance(error, ValidationError):
                raise _image_refusal(field, str(error).removeprefix(field).strip()) from error
            raise _image_refusal(field, f"cannot be fetched ({type(error).__name__}), got {shown(url)}") from error

    async def _read_image(self, http: GuardedHTTP, field: str, url: str, budget: _ByteBudget, tenant: str) -> bytes:
        response = await http.open("GET", url, _HEADERS, tenant=tenant)
        try:
            if response.status_code != httpx.codes.OK:
                raise _image_refusal(field, f"answered with status {response.status_code}, got {shown(url)}")
            data = bytearray()
            # Raw, because decompressed data could become arbitrarily large. Image formats have their own compression.
            async for chunk in response.aiter_raw():
                data += chunk
                budget.num_bytes -= len(chunk)
                if budget.num_bytes < 0:
                    raise _image_refusal(
                        field, f"and the images before it have more than {MAX_TOTAL_BYTES} bytes together"
                    )
                if len(data) > MAX_IMAGE_BYTES:
                    break
            return bytes(data)
        finally:
            await response.aclose()


def _image_urls(prompt: Any) -> list[tuple[str, str]]:
    """Return the field and URL of each image of a conversation that is not a data URL."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return []
    urls: list[tuple[str, str]] = []
    for at, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if is_image_part(part) and "image_url" in part:
                field, url = image_url_of(f"messages[{at}].content[{number}]", part)
                if not is_data_url(url):
                    urls.append((field, url))
    return urls


def _with_images(prompt: Any, images: dict[str, bytes]) -> Any:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return prompt
    return [_message_with_images(message, images) for message in prompt]


def _message_with_images(message: Any, images: dict[str, bytes]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part_with_image(part, images) for part in content]}


def _part_with_image(part: Any, images: dict[str, bytes]) -> Any:
    if not is_image_part(part) or "image_url" not in part:
        return part
    _, url = image_url_of("content", part)
    data = images.get(url)
    return part if data is None else {"type": "image", "image": data}


def _image_refusal(field: str, reason: str) -> OpenAIError:
    return bad_field(field, f"{field} {reason}", code=INVALID_URL)
