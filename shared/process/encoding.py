"""What a terminal shows instead of characters that its encoding lacks."""

from __future__ import annotations

import codecs

# Error handler for a stream's encoder.
SHOWABLE = "penstock.showable"
_BLOCKS = "▁▂▃▄▅▆▇█"
# One character for one, so that tables keep their columns.
_ASCII = {
    **dict(zip(_BLOCKS, "_.-=+*%#", strict=True)),
    **dict.fromkeys("─━═", "-"),
    **dict.fromkeys("│┃║▌▐▎▊", "|"),
    **dict.fromkeys("╭╮╯╰┌┐┘└├┤┬┴┼", "+"),
    **dict.fromkeys("\u00a0\u202f", " "),
    **dict.fromkeys("·●", "*"),
    "…": "~",
    "→": ">",
    "←": "<",
    "↑": "^",
    "↓": "v",
}


def _showable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace drawings and spaces by ASCII, and write other characters, such as those of names, with escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if first in _ASCII:
        return _ASCII[first], error.start + 1
    alone = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    return codecs.backslashreplace_errors(alone)


codecs.register_error(SHOWABLE, _showable)
