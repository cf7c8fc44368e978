"What people read: spelling by a word list, a sentence for every picture, notebooks of a fair size."
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import notebooks  # noqa: E402
import pages  # noqa: E402
import spelling  # noqa: E402

NOTEBOOKS = [path for path in spelling.files() if path.suffix == ".ipynb"]
LARGEST = 1.5*10**6  # bytes
name_of = {"ids": lambda path: path.stem}


def pairs(path):
    "Every cell with the prose that comes next."
    return pages.with_prose(nbformat.read(path, 4).cells)


@pytest.mark.parametrize("path", spelling.files(), **name_of)
def test_words_are_in_the_list(path):
    found = dict(spelling.unknown(path))
    assert not found, "misspelt, or new? python tools/spelling.py --add takes them into the list"


def test_the_list_is_kept():
    "In order, each word once, and nothing in it that is misspelt by its look."
    words = spelling.LIST.read_text(encoding="utf-8").split()
    assert words == sorted(set(words))
    assert all(re.fullmatch(r"[^\W\d_A-Z]+(?:'[a-z]+)?", word) for word in words)


@pytest.mark.parametrize("word", """recieve gradiant traning noize accomodate seperate adn occured
    stoped refered thier wich begining lenght hte algorithim""".split())
def test_a_typo_is_noticed(word):
    assert not spelling.known(word)


@pytest.mark.parametrize("word", "clipped offered Limited gradients re-read Ada's noisier".split())
def test_a_word_is_no_typo(word):
    assert all(map(spelling.known, spelling.words(word)))


def test_only_prose_is_read():
    text = "Clip `grdient` at $\\sgima$, [here](wehre.ipynb), `a`, max_nrom, DP4x, isn't it?"
    assert spelling.words(text) == ["Clip", "at", "here", "isn't", "it"]


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_every_picture_is_described(path):
    bare = [cell.source for cell, after in pairs(path)
            if pages.has_figure(cell) and " " not in pages.caption(after)]
    assert not bare, "below a picture prose begins with *Figure: ...*, for whoever cannot see it"
    text = "\n".join(cell.source for cell, _ in pairs(path) if cell.cell_type == "markdown")
    assert not re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"]+\")", text)


def test_a_bare_picture_is_noticed():
    said = [pages.caption(nbformat.v4.new_markdown_cell(source)) for source in
            ("*Figure: two lines that cross. More.*", "*Diagram: three boxes.* And on.", "So?")]
    assert said == ["two lines that cross", "three boxes", ""]


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_no_notebook_is_heavy(path):
    assert path.stat().st_size <= LARGEST


def test_the_pictures_of_readme_are_light_and_described():
    pages_of = [ROOT/"README.md", *(ROOT/"docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages_of)
    for place in notebooks.PICTURES:
        assert (ROOT/place).stat().st_size < 200_000
        said = re.search(rf"!\[([^\]]+)\]\((docs/)?{place.removeprefix('docs/')}\)", text)
        assert len(said[1].split()) > 15
