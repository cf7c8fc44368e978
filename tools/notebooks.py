"Run the notebooks and save their outputs; render README.md and its picture from the index."
import base64
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT/"nbs/index.ipynb"
PICTURES = {"docs/ladder.png": INDEX, "docs/gradient.png": ROOT/"nbs/03_by_hand.ipynb",
            "docs/attacks.png": ROOT/"nbs/pages/attacks.ipynb"}
PAGES = {path: ROOT/f"docs/{path.stem}.md" for path in sorted((ROOT/"nbs/pages").glob("*.ipynb"))}
NOTE = "<!-- Written by `make readme` from {}: edit there. -->\n\n"


def lessons(nbs=ROOT/"nbs"):
    "The lessons, in order."
    return sorted(nbs.glob("[0-9]*.ipynb"))


def rooms(nbs=ROOT/"nbs"):
    "The engine rooms: the workshop, and what the exercises ask for."
    return sorted([*nbs.glob("workshop/**/*.ipynb"), *nbs.glob("exercises/*.ipynb")])


def code_cells(path):
    "The sources of a notebook's code cells."
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def module_of(path):
    "The module that a notebook exports to, such as `privacy.accounting`, or None."
    found = re.search(r"(?m)^#\|\s*default_exp\s+(\S+)", "\n".join(code_cells(path)))
    return found and found[1]


def run(path, timeout=900):
    "Execute one notebook with a real kernel and save it with outputs, or leave it as it was."
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = spec
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_widget(output)]
    notebook.metadata.pop("widgets", None)  # the sliders' state: nothing shows it
    nbformat.write(notebook, path)
    clean = Path(sys.executable).with_name("nbdev_clean")
    subprocess.run([clean, "--fname", str(path)], check=True, cwd=ROOT)
    return time.perf_counter() - start


def is_widget(output):
    "Whether it is a slider: dead without its kernel, so it is not saved."
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def picture(index=INDEX):
    "The picture of README.md, as the index has saved it."
    cells = nbformat.read(index, as_version=4).cells
    outputs = next(cell for cell in cells if has_tag(cell, "picture")).outputs
    return base64.b64decode(next(o.data["image/png"] for o in outputs if "image/png" in o.data))


def described(caption):
    "What a figure shows, in words, and the prose that follows."
    return re.match(r"(?s)\*Figure: (.+?)\*\s*(.*)", caption.source).groups()


def rendered(index):
    "A notebook as Markdown: tables show their result, not their code."
    notebook = nbformat.read(index, as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}  # it names the code blocks
    notebook.cells = [cell for cell in notebook.cells if not has_tag(cell, "hide")]
    for i, cell in enumerate(notebook.cells):
        if has_tag(cell, "picture"):
            said, below = described(notebook.cells[i + 1])
            place = next(place for place, source in PICTURES.items() if source == index)
            notebook.cells[i] = nbformat.v4.new_markdown_cell(f"![{said}](../{place})")
            notebook.cells[i + 1].source = below
        if has_tag(cell, "table"):  # shows its result, not its code
            table = cell.outputs[0]["data"]["text/markdown"]
            notebook.cells[i] = nbformat.v4.new_markdown_cell(table)
    text, _ = MarkdownExporter().from_notebook_node(notebook)
    return text.strip() + "\n"


def readme(index=INDEX):
    "The text of README.md: the index, with links relative to the repository root."
    text = re.sub(r"\]\((?!https?:|#|\.\./)([^)]+)\)", r"](nbs/\1)", rendered(index))
    return NOTE.format("nbs/index.ipynb") + text.replace("](../", "](")


def page(path):
    "The text of a page in docs/, made from nbs/pages."
    text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", rendered(path))  # another page
    text = text.replace("](../docs/", "](").replace("](../../", "](../#")
    text = text.replace("](../", "](../nbs/")
    return NOTE.format(path.relative_to(ROOT)) + text.replace("](../nbs/#", "](../")


def main(argv):
    command, *files = argv
    if command == "readme":
        import floors  # which imports this module
        (ROOT/"README.md").write_text(readme(), encoding="utf-8")
        for place, source in PICTURES.items():
            (ROOT/place).write_bytes(picture(source))
        for path, place in PAGES.items():
            place.write_text(page(path), encoding="utf-8")
        floors.write()
        return 0
    failed = []
    for path in map(Path, files):
        print(f"{path.stem:28}", end=" ", flush=True)
        try:
            print(f"{run(path.resolve()):6.1f} s", flush=True)
        except CellExecutionError as error:
            failed.append(path.name)
            print(f"failed\n{error}", flush=True)
    if failed:
        print("not saved, because a cell failed:", *failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
