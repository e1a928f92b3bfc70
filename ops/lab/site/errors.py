"""The page of all errors: their codes, and how the gateway answers with them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from ....producer.openai.errors import error_of
from ....shared import errors
from .tables import split_docstring, table

PAGE = "reference/errors.md"
# Not in a link.
_NAME = re.compile(r'(?<!">)<code>(\w+Error)</code>(?!</a>)')


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "# Errors",
        "",
        "Penstock raises only these classes on purpose. All are in `penstock.shared.errors`. `error.code` is for",
        "programs, and `error.retryable` says whether the same call may succeed later. The gateway answers with an",
        "HTTP status and with a code in the body's `error.code`; the code is null where OpenAI's API has none.",
        "",
    )
    header = ("class and code", "retry", "status and code over HTTP", "meaning")
    yield from table(header, (_row(kind) for kind in _classes()))


def link_names(html: str, page: str) -> str:
    """Return the text of ``page`` with links from the names of errors to their rows."""
    names = {kind.__name__ for kind in _classes()}
    target = posixpath.relpath(PAGE.replace(".md", ".html"), posixpath.dirname(page) or ".")

    def link(match: re.Match[str]) -> str:
        return f'<a href="{target}#{match[1]}">{match[0]}</a>' if match[1] in names else match[0]

    return html if page == PAGE else _NAME.sub(link, html)


def _classes() -> list[type[errors.PenstockError]]:
    """Return the classes in the order of their module."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PenstockError)]


def _row(kind: type[errors.PenstockError]) -> tuple[str, ...]:
    # Some classes have required arguments, which do not affect the status.
    answer = error_of(kind.__new__(kind))
    meaning, _ = split_docstring(kind.__doc__ or "")
    (base, *_) = kind.__bases__
    if base not in (errors.PenstockError, Exception):
        meaning += f" It is a `{base.__name__}`."
    name = f'<a id="{kind.__name__}"></a>`{kind.__name__}`<br>`{kind.code}`'
    status = f"{answer.status}<br>`{answer.error_code}`" if answer.error_code else str(answer.status)
    return name, "yes" if kind.retryable else "", status, meaning
