"""Read multipart/form-data as a stream: a file is passed on chunk by chunk and is never whole in memory.

Starlette's form parser would first write the file to a temporary one, on a disk that may be memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ..openai.errors import OpenAIError, bad_field

MAX_FIELD_BYTES = 16 * 1024
MAX_PARTS = 32
MAX_HEADER_BYTES = 8 * 1024


class FormPart(msgspec.Struct, frozen=True):
    """A part: a file if it has a ``filename``. Read all ``chunks`` before requesting the next part."""

    name: str
    filename: str | None
    chunks: AsyncIterator[bytes]

    async def text(self) -> str:
        """Return the whole text of a field that is not a file.

        Raises:
            OpenAIError: 400, it is too long, or not text.
        """
        value = b""
        async for chunk in self.chunks:
            value += chunk
            if len(value) > MAX_FIELD_BYTES:
                raise bad_field(self.name, f"{self.name} must have at most {MAX_FIELD_BYTES} bytes")
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise bad_field(self.name, f"{self.name} must be text in UTF-8") from None


class _Head(msgspec.Struct):
    """The headers of a part, as far as they have been received."""

    headers: dict[bytes, bytes]
    name: bytes = b""
    value: bytes = b""


class FormReader:
    """Reader of a request's form.

    Raises:
        OpenAIError: 400, the request has no form.
    """

    def __init__(self, request: Request) -> None:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise OpenAIError(400, "the body must be multipart/form-data with a boundary", code="invalid_form")
        self._stream = request.stream()
        self._parts: deque[tuple[str, str | None]] = deque()
        # Received data of the current part. None marks its end.
        self._data: deque[bytes | None] = deque()
        self._head = _Head({})
        self._ended = False
        callbacks = {
            "on_part_begin": self._start_part,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
            "on_part_end": lambda: self._data.append(None),
            "on_end": self._end_form,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]  # a TypedDict of these
        except MultipartParseError as error:
            raise _malformed(error) from error

    async def parts(self) -> AsyncGenerator[FormPart]:
        """Iterate over the parts.

        Raises:
            OpenAIError: 400, the form is malformed or has too many parts.
            ClientDisconnect: the client disconnected before the end.
        """
        for _ in range(MAX_PARTS):
            while not self._parts:
                if self._ended:
                    return
                await self._parse_more()
            name, filename = self._parts.popleft()
            yield FormPart(name, filename, self._chunks())
        raise OpenAIError(400, f"the form must have fewer than {MAX_PARTS} parts", code="invalid_form")

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while True:
            while not self._data:
                await self._parse_more()
            chunk = self._data.popleft()
            if chunk is None:
                return
            yield chunk

    async def _parse_more(self) -> None:
        """Receive and parse the next piece of the body."""
        chunk = await anext(self._stream, b"")
        if not chunk:
            raise OpenAIError(400, "the form is incomplete", code="invalid_form")
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise _malformed(error) from error

    def _start_part(self) -> None:
        self._head = _Head({})

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._head.name = _extend_header(self._head.name, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._head.value = _extend_header(self._head.value, data[start:end])

    def _header_end(self) -> None:
        self._head.headers[self._head.name.lower()] = self._head.value
        self._head.name = self._head.value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._head.headers.get(b"content-disposition"))
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise OpenAIError(400, "each part of the form must have a name", code="invalid_form")
        self._parts.append((_decoded_text(name), None if filename is None else _decoded_text(filename)))

    def _end_form(self) -> None:
        self._ended = True


def _extend_header(header: bytes, rest: bytes) -> bytes:
    if len(header) + len(rest) > MAX_HEADER_BYTES:
        raise OpenAIError(400, f"a header in the form must have at most {MAX_HEADER_BYTES} bytes", code="invalid_form")
    return header + rest


def _decoded_text(value: bytes) -> str:
    return value.decode(errors="replace")


def _malformed(error: MultipartParseError) -> OpenAIError:
    return OpenAIError(400, f"the form cannot be read: {error}", code="invalid_form")
