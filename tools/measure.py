"""Measure how densely the house is written: `python tools/measure.py [NOTEBOOK ...]`.

A row per notebook (by default all): cells, syntax-tree nodes per line of exported code, lines over
100 columns, and cells that are too long (a lesson's cell has 20 lines, a workshop's 40, an exported
one 40).
"""
import ast
import io
import sys
import tokenize
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
LESSON, WORKSHOP, EXPORTED = 20, 40, 40
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE,
          tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def notebooks():
    "Every notebook of the course: lessons, index, workshop."
    lessons = sorted((ROOT/"nbs").glob("[0-9i]*.ipynb"))
    return lessons + sorted((ROOT/"nbs/workshop").glob("*.ipynb"))


def code_cells(path):
    "The sources of a notebook's code cells."
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def is_exported(source):
    return source.lstrip().startswith("#| export")


def code_lines(source):
    "How many lines hold code or docstrings: neither blank nor only a comment."
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def nodes_per_line(source):
    "Expressions and statements per line of code."
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.expr, ast.stmt))]
    return len(nodes)/max(1, code_lines(source))


def long_lines(sources):
    return [line for source in sources for line in source.splitlines() if len(line) > WIDTH]


def cell_length(source):
    "Lines of a cell without blank ends and nbdev directives."
    return len([line for line in source.strip().splitlines() if not line.startswith("#|")])


def long_cells(path):
    "First line and length of every cell that is longer than its kind may be."
    plain = WORKSHOP if path.parent.name == "workshop" else LESSON
    found = []
    for source in code_cells(path):
        if source.strip() and cell_length(source) > (EXPORTED if is_exported(source) else plain):
            first = next(line for line in source.splitlines() if line and not line.startswith("#|"))
            found.append(f"{first.strip()[:50]} ({cell_length(source)})")
    return found


def main(paths):
    print(f"{'notebook':28}{'cells':>6}{'nodes/line':>12}{'over 100':>10}  too long")
    for path in paths or notebooks():
        sources = code_cells(path)
        exported = "\n".join(source for source in sources if is_exported(source))
        wide = len(long_lines(sources))
        total = len(nbformat.read(path, 4).cells)
        density = nodes_per_line(exported)
        print(f"{path.stem:28}{total:6}{density:12.2f}{wide:10}  {'; '.join(long_cells(path))}")


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]])
