"""Write dp_course/ from the notebooks: `python tools/export.py`.

nbdev writes the rooms. What it does not write is the door of each package, its `__init__.py` (every
public name of its rooms, under one address, loaded when it is first used), and `_help.json`: what
the comments say beside every parameter, for `help()`.
"""
import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import notebooks
from describe import descriptions

ROOT = Path(__file__).resolve().parent.parent
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
DOOR = '''"{question}"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {{
{rooms}}})
'''


def public_names(path):
    "What a room offers: the names that nbdev lists in its `__all__`."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


def offered(folder):
    "room -> names that the package offers; a name that is called like a room stays inside."
    rooms = {path.stem: public_names(path) for path in sorted(folder.glob("[a-z]*.py"))}
    inside = {*rooms, "main"}  # `main` is what a command calls
    rooms = {room: sorted(set(names) - inside) for room, names in rooms.items()}
    return {room: names for room, names in rooms.items() if names}


def check_homes(
    packages,  # package -> room -> names
):
    "Stop at a public name that two rooms offer."
    homes = {}
    for package, rooms in packages.items():
        for room, names in rooms.items():
            for name in names:
                if name in homes:
                    sys.exit(f"{name} has two homes: {homes[name]} and {package}.{room}")
                homes[name] = f"{package}.{room}"


def door(package, rooms):
    "The text of a package's `__init__.py`."
    lines = []
    for room, names in rooms.items():
        words = textwrap.indent(textwrap.fill(" ".join(names), 88), " "*8)
        lines.append(f'    "{room}": """\n{words}""",\n')
    return DOOR.format(question=PACKAGES[package], rooms="".join(lines))


def stub(rooms):
    "The same for a type checker, which runs nothing: the text of `__init__.pyi`."
    return "".join(f"from .{room} import {name} as {name}\n"
                   for room, names in rooms.items() for name in names)


def surface(library):
    "package -> names that `dp_course` itself offers."
    text = (library/"__init__.py").read_text(encoding="utf-8")
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "_door")
    return {room: names.split() for room, names in ast.literal_eval(call.args[1]).items()}


def write_doors(library=ROOT/"dp_course"):
    "Write `__init__.py` and `__init__.pyi` of every package."
    packages = {package: offered(library/package) for package in PACKAGES}
    check_homes(packages)
    for package, rooms in packages.items():
        (library/package/"__init__.py").write_text(door(package, rooms), encoding="utf-8")
        (library/package/"__init__.pyi").write_text(stub(rooms), encoding="utf-8")
    text = "__version__: str\ndef _document(room: str) -> None: ...\n" + stub(surface(library))
    (library/"__init__.pyi").write_text(text, encoding="utf-8")


def sweep(library=ROOT/"dp_course"):
    "Delete rooms whose notebook has gone."
    made = {f"{notebooks.module_of(path)}".replace(".", "/")
            for path in [*notebooks.lessons(), *notebooks.rooms()]}
    for path in [*library.glob("[a-z]*.py"), *library.glob("*/[a-z]*.py")]:
        if path.relative_to(library).with_suffix("").as_posix() not in made:
            path.unlink()


def write_help(library=ROOT/"dp_course"):
    "Write down what `help()` says beyond the docstrings of a line."
    rooms = sorted([*library.glob("[a-z]*.py"), *library.glob("*/[a-z]*.py")])
    found = {".".join(path.relative_to(library.parent).with_suffix("").parts): descriptions(path)
             for path in rooms}
    text = json.dumps(found, indent=0, ensure_ascii=False) + "\n"
    (library/"_help.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=ROOT, check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    (ROOT/"dp_course/_modidx.py").unlink(missing_ok=True)  # for nbdev_update, which nobody needs
    sweep()
    write_doors()
    write_help()
