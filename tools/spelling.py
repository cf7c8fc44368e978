"""Spelling against a word list: `python tools/spelling.py` says which words it does not know.

The list is tests/words.txt, base forms in the main: a word is known if it, or what is left without
a common ending or beginning, stands there. `--add` writes the unknown ones into the list: read
them first, one by one.
"""
import json
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT/"tests/words.txt"
SILENT = (r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$"  # code and formulas,
          r"|\]\([^)]*\)|https?://\S+|<[^>]+>|\S*[_/\\@=^]\S*|\b\w*\d\w*")  # links, tags, names
ENDINGS = (("s", ""), ("es", ""), ("ies", "y"), ("ed", ""), ("ed", "e"), ("ied", "y"),
           ("ing", ""), ("ing", "e"), ("er", ""), ("er", "e"), ("est", ""), ("est", "e"),
           ("ly", ""), ("ily", "y"))
DOUBLED = re.compile(r"^[^aeiou]*[aeiou][^aeiouwxy]$|cur$|[^f]fer$|[^i]mit$|trol$|gin$|pel$")
BEGINNINGS = ("un", "re", "non", "mis", "over")


def files():
    "Whatever people read: the notebooks, the assignments and what lies beside them."
    found = [p for where in ("nbs/**", "assignments") for p in ROOT.glob(f"{where}/*.ipynb")
             if ".ipynb_checkpoints" not in p.parts]
    return sorted([*found, ROOT/"assignments/README.md"])


def prose(path):
    "Pieces of text: the prose cells of a notebook, or a whole Markdown file."
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return [text]
    return ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]


def words(text):
    "The words of a text, without code, formulas, links and names that hold digits."
    text = re.sub(SILENT, " ", text, flags=re.S).replace("’", "'")
    return [w.strip("'") for w in re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text)]


@cache
def listed():
    return frozenset(LIST.read_text(encoding="utf-8").split())


def bases(word):
    "What a word may be made from."
    for ending, instead in ENDINGS:
        if word.endswith(ending) and len(word) > len(ending) + 2:
            base = word.removesuffix(ending) + instead
            vowel = ending in ("ed", "ing", "er", "est") and not instead
            if vowel and base[-1] == base[-2]:
                yield base[:-1]
            if not (vowel and DOUBLED.search(base)):
                yield base
    for beginning in BEGINNINGS:
        if word.startswith(beginning) and len(word) > len(beginning) + 3:
            yield word.removeprefix(beginning)


def known(word, accepted=None, depth=2):
    "Whether a word, or a base of it, is in the list."
    accepted = listed() if accepted is None else accepted
    word = word.lower().removesuffix("'s")
    if word in accepted or len(word) < 3:
        return True
    return depth > 0 and any(known(base, accepted, depth - 1) for base in bases(word)
                             if len(base) > 2)


def unknown(path):
    "Words of a file that are not known, in order, with what stands around them."
    for text in prose(path):
        for word in words(text):
            if not known(word):
                at = text.find(word)
                yield word, " ".join(text[max(0, at - 30):at + len(word) + 30].split())


def main(argv):
    found = {word.lower().removesuffix("'s"): (path.name, around)
             for path in files() for word, around in unknown(path)}
    for word, (name, around) in sorted(found.items()):
        print(f"{word:20} {name}: ... {around} ...")
    if "--add" in argv:
        LIST.write_text("\n".join(sorted(listed() | set(found))) + "\n", encoding="utf-8")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
