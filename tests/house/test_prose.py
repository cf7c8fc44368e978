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


def captions_without_a_picture(cells):
    "Ids of captions since whose forerunner no cell has left a picture."
    pictures, lost = 0, []
    for cell in cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            pictures += any(kind.startswith("image/") for kind in data)
            pictures += "data:image" in data.get("text/markdown", "")  # of what shows itself
        if cell.cell_type == "markdown" and cell.source.startswith(("*Figure", "*Diagram")):
            lost += [] if pictures else [cell.id]
            pictures = 0
    return lost


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_every_caption_has_its_picture(path):
    assert captions_without_a_picture(nbformat.read(path, 4).cells) == []


def test_a_lost_picture_is_noticed():
    cells = nbformat.read(next(p for p in NOTEBOOKS if p.stem == "08_clipping"), 4).cells
    for cell in cells:
        cell.outputs = []
    assert captions_without_a_picture(cells)


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


# --- a number in the prose of a lesson is the number of an output


LESSONS = [path for path in NOTEBOOKS if re.match(r"0[0-8]_|1[2356]_", path.stem)]
DECIMAL = r"(?<![\w.^/-])(\d[\d,]*\.\d+|\.\d+)(?![\w.]*\d)"
ELSEWHERE = {  # worked out in the sentence, read off a figure or a record, or rounded downwards
    "01_definition": "26.9",
    "03_cost": "0.86 2.2 4.2 3.6", "04_sampling": "7.82 .96 5.95 0.0085 12.2",
    "06_normalization": "71.2 0.002 0.0035", "07_fast_gradients": "3.7",
    "08_clipping": "0.04 3.95 0.08 4.7 1.105 46.94",
    "15_shoe": "0.87 1.69 1.8 61.6 66.2 7.53", "16_public_start": ".65 1.3 5.7 72.3"}


def decimals(text):
    "Numbers with a decimal point; not those of code, formulas, links and preprints."
    code = r"(?s)`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|arXiv [\d.]+"
    bare = re.sub(code, " ", text)
    return [found.replace(",", "") for found in re.findall(DECIMAL, bare)]


def printed(cells):
    "Every number of the outputs and the code."
    texts = [cell.source for cell in cells if cell.cell_type == "code"]
    for output in (out for cell in cells for out in cell.get("outputs", ())):
        data = output.get("data", {})
        texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", "")]
    found = re.findall(r"(?<![\w.])\d[\d_,]*\.?\d*(?:e[-+]?\d+)?|\.\d+", "\n".join(texts))
    return [float(re.sub("[_,]", "", number)) for number in found]


def unsaid(cells):
    "Decimal numbers of the prose that no output rounds to, as they are or in percent."
    seen = printed(cells)
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")

    def rounds(number):
        half = .5001*10**-len(number.split(".")[1])
        return any(abs(scale*value - float(number)) <= half for value in seen for scale in (1, 100))
    return {number for number in decimals(prose) if not rounds(number)}


@pytest.mark.parametrize("path", LESSONS, **name_of)
def test_a_decimal_number_in_prose_stands_in_an_output(path):
    known = ELSEWHERE.get(path.stem, "").split()
    assert unsaid(nbformat.read(path, 4).cells) == set(known)


def test_a_number_of_another_run_is_noticed():
    code = nbformat.v4.new_code_cell("accuracy(model)")
    code.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "0.2074"})]

    def left(text):
        return unsaid([code, nbformat.v4.new_markdown_cell(text)])
    assert left("0.209 at best, 20.9 %.") == {"0.209", "20.9"}
    assert not left("0.207, 20.7 % or 0.21; `0.5`, $0.5$, arXiv 1607.00133")
