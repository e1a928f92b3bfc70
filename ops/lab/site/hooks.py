"""Hooks of MkDocs: add pages from outside of ``ops/guide``, and write links between them as the site needs them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from penstock.ops.lab.site import errors, reference
from penstock.ops.lab.site.markdown import Links, show_pipes
from penstock.ops.lab.site.sources import ROOT, example_page, examples, outside_documents, pages_of

# Parts with the classes that a web app uses.
PARTS = ("producer", "shared")
ASSETS = {
    "assets/iframe-worker.js": "ops/lab/site/vendor/iframe-worker.js",
    "assets/site.css": "ops/lab/site/site.css",
    "assets/site.js": "ops/lab/site/site.js",
}
# Sources, and pages for the project's own engineers, come after the guide in results of a search.
BOOST = {"examples": 0.3, "decisions": 0.3, "measurements": 0.2, "project": 0.3}
_OPTION = re.compile(r"<code>(--?\w[^<]{0,40})</code>")


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the sources as the package ``penstock``, since the reader of docstrings imports nothing."""
    del command, dirty
    package = ROOT / "build" / "source" / "penstock"
    package.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        link = package / part
        if not link.is_symlink():
            link.symlink_to(ROOT / part)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the order of pages."""
    config.nav = [_expand(entry) for entry in config.nav or ()]
    return config


def _expand(entry: Any) -> Any:
    """Return an entry of ``nav`` with the pages of each folder that it names as ``folder/*``."""
    if isinstance(entry, dict):
        return {title: _expand(value) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_expand(value) for value in entry]
    return pages_of(entry.removesuffix("/*")) if entry.endswith("/*") else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and assets that are not in the folder of documents, and the generated reference."""
    guide = files.get_file_from_path("README.md")
    assert guide is not None
    files.remove(guide)
    outside = [*outside_documents(), *((name, ROOT / path) for name, path in ASSETS.items())]
    generated = [*reference.pages(), *((name, example_page(path)) for name, path in examples())]
    for name, path in outside:
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, content in generated:
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to pages of the site."""
    boost = BOOST.get(page.file.src_uri.partition("/")[0])
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    return show_pipes(_links(files).rewrite(markdown, page.file))


@lru_cache(maxsize=1)
def _links(files: Files) -> Links:
    return Links(ROOT, files, dict(examples()))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with links from the names of errors, and with a class for options, which must not be broken."""
    return errors.link_names(_OPTION.sub(r'<code class="option">\1</code>', html), page.file.src_uri)
