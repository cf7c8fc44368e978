"""The page that a student gets back: one file that needs no network.

Whatever she has written is shown as text. Formulas of ours become MathML, which browsers set by
themselves; a card is the course's own.
"""
import base64
import html
import re

import mistune
from grade_table import number
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

CODE = HtmlFormatter(nowrap=True)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.S)
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>{style}</style></head>
<body><main><h1>{title}</h1><p class="sum">{total}</p>{table}{body}</main></body></html>
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7b; --line: #d6dde4; --code: #f5f7f9;
  --paper: #fff; --full: #00785a; --some: #b86e00; --none: #b3361b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9fb0c0; --line: #3a4653;
  --code: #1c242c; --paper: #12181e; --full: #35b58f; --some: #e6a23c; --none: #ef7a5f; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 }
main { max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.7rem; margin-bottom: 0 } h2 { font-size: 1.25rem; margin-top: 2.5rem }
.sum { color: var(--soft); margin-top: .3rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem }
td, th { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line) }
meter { width: 9rem; height: .8rem } .points { white-space: nowrap }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 4px;
  padding: .6rem .8rem; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: .6rem 0 }
pre.out { background: none; border-left: 3px solid var(--line); border-width: 0 0 0 3px }
pre.error { border-left-color: var(--none) } img { max-width: 100% }
.card { background: var(--code); border-radius: 4px; margin: .8rem 0 }
.verdict { font-weight: 600; border-top: 1px solid var(--line); padding-top: .4rem }
.hers { white-space: pre-wrap; border-left: 3px solid var(--line); padding: .2rem .8rem }
.comment { border-left: 3px solid var(--some); padding: .2rem .8rem }
math[display=block] { margin: .8rem 0; overflow-x: auto }
"""


def in_mathml(source):
    "Markdown in which formulas are kept for later; the formulas."
    from latex2mathml.converter import convert  # of the extra teach, as nbgrader is
    kept = []

    def keep(match):
        kept.append(convert(match[1] or match[2], display="block" if match[1] else "inline"))
        return f"FORMULA{len(kept) - 1}X"
    return FORMULA.sub(keep, source), kept


def prose(source, ours):
    "A cell of text: ours is set, hers is shown as it was typed."
    if not ours:
        typed = re.fullmatch(r"(`{3,})text\n(.*)\n\1", source, re.S)  # as `grade.as_typed` has it
        return f'<p class="hers">{html.escape(typed[2] if typed else source)}</p>'
    text, formulas = in_mathml(re.sub(r"^# .+", "", source))  # it is the title of the page
    page = mistune.html(text)
    return re.sub(r"FORMULA(\d+)X", lambda match: formulas[int(match[1])], page)


def shown(output):
    "One output of a cell."
    kind = output["output_type"]
    if kind == "error":
        return f'<pre class="out error">{html.escape(chr(10).join(output["traceback"]))}</pre>'
    if kind == "stream":
        return f'<pre class="out">{html.escape(output["text"])}</pre>'
    data = output["data"]
    if kind == "execute_result":  # the points, which stand below the cell
        return ""
    if "text/html" in data:  # of a card: nothing of hers has any
        return f'<div class="card">{data["text/html"]}</div>'
    if "image/png" in data:
        picture = base64.b64encode(base64.b64decode(data["image/png"])).decode()
        return f'<img alt="a figure" src="data:image/png;base64,{picture}">'
    return f'<pre class="out">{html.escape(data.get("text/plain", ""))}</pre>'


def verdict(score, most, waits, comment):
    "Points of a question, and what the teacher has written."
    said = "waits for your teacher" if waits else f"{number(score)} of {number(most)} points"
    remark = f'<p class="comment">{html.escape(comment)}</p>' if comment else ""
    return f'<p class="verdict">{said}</p>{remark}'


def code(cell, hidden="### BEGIN HIDDEN TESTS"):
    "A cell of code without the hidden check, and its outputs."
    source = cell.source.partition(hidden)[0].rstrip()
    return (f"<pre>{highlight(source, PythonLexer(), CODE)}</pre>"
            + "".join(map(shown, cell.get("outputs", ()))))


def overview(grades, titles):
    "A labelled bar for each question."
    rows = []
    for question, (score, most, waits, _) in sorted(grades.items()):
        said = "waits for your teacher" if waits else f"{number(score)} of {number(most)}"
        bar = "" if waits else (f'<meter min="0" max="{number(most)}" value="{number(score)}" '
                                f'aria-label="{said} points"></meter>')
        rows.append(f"<tr><td>{html.escape(titles.get(question, question))}</td>"
                    f'<td>{bar}</td><td class="points">{said}</td></tr>')
    return ("<table><tr><th>question</th><th>points earned</th><th></th></tr>"
            + "".join(rows) + "</table>")


def titles_of(cells, ours):
    "question -> the heading of ours above it."
    found, title = {}, ""
    for cell in cells:
        heading = cell.source in ours and re.match(r"## (.+)", cell.source)
        title = heading[1] if heading else title
        told = cell.metadata.get("nbgrader", {})
        if told.get("grade"):
            found[told["grade_id"]] = title
    return found


def page(
    title,
    cells,   # of the graded notebook
    ours,    # set of texts: the cells that were handed out
    grades,  # question -> (points, most, whether a person has yet to look, comment)
):           # HTML
    "Write the page."
    body = []
    for cell in cells:
        told = cell.metadata.get("nbgrader", {})
        own = cell.source in ours
        body.append(code(cell) if cell.cell_type == "code" else prose(cell.source, own))
        if told.get("grade_id") in grades:
            body.append(verdict(*grades[told["grade_id"]]))
    waits = " so far" if any(grade[2] for grade in grades.values()) else ""
    total = (f"{number(sum(grade[0] for grade in grades.values()))} of "
             f"{number(sum(grade[1] for grade in grades.values()))} points{waits}")
    style = STYLE + HtmlFormatter(style="default").get_style_defs("pre")
    return PAGE.format(title=html.escape(title), style=style, total=total,
                       table=overview(grades, titles_of(cells, ours)), body="\n".join(body))
