"""The site can be read: every notebook is there, links lead somewhere, formulas are formulas.

Without Sphinx everything is skipped (`make docs` installs it), without Playwright and Chromium the
part in the browser is; `make test-docs` installs all and skips nothing. A site in out/site that is
up to date is tested as it lies there.
"""
import functools
import http.server
import importlib.util
import os
import re
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import pages  # noqa: E402

if not pages.installed():
    pytest.skip(pages.NEEDED, allow_module_level=True)

NOTEBOOKS = [path.relative_to(ROOT/"nbs") for path in
             [*ROOT.glob("nbs/[0-9]*.ipynb"), *ROOT.glob("nbs/workshop/**/*.ipynb")]]
MODULES = [".".join(path.relative_to(ROOT/"dp_course").with_suffix("").parts)
           for path in ROOT.glob("dp_course/**/[a-z]*.py") if "exercises" not in path.parts]
FOUND = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
CHROMIUM = next(filter(None, FOUND), None)
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and importlib.util.find_spec("playwright"))
    and "DP_COURSE_BROWSER" not in os.environ,
    reason="no Playwright or no Chromium here: make test-docs installs both")
SHOWN = ["index", "01_promise", "04_cost", "05_sampling", "09_clipping", "14_results",
         "16_attacks", "17_audit", "i_want", "from_opacus", "house", "workshop/index",
         "workshop/privacy/pld", "api/index", "api/privacy.accounting", "api/training.trainer",
         "genindex"]
WIDEST = """Math.max(...['html', 'body', '.main', '.content', '.article-container', 'article']
    .flatMap(s => [...document.querySelectorAll(s)]).map(e => e.scrollWidth))"""
PHONE = dict(width=390, height=844)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The folder with html/ and warnings.txt."
    folder = ROOT/"out/site"
    if not pages.fresh(folder):
        folder = tmp_path_factory.mktemp("site")
        pages.build(folder)
    return folder


class Page(HTMLParser):
    "Links, anchors and words of a page."
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.images, self.words, self.inside = [], {""}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]
        self.images += [found] if tag == "img" and found.get("alt") != "Logo" else []
        if tag in ("pre", "code", "script", "style") or found.get("class") == "tex":
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.words.append(data)


@pytest.fixture(scope="module")
def read(site):
    "path -> page, for every page."
    html = site/"html"
    return {path.relative_to(html).as_posix(): Page(path.read_text(encoding="utf-8"))
            for path in html.rglob("*.html")}


def dead_links(read, there):
    "(page, link) of every link inside the site that leads nowhere."
    for name, page in read.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            path = (Path("/")/name).parent/unquote(parts.path) if parts.path else Path("/")/name
            target = path.resolve().relative_to("/").as_posix()
            known = read.get(target)
            if not there(target) or known and unquote(parts.fragment) not in known.anchors:
                yield name, link


def test_sphinx_warns_of_nothing(site):
    assert not (site/"warnings.txt").read_text(encoding="utf-8").splitlines()


def test_every_notebook_and_module_has_a_page(read):
    wanted = [path.with_suffix(".html").as_posix() for path in NOTEBOOKS]
    wanted += [f"api/{name}.html" for name in MODULES]
    assert not set(wanted) - set(read)


def test_no_link_is_dead(read, site):
    assert sum(len(page.links) for page in read.values()) > 1000
    assert not list(dead_links(read, lambda path: (site/"html"/path).exists()))


def test_nothing_is_fetched_from_elsewhere(site):
    loads = re.compile(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]+"')
    for path in (site/"html").rglob("*.html"):
        found = [tag for tag in loads.findall(path.read_text(encoding="utf-8"))]
        assert not found, path.name


def test_formulas_are_rendered(read, site):
    text = (site/"html/04_cost.html").read_text(encoding="utf-8")
    assert text.count('class="tex"') > 5
    for name, page in read.items():
        left = re.findall(r"\$\$|\\(?:frac|sum|sigma|varepsilon|Big|text)\b", "".join(page.words))
        assert not left, f"{name}: {left[:3]}"


def test_figures_are_shown_and_described(read, site):
    front = read["index.html"].images
    ladder = next(image for image in front if image["src"].endswith("ladder.png"))
    assert "Without privacy" in ladder["alt"]
    assert (site/"html"/ladder["src"]).stat().st_size > 20_000
    for path in NOTEBOOKS:
        saved = sum(map(pages.has_figure, nbformat.read(ROOT/"nbs"/path, 4).cells))
        images = read[path.with_suffix(".html").as_posix()].images
        assert len(images) >= saved, path
        assert all(" " in image["alt"] for image in images), path


def test_answers_of_exercises_are_no_pages(read):
    assert not [name for name in read if name.startswith("exercises/")]


def test_what_makes_a_package_is_not_shown(site):
    for path in [*(site/"html").glob("*.html"), *(site/"html/workshop").rglob("*.html")]:
        text = re.sub("<[^>]+>", "", path.read_text(encoding="utf-8"))
        left = re.search(r"(?m)^\s*#\|\s*(export|default_exp|hide|slow|gpu)\b|^_all_ =", text)
        assert not left, path.name


# --- in a browser


@pytest.fixture(scope="module")
def server(site):
    "The site at an address of this machine."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass
    handler = functools.partial(Quiet, directory=str(site/"html"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield browser
        browser.close()


def opened(chromium, **kwargs):
    "A tab, and the list of what went wrong in it."
    tab, wrong = chromium.new_page(**kwargs), []
    tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda r: wrong.append(r.url) if "127.0.0.1" not in r.url
           and not r.url.startswith("data:") else None)
    return tab, wrong


def check_pages(chromium, server, names):
    tab, wrong = opened(chromium, viewport=PHONE)
    too_wide, small = {}, {}
    for name in names:
        tab.goto(f"{server}/{name}.html")
        width = tab.evaluate(WIDEST)
        too_wide |= {name: width} if width > PHONE["width"] else {}
        size = tab.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")
        small |= {name: size} if size < 14 else {}
        assert not tab.query_selector_all(".katex-error"), name
        broken = tab.evaluate(
            "[...document.images].filter(i => i.loading != 'lazy' && !i.naturalWidth).length")
        assert not broken, f"{name}: {broken} pictures are broken"
    tab.close()
    assert not wrong
    assert not too_wide
    assert not small


@needs_browser
def test_pages_fit_a_phone(chromium, server):
    check_pages(chromium, server, SHOWN)


@needs_browser
def test_search_finds(chromium, server):
    tab, wrong = opened(chromium)
    tab.goto(f"{server}/search.html?q=poisson")
    tab.wait_for_selector("#search-results li a[href*='05_sampling']", timeout=30_000)
    assert not wrong


@needs_browser
def test_dark_mode(chromium, server):
    tab, wrong = opened(chromium, color_scheme="dark")
    tab.goto(f"{server}/12_views.html")  # it has figures of both kinds
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", colour)[:3])) < 80, colour
    filters = {kind: {tab.evaluate("i => getComputedStyle(i).filter", image)
                      for image in tab.query_selector_all(f"article img.{kind}")}
               for kind in ("drawn", "photograph")}
    assert filters["photograph"] == {"none"} and filters["drawn"] and "none" not in filters["drawn"]
    assert not wrong
