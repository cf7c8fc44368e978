"Draw the floor plan from the imports, and list the rooms: for docs/house.md."
import ast
import re
from functools import lru_cache
from html import escape
from pathlib import Path

import notebooks

PACKAGES = {  # from the ground floor up
    "privacy": "What is promised, and what does it cost?",
    "data": "What is a batch, and where from?",
    "gradients": "One example's gradient, fast.",
    "models": "Which networks?",
    "training": "How does it become trustworthy?",
    "features": "What needs no budget?",
    "audit": "How do I attack my own epsilon?",
    "cli": "The run, its record, and how it is read.",
    "exercises": "Is my answer right, and why not?",
}

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [("basics", "diagrams"), ("privacy", "data"), ("gradients",), ("models", "training"),
          ("features",), ("audit", "cli"), ("exercises",)]
QUESTIONS = {"basics": "seeds, checks, figures", "diagrams": "boxes and arrows", **PACKAGES}
COLORS = ["#999999", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9"]
WIDTH, HEIGHT, GAP = 760, 64, 26


def rooms(library=ROOT/"dp_course"):
    "package -> paths of its rooms; basics and diagrams are their own only rooms."
    found = {path.stem: [path] for path in sorted(library.glob("[a-z]*.py"))}
    return found | {name: sorted((library/name).glob("[a-z]*.py")) for name in PACKAGES}


@lru_cache(None)  # nobody edits a room while the house is looked at
def imported(path, library=ROOT/"dp_course"):
    "(node, module from the root, names) of every import in a room."
    here, found = ["dp_course", *path.relative_to(library).with_suffix("").parts], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[:-node.level] if node.level else []
            words = [*start, *(node.module or "").split(".")]
            names = [alias.name for alias in node.names]
            found.append((node, ".".join(filter(None, words)), names))
    return found


def arrows():
    "package -> packages that its rooms import from."
    found = {}
    for package, paths in rooms().items():
        words = [module.split(".") for path in paths for _, module, _ in imported(path)]
        needs = {w[1] for w in words if w[0] == "dp_course" and len(w) > 1}
        found[package] = needs - {package}
    return found


def shown(needs):
    "Only the arrows that no way through another package implies."
    def reached(start):
        return needs[start].union(*map(reached, needs[start]))
    return {package: {other for other in others
                      if not any(other in reached(between) for between in others)}
            for package, others in needs.items()}


def places():
    "package -> (x, y, width) of its box; the ground floor is at the bottom."
    found = {}
    for i, floor in enumerate(FLOORS):
        width = (WIDTH - 20*(len(floor) + 1))/len(floor)
        for j, package in enumerate(floor):
            found[package] = 20 + j*(width + 20), (len(FLOORS) - 1 - i)*(HEIGHT + GAP) + 20, width
    return found


def wrapped(words, width):
    "Words in at most three lines."
    lines, most = [""], int(width/6.4)
    for word in words:
        if len(lines[-1]) + len(word) + 2 > most:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{word}"
    return lines[:3] if len(lines) <= 3 else [*lines[:2], lines[2] + ", ..."]


def plan():
    "The floor plan as SVG."
    spots, needs, found = places(), shown(arrows()), rooms()
    parts = []
    for package, others in needs.items():
        x, y, width = spots[package]
        for other in sorted(others & spots.keys()):
            u, v, wide = spots[other]
            if v == y:
                continue  # neighbours: diagrams takes its colours from basics
            start = x + width*(.3 + .4*(u + wide/2)/WIDTH)
            end = u + wide*(.3 + .4*(x + width/2)/WIDTH)
            parts.append(f'<path d="M{start:.0f} {y + HEIGHT} C{start:.0f} {y + HEIGHT + 30} '
                         f'{end:.0f} {v - 30} {end:.0f} {v}" fill="none" stroke="#888" '
                         'stroke-width="1.5"/>')
    for floor, color in zip(FLOORS, COLORS):
        for package in floor:
            x, y, width = spots[package]
            names = [path.stem for path in found[package] if path.stem != package]
            parts.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="6" '
                         f'fill="white" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<text x="{x + 10:.0f}" y="{y + 18}" font-size="14" font-weight="bold" '
                         f'fill="{color}">{package}</text>')
            parts.append(f'<text x="{x + width - 10:.0f}" y="{y + 18}" font-size="11" '
                         f'text-anchor="end" font-style="italic" fill="#333">'
                         f'{escape(QUESTIONS[package])}</text>')
            for i, line in enumerate(wrapped(names, width - 20)):
                parts.append(f'<text x="{x + 10:.0f}" y="{y + 33 + 13*i}" font-size="11" '
                             f'fill="#333">{escape(line)}</text>')
    height = len(FLOORS)*(HEIGHT + GAP) + 20
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="sans-serif">'
            '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n")


def said(path):
    "What the first line of a room says that it does."
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def table():
    "The rooms, package by package, in Markdown."
    made = {notebooks.module_of(path): path
            for path in [*notebooks.lessons(), *notebooks.rooms()]}
    parts = []
    for package, paths in rooms().items():
        rows = ["| room | |", "|---|---|"]
        for path in paths:
            module = ".".join(path.relative_to(ROOT/"dp_course").with_suffix("").parts)
            place = made[module].relative_to(ROOT).as_posix()
            words = said(path).replace("|", "/").splitlines()
            rows.append(f"| [{path.stem}](../{place}) | {words[0] if words else ''} |")
        question = QUESTIONS[package]
        parts.append("\n".join([f"**{package}**: {question}", "", *rows]))
    return "\n\n".join(parts)


def house(text):
    "docs/house.md with its list of rooms made anew."
    inside = f"<!-- rooms -->\n{table()}\n<!-- /rooms -->"
    return re.sub(r"(?s)<!-- rooms -->.*<!-- /rooms -->", lambda _: inside, text)


def write():
    "Write both."
    page = ROOT/"docs/house.md"
    page.write_text(house(page.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT/"docs/static/floors.svg").write_text(plan(), encoding="utf-8")
