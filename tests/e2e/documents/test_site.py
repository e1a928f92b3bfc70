"""The site of `make docs`: it builds without a warning, has all pages and names, and works in a real Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from penstock import producer
from penstock.ops.lab.site import endpoints, reference
from penstock.ops.lab.site.sources import documents
from penstock.producer.gateway.app import OPERATIONS
from penstock.shared import errors

from ...browser import PATIENCE_MS, needs_chromium, running_chromium, violations

pytestmark = pytest.mark.xdist_group("site")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")

ROOT = Path(__file__).parents[3]
ALIKE = {"li", "ol", "ul", "tr", "pre", "blockquote", "img"}
PHONE = {"width": 390, "height": 800}
WIDTH = "document.documentElement.scrollWidth"
# Replaces the text of a page by the texts of several, each with its path. All else is the same on all pages. One long
# document takes Chromium and axe a fraction of the time of many.
JOIN = """async (paths) => {
  const articles = await Promise.all(paths.map(async (path) => {
    const page = new DOMParser().parseFromString(await (await fetch(path)).text(), "text/html");
    const article = page.querySelector("article");
    article.setAttribute("aria-label", path);
    article.querySelectorAll("[id]").forEach((element) => { element.id += path; });
    // As the theme's scripts do.
    article.querySelectorAll("pre > code").forEach((code) => { code.tabIndex = 0; });
    return article;
  }));
  document.querySelector("article").replaceWith(...articles);
}"""
TOO_WIDE = f"""[...document.querySelectorAll("article")]
  .filter((one) => one.getBoundingClientRect().left + one.scrollWidth > {PHONE["width"]})
  .map((one) => one.getAttribute("aria-label"))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    # With --quiet it would not count warnings, and so accept dead links.
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class SilentHandler(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """URL of a plain server of the site's files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium: Any, address: str, site: Path) -> Iterator[Any]:
    """A page of a phone, which may neither complain nor ask another origin for anything."""
    context = chromium.new_context(viewport=PHONE)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    origins = (address, site.as_uri(), "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(origins) else problems.append(request.url))
    yield page
    context.close()
    assert problems == []


class Article(HTMLParser):
    """Counts the elements of a page's text."""

    def __init__(self, html: str, *, is_whole: bool) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self._is_inside = is_whole
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count an element of the text."""
        self._is_inside |= tag == "article"
        if self._is_inside and tag in ALIKE:
            self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        """Notice the end of the text."""
        self._is_inside &= tag != "article"


def test_the_site_shows_each_document_as_other_readers_of_markdown_do(site: Path) -> None:
    """GitHub follows CommonMark, which MkDocs does not: a list after a line of text would be a part of that line."""
    github = MarkdownIt("commonmark").enable("table")
    differences = {}
    for page, source in documents():
        built = site / page.replace("README.md", "index.html").replace(".md", ".html")
        ours = Article(built.read_text(), is_whole=False).elements
        theirs = Article(github.render(source.read_text()), is_whole=True).elements
        if ours != theirs:
            differences[str(source.relative_to(ROOT))] = (ours - theirs, theirs - ours)
    assert differences == {}


def test_the_reference_has_every_public_name(site: Path) -> None:
    listed = {*reference.PARAMETERS, *reference.RESULTS, "Client", "LLM"}
    assert {name for name in producer.__all__ if not name.endswith("Error")} == listed
    table = (site / "reference" / "errors.html").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert [kind.__name__ for kind in kinds if f'id="{kind.__name__}"' not in table] == []
    link = '<a href="../reference/errors.html#RequestConflictError"><code>RequestConflictError</code></a>'
    assert link in (site / "howto" / "requests.html").read_text()


def test_the_reference_has_every_endpoint_and_parameter(site: Path) -> None:
    page = (site / "reference" / "http.html").read_text()
    paths = [re.sub(r"\{(\w+):\w+\}", r"{\1}", operation.path) for operation in OPERATIONS]
    assert [path for path in paths if f"{path}<" not in page] == []
    parameters = (site / "reference" / "parameters.html").read_text()
    fields = producer.SamplingParams.__struct_fields__
    assert [field for field in fields if f"<code>{field}</code>" not in parameters] == []
    # A field of a base class is a parameter once.
    options = re.sub("<[^>]+>", "", (site / "reference" / "request_options.html").read_text())
    assert options.partition("RequestOptions(")[2].partition(")")[0].count("tenant:") == 1


def test_the_reference_explains_every_field_of_a_body() -> None:
    bodies = endpoints.bodies()
    assert [
        f"{body}.{field}" for body, meanings in bodies.items() for field, text in meanings.items() if not text
    ] == []
    names = {"any": {field for meanings in bodies.values() for field in meanings}, **bodies}
    assert [
        (name, field) for name, fields in endpoints.FIELDS.items() for field in fields if field not in names[name]
    ] == []


@needs_chromium
@pytest.mark.parametrize("place", ["server", "file system"])
def test_search_finds_a_page_that_opens(page: Any, address: str, site: Path, place: str) -> None:
    page.goto(f"{address if place == 'server' else site.as_uri()}/index.html")
    page.set_viewport_size({"width": 1280, "height": 800})
    search = page.get_by_role("textbox", name="Search")
    search.fill("webhook")
    # The theme searches when a key comes up, and fill presses none.
    search.press("End")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    assert "howto/webhooks.html" in result.get_attribute("href")
    result.click()
    page.wait_for_url("**/howto/webhooks.html*")
    playwright.expect(page.locator("article h1")).to_contain_text("Webhooks", timeout=PATIENCE_MS)


@needs_chromium
def test_every_page_fits_a_phone(chromium: Any, address: str, site: Path) -> None:
    # Scripts take most of the time that a page needs. The tests below load some pages with them.
    page = chromium.new_page(viewport=PHONE, java_script_enabled=False)
    page.goto(f"{address}/index.html")
    assert page.evaluate(WIDTH) == PHONE["width"]
    files = sorted(site.rglob("*.html"))
    page.evaluate(JOIN, [f"{address}/{file.relative_to(site)}" for file in files])
    assert page.locator("article").count() == len(files)
    assert page.evaluate(WIDTH) == PHONE["width"], page.evaluate(TOO_WIDE)
    page.close()


@needs_chromium
def test_pages_with_scripts_fit_a_phone_and_axe_finds_nothing_serious(page: Any, address: str) -> None:
    paths = [f"{address}/{path}.html" for path in ("index", "reference/errors", "operating/metrics", "howto/webhooks")]
    for path in paths:
        page.goto(path)
        assert page.evaluate(WIDTH) == PHONE["width"]
    page.set_viewport_size({"width": 1280, "height": 800})
    assert violations(page) == []
    page.evaluate(JOIN, paths)
    assert violations(page) == []


@needs_chromium
def test_a_reader_switches_the_scheme_and_turns_pages(page: Any, address: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}/howto/requests.html")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_title("Switch to dark mode").click()
    page.wait_for_function(f"{background} !== '{light}'")
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**/howto/web.html")
    assert page.evaluate(background) != light, "the choice is kept"
