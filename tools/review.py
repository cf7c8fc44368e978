"""What a reader may miss in a notebook: `make review NB=nbs/04_cost.ipynb`.

Pictures that no words describe, and decimal numbers in the prose that no output shows: stale, or
worked out in the sentence. Nothing here is an error; an author reads the list.
"""
import re
import sys
from pathlib import Path

import nbformat
import pages

DECIMAL = r"(?<![\w.^/-])(\d[\d,]*\.\d+|\.\d+)(?![\w.]*\d)"
SILENT = r"(?s)`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|arXiv [\d.]+"  # code, formulas, links


def undescribed(cells):
    "Pictures below which no prose begins with *Figure: ...* or *Diagram: ...*."
    return [f"no words for the picture of {cell.source[:60]!r}"
            for cell, after in pages.with_prose(cells)
            if pages.has_figure(cell) and " " not in pages.caption(after)]


def printed(cells):
    "Every number of the code and the outputs."
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
    numbers = [found.replace(",", "") for found in re.findall(DECIMAL, re.sub(SILENT, " ", prose))]

    def shown(number):
        half = .5001*10**-len(number.split(".")[1])
        return any(abs(scale*value - float(number)) <= half for value in seen for scale in (1, 100))
    return [f"no output shows {number}" for number in numbers if not shown(number)]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        cells = nbformat.read(path, 4).cells
        for line in undescribed(cells) + unsaid(cells):
            print(f"{path.name}: {line}")
