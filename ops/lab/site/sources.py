"""Files of the repository that are pages of the site, besides those in ``ops/guide``."""

from __future__ import annotations

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


def examples() -> Iterator[tuple[str, Path]]:
    """Yield the page that shows each example, and its file."""
    for path in sorted((ROOT / "ops" / "examples").iterdir()):
        if path.suffix in _LANGUAGES:
            yield f"examples/{path.stem.strip('_')}.md", path


def example_page(path: Path) -> str:
    """Return the Markdown that shows an example."""
    return f"# {path.name}\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
