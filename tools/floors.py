"Draw the floor plan that setup.cfg asks for, and list the rooms: for docs/house.md."
import ast
import re
from configparser import ConfigParser
from pathlib import Path

import grimp
import notebooks
from export import PACKAGES

from dp_course.basics import PALETTE
from dp_course.diagrams import Diagram

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = {"basics": "seeds, checks, figures", "diagrams": "boxes and arrows", **PACKAGES}
WIDTH, HEIGHT, GAP = 760, 44, 34


def floors():
    "The packages of every floor, from the top down."
    config = ConfigParser()
    config.read(ROOT/"setup.cfg", encoding="utf-8")
    layers = config["importlinter:contract:floors"]["layers"].strip()
    return [re.split(r"\s*[|:]\s*", line) for line in layers.splitlines()]


def imports():
    "package -> packages that it imports from."
    graph = grimp.build_graph("dp_course", cache_dir=None)
    for package in PACKAGES:
        graph.squash_module(f"dp_course.{package}")
    found = {package: graph.find_modules_directly_imported_by(f"dp_course.{package}")
             for package in QUESTIONS}
    return {package: {name.removeprefix("dp_course.") for name in names} & QUESTIONS.keys()
            for package, names in found.items()}


def without_detours(needs):
    "Only the arrows that no way through another package implies."
    def reached(start):
        return needs[start].union(*map(reached, needs[start]))
    return {package: {other for other in others
                      if not any(other in reached(between) for between in others)}
            for package, others in needs.items()}


def places(rows):
    "package -> (x, y, width) of its box."
    found = {}
    for i, row in enumerate(rows):
        width = (WIDTH - 20*(len(row) + 1))/len(row)
        for j, package in enumerate(row):
            found[package] = 20 + j*(width + 20), i*(HEIGHT + GAP) + 10, width
    return found


def plan():
    "The floor plan as SVG."
    rows = floors()
    spots = places(rows)
    sheet = Diagram("A package imports from lower floors only", WIDTH, len(rows)*(HEIGHT + GAP))
    for package, others in without_detours(imports()).items():
        x, y, width = spots[package]
        for other in sorted(others):
            u, v, wide = spots[other]
            if v > y:  # not beside it: diagrams takes its colours from basics
                sheet.arrow(round(x + width*(.3 + .4*(u + wide/2)/WIDTH)), y + HEIGHT,
                            round(u + wide*(.3 + .4*(x + width/2)/WIDTH)), v)
    for row, color in zip(rows, PALETTE):
        for package in row:
            x, y, width = spots[package]
            sheet.add("rect", x=round(x), y=y, width=round(width), height=HEIGHT, fill="white")
            sheet.box(round(x), y, round(width), HEIGHT, color=color)
            sheet.text(round(x + width/2), y + 14, package, size=14, font_weight="bold")
            sheet.text(round(x + width/2), y + 32, QUESTIONS[package], size=11)
    return sheet._repr_svg_() + "\n"


def first_line(module):
    "What the first line of a module says that it does."
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n")[0]


def table():
    "The rooms, package by package, in Markdown."
    rows = {package: [] for package in QUESTIONS}
    for path in [*notebooks.lessons(), *notebooks.rooms()]:
        module = notebooks.module_of(path)
        if module:
            package, _, room = module.partition(".")
            words = first_line(ROOT/"dp_course"/f"{module.replace('.', '/')}.py").replace("|", "/")
            rows[package].append(f"| [{room or package}](../{path.relative_to(ROOT)}) | {words} |")
    return "\n\n".join("\n".join([f"**{package}**: {question}", "", "| room | |", "|---|---|",
                                  *sorted(rows[package])])
                       for package, question in QUESTIONS.items())


def house(text):
    "docs/house.md with its list of rooms made anew."
    inside = f"<!-- rooms -->\n{table()}\n<!-- /rooms -->"
    return re.sub(r"(?s)<!-- rooms -->.*<!-- /rooms -->", lambda _: inside, text)


def write():
    "Write both."
    page = ROOT/"docs/house.md"
    page.write_text(house(page.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT/"docs/static/floors.svg").write_text(plan(), encoding="utf-8")
