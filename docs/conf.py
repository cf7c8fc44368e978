"How Sphinx renders what tools/pages.py prepared: `make docs`."
from docutils.nodes import SkipNode

project = "dp_course"
author = "The dp_course founders"
copyright = "2026 onwards, the dp_course founders"
extensions = ["myst_nb", "sphinx_copybutton"]
html_theme = "furo"
html_title = "dp_course"
html_logo = html_favicon = "static/icon.svg"
html_theme_options = {mode: {"color-brand-primary": colour, "color-brand-content": colour,
                             "color-brand-visited": colour}
                      for mode, colour in (("light_css_variables", "#0b5c94"),
                                           ("dark_css_variables", "#6cb8ea"))}
html_static_path = ["static"]
html_extra_path = ["extra"]  # the notebooks to download
html_css_files = ["katex/katex.min.css", "site.css"]
html_js_files = ["katex/katex.min.js", "formulas.js"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "katex"  # shipped: nothing is fetched
nb_execution_mode = "off"  # the saved outputs are shown
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_render_markdown_format = "myst"  # CommonMark knows no tables: a cell's table would be pipes
myst_enable_extensions = ["attrs_block", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
smartquotes_action = "qe"  # no dashes: a command's --seed stays as it is
suppress_warnings = ["myst.header"]  # exercises are headings of the third level wherever they stand
myst_links_external_new_tab = False
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
copybutton_selector = "div.highlight pre"


def visit_math(self, node):
    self.body.append(f'<span class="tex">{self.encode(node.astext())}</span>')
    raise SkipNode


def visit_math_block(self, node):
    self.body.append(f'<div class="tex">{self.encode(node.astext())}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("katex", (visit_math, None), (visit_math_block, None))
