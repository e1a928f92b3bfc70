"""Files of the repository that are pages of the site, besides those in ``ops/guide``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "ops" / "guide"
_SINGLE = {
    "index.md": "README.md",
    "guide.md": "ops/guide/README.md",
    "understanding/architecture.md": "ARCHITECTURE.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
}
_FOLDERS = {"decisions": "ops/decisions", "measurements": "ops/lab/notes", "measurements/": "ops/lab/reports"}
_LANGUAGES = {".py": "python", ".html": "html"}


def outside_documents() -> Iterator[tuple[str, Path]]:
    """Yield the page and the file of each document outside of the guide."""
    yield from ((page, ROOT / name) for page, name in _SINGLE.items())
    for page, folder in _FOLDERS.items():
        yield from ((f"{page.rstrip('/')}/{path.name}", path) for path in sorted((ROOT / folder).glob("*.md")))


def documents() -> Iterator[tuple[str, Path]]:
    """Yield the page and the file of each document, in the guide or not."""
    yield from outside_documents()
    for path in sorted(GUIDE.glob("*/*.md")):
        yield str(path.relative_to(GUIDE)), path


def pages_of(folder: str) -> list[str]:
    """Return the pages of a folder in the order in which its README links to them, and then the others."""
    files = {page: path for page, path in outside_documents() if page.startswith(f"{folder}/")}
    index = files[f"{folder}/README.md"].read_text()
    linked = [f"{folder}/{Path(target).name}" for target in re.findall(r"\]\(([^)#]+\.md)\b", index)]
    return list(dict.fromkeys([f"{folder}/README.md", *(page for page in linked if page in files), *files]))


def examples() -> Iterator[tuple[str, Path]]:
    """Yield the page that shows each example, and its file."""
    for path in sorted((ROOT / "ops" / "examples").iterdir()):
        if path.suffix in _LANGUAGES:
            yield f"examples/{path.stem.strip('_')}.md", path


def example_page(path: Path) -> str:
    """Return the Markdown that shows an example."""
    return f"# {path.name}\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
