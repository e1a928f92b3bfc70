"""The Markdown of a document as the site needs it: the sources have it as it works in the repository."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from mkdocs.structure.files import File, Files

_FENCE = re.compile(r"^ *```.*?^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_EXTERNAL = re.compile(r"[a-z]+:|#|/")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"(`+).+?\1")


class Links:
    """Links between the files of a site.

    Args:
        root: folder of the repository.
        files: pages of the site.
        examples: files of the repository by the pages that show them.
    """

    def __init__(self, root: Path, files: Files, examples: Mapping[str, Path]) -> None:
        self._root = root
        self._pages = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
        self._pages |= {path: page for page, path in examples.items()}

    def rewrite(self, markdown: str, file: File) -> str:
        """Return the text of ``file`` with links to pages of the site."""
        if file.abs_src_path is None:
            return markdown
        source = Path(file.abs_src_path)

        def replace(match: re.Match[str]) -> str:
            return match[0] if _EXTERNAL.match(match["target"]) else self._link(match, source, file.src_uri)

        parts: list[str] = []
        end = 0
        for fence in _FENCE.finditer(markdown):
            parts += [_LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*parts, _LINK.sub(replace, markdown[end:])])

    def _link(self, match: re.Match[str], source: Path, page: str) -> str:
        target, _, anchor = match["target"].partition("#")
        path = (source.parent / target).resolve()
        linked = self._pages.get(path)
        if linked is not None:
            relative = posixpath.relpath(linked, posixpath.dirname(page) or ".")
            return f"{match['text']}({relative}{anchor and f'#{anchor}'})"
        # The site has no other file of the repository, so the text names it. MkDocs refuses a path that leads nowhere.
        is_in_repository = path.is_relative_to(self._root) and path.exists()
        return match["text"][1:-1] if is_in_repository else match[0]


def show_pipes(markdown: str) -> str:
    """Return the text without the backslashes that GitHub needs before a ``|`` in the code of a table."""
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
