"""One letter, one meaning: lesson 00 has the table, and a lesson that differs says so at its head.

A machine cannot read meanings. It sees which letters a shape, a formula or a definition uses, which
of them the table of lesson 00 has, and which of them the lesson's line of letters calls new or
different.
"""
import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
START, *LESSONS = sorted(ROOT.glob("nbs/[0-9]*.ipynb"))
HEAD = "**Letters** as in [00](00_start.ipynb)"
SYMBOL = r"\\(?:alpha|beta|gamma|delta|Delta|varepsilon|epsilon|eta|theta|kappa|lambda|mu|rho|" \
         r"sigma|tau|phi|Phi|psi|omega|ell)(?![A-Za-z])|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
CONSTANTS = set("eEN")  # Euler's number, a mean, a normal distribution
WORDS = r"\\(?:text|operatorname|mathrm|begin|end)\{[^}]*\}|&&\s*.*"
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.S)


def read(path):
    return nbformat.read(path, 4).cells


def prose(cells):
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def symbols(formula):
    "Letters of a formula, Greek ones as LaTeX names; the d of an integral is none."
    bare = re.sub(r"\\,?\s*d[xyzt]\b", "", re.sub(WORDS, "", formula))
    return set(re.findall(SYMBOL, bare)) - CONSTANTS


def table(cells):
    "(letters of shapes, letters of formulas) that lesson 00 explains."
    text = next(source for source in prose(cells) if "\n## Letters" in source)
    shapes, formulas = text.split("**formulas and in code**")
    first = [line.split("|")[1] for line in shapes.split("\n") if line.startswith("| `")]
    names = [line.split("|")[1:] for line in formulas.split("\n") if line.startswith("| ")]
    letters = {s for line in names for cell in (line[0], line[2]) if "$" in cell
               for s in symbols(" ".join(re.findall(r"\$([^$]+)\$", cell)))}
    return set(re.findall(r"`(\w)`", " ".join(first))), letters - {"i"}


def line(cells):
    "(new letters, letters that mean something else here) of a lesson's line of letters."
    found = re.search(re.escape(HEAD) + r"(.*?)(?:\n\n|\Z)", "\n\n".join(prose(cells)), re.S)
    if not found:
        return None
    new, _, different = found[1].partition("Different here:")
    return tuple(set(re.findall(r"`([A-Za-z])`", part)).union(
        *(symbols(formula) for formula in re.findall(r"\$([^$]+)\$", part)))
        for part in (new, different))


def shape_letters(cells):
    "Letters of the axes in comments such as `# (b,i)`."
    comments = re.findall(r"#.*", "\n".join(c.source for c in cells if c.cell_type == "code"))
    axes = [axis for comment in comments
            for shape in re.findall(r"\(((?:\w+|\.\.\.)(?:,(?:\w+|\.\.\.))*,?)\)", comment)
            if "," in shape for axis in shape.split(",")]
    return {axis for axis in axes if re.fullmatch("[a-z]", axis)}


def formulas(text):
    return ["".join(parts) for parts in FORMULA.findall(text)]


def defined(text):
    "Letters that a sentence defines: `write $g$ for ...`, `let $g$ be ...`."
    return set(re.findall(rf"(?i)\b(?:write|let|call|with)\s+\$({SYMBOL})\$", text))


def on_the_left(text):
    "Letters that a formula says: `u = ...`."
    return {s for formula in formulas(text)
            for s in re.findall(rf"(?<![_^{{])({SYMBOL})(?:\([^)]*\))?\s*(?:\\;)?\s*=", formula)}


def unexplained(cells, known_shapes, known_letters):
    "What a lesson uses without a word: a list of complaints."
    said = line(cells)
    if said is None:
        used = shape_letters(cells) | {s for t in prose(cells) for f in formulas(t)
                                       for s in symbols(f)}
        return ["no line of letters"] if used else []
    new, different = said
    wrong = [f"{s} is in the table: not new" for s in new & known_letters]
    wrong += [f"{s} is not in the table: new" for s in different - known_letters - known_shapes]
    wrong += [f"axis {s}" for s in
              shape_letters(cells) - known_shapes - known_letters - new - different]
    met = new | different | known_letters | {"i", "t"}
    for text in prose(cells):
        without = re.sub(r"\$\$.+?\$\$", " ", text, flags=re.S)
        named = set(re.findall(r"(?<![\w'`])([A-Za-z])(?![\w'])|`([A-Za-z])`", without))
        met |= {s for pair in named for s in pair if s}
        met |= {s for formula in formulas(without) for s in symbols(formula)} | on_the_left(text)
        wrong += [f"{s} in ${formula.strip()[:40]}" for formula in formulas(text)
                  for s in symbols(formula) - met]
        wrong += [f"{s} is defined anew" for s in defined(text) & known_letters - different]
    return wrong


KNOWN = table(read(START))


def test_the_table_of_letters_is_read():
    shapes, letters = KNOWN
    assert shapes == set("bktiol")
    assert {"n", "q", "C", "B", "T", "P", "Q", "L", r"\sigma", r"\delta", r"\varepsilon"} <= letters


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_letter_means_what_the_table_says(path):
    assert not unexplained(read(path), *KNOWN)


def lesson(*cells):
    make = {str: nbformat.v4.new_markdown_cell, bytes: nbformat.v4.new_code_cell}
    return [make[type(c)](c if isinstance(c, str) else c.decode()) for c in cells]


@pytest.mark.parametrize("cells, complaint", [
    (["A formula $q$ and no line."], "no line of letters"),
    ([HEAD + ".", "Write $g$ for the gradient by the outputs."], "g is defined anew"),
    ([HEAD + ".", "Let $q$ be the density without her."], "q is defined anew"),
    ([HEAD + ".", b"x = f()  # (b,h)"], "axis h"),
    ([HEAD + ".", "$$\\sigma_j = 2$$"], "j in $"),
    ([HEAD + "; new: $q$ a density."], "q is in the table: not new"),
    ([HEAD + ". Different here: $u$ an output."], "u is not in the table: new")])
def test_a_letter_without_a_word_is_noticed(cells, complaint):
    found = unexplained(lesson(*cells), *KNOWN)
    assert len(found) == 1 and found[0].startswith(complaint)


def test_a_letter_that_is_said_is_no_complaint():
    head = HEAD + "; new: $u$ an output, `h` a row. Different here: $g$ its gradient."
    assert not unexplained(lesson(head, "Write $g$ for it: $$u = g$$", b"x = f()  # (b,h)"), *KNOWN)


# --- `g` is a gradient; what draws random numbers is `rng`, and `generator` where it is an argument


MAKERS = {"Generator", "manual_seed", "seed_all", "gen", "fresh_generator", "step_generator",
          "default_rng"}


def makes_random_numbers(value):
    "Whether an expression calls something that gives a generator."
    return isinstance(value, ast.Call) and MAKERS & {
        getattr(value.func, "attr", ""), getattr(value.func, "id", "")}


def assigned(node):
    "(name, value) of every name of an assignment."
    for target in node.targets:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        for name, value in zip(target.elts, node.value.elts) if both else [(target, node.value)]:
            yield getattr(name, "id", ""), value


def generators_called_g(source):
    "Lines on which `g` is a generator."
    tree = ast.parse(source)
    made = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assign)
            for name, value in assigned(node) if name == "g" and makes_random_numbers(value)]
    passed = [node.value.lineno for node in ast.walk(tree) if isinstance(node, ast.keyword)
              and node.arg in ("generator", "rng") and getattr(node.value, "id", "") == "g"]
    return made + passed


@pytest.mark.parametrize("path", [START, *LESSONS], ids=lambda path: path.stem)
def test_no_generator_is_called_like_a_gradient(path):
    code = [cell.source for cell in read(path) if cell.cell_type == "code"]
    assert not [source for source in code if generators_called_g(source)]


@pytest.mark.parametrize("source", [
    "g = torch.Generator()", "g = torch.Generator().manual_seed(0)", "B, g = 12, gen()",
    "g = seed_all(3)", "x = torch.randn(3, generator=g)"])
def test_a_generator_called_g_is_noticed(source):
    assert generators_called_g(source) == [1]


def test_a_gradient_called_g_is_none():
    assert not generators_called_g("g, = torch.autograd.grad(loss, w)\nrng = gen()")
