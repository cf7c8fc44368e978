"How Sphinx renders what tools/pages.py prepared: `make docs`."
import re

from docutils.nodes import SkipNode
from docutils.utils.math import latex2mathml

project = "dp_course"
author = "The dp_course founders"
copyright = "2026 onwards, the dp_course founders"
extensions = ["myst_nb"]
html_theme = "furo"
html_title = "dp_course"
html_favicon = "static/icon.svg"
html_theme_options = {mode: {"color-brand-primary": colour, "color-brand-content": colour,
                             "color-brand-visited": colour}
                      for mode, colour in (("light_css_variables", "#0072b2"),
                                           ("dark_css_variables", "#56b4e9"))}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"  # the browser's own: no script, and no network to fetch one from
nb_execution_mode = "off"  # the saved outputs are shown
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_render_markdown_format = "myst"  # CommonMark knows no tables: a cell's table would be pipes
myst_enable_extensions = ["attrs_block", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # exercises are headings of the third level wherever they stand
myst_links_external_new_tab = False
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
BRACES = r"(\{(?:[^{}]|\{[^{}]*\})*\})"


def mathml(tex, block=False):
    "MathML of a formula; docutils knows nearly all of our LaTeX, the rest is said in its words."
    tex = re.sub(rf"(\\underbrace{BRACES})_{BRACES}", r"\\underset\3{\1}", tex)
    tex = re.sub(r"\\(big|Big|bigg|Bigg)(?![A-Za-z])", r"\\\1l", tex)
    tex = tex.replace("\\dots ", "\\ldots ")
    tex = re.sub(r"\\[td]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", tex)
    return latex2mathml.tex2mathml(tex, as_block=block)


def visit_math(self, node):
    self.body.append(mathml(node.astext()))
    raise SkipNode


def visit_math_block(self, node):
    self.body.append(f'<div class="formula">{mathml(node.astext(), True)}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
