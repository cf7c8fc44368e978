"What the comments of a room say about its public functions and classes, as text for `help()`."
import ast
import io
import tokenize


def _comments(source):
    "Line number -> text of the comment there, with what goes on below it in the same column."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    texts = {token.start[0]: token.string.lstrip("#").strip() for token in found}
    column = {token.start[0]: token.start[1] for token in found}
    alone = {token.start[0] for token in found if not token.line[:token.start[1]].strip()}
    for line in sorted(alone, reverse=True):
        if line - 1 in texts and line - 1 not in alone and column[line] == column[line - 1]:
            below = line
            while below in alone and column[below] == column[line]:
                texts[line - 1] += " " + texts[below]
                below += 1
    return texts


def _parameters(function, comments):
    "(name, comment) of every parameter that stands in a line of its own and has a comment."
    every = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    lines = [arg.lineno for arg in every]
    found = []
    for arg in sorted(every, key=lambda arg: arg.lineno):
        alone = lines.count(arg.lineno) == 1 and arg.lineno != function.lineno
        if alone and arg.lineno in comments:
            found.append((arg.arg, comments[arg.lineno]))
    return found


def _returned(function, comments):
    "The comment behind the end of the signature."
    nodes = [node for node in ast.walk(function.args) if hasattr(node, "lineno")]
    last = max([function.lineno, *(node.end_lineno for node in nodes)])
    one_line = last == function.lineno
    for line in range(last if one_line else last + 1, function.body[0].lineno):
        if line in comments:
            return comments[line]
    return ""

def _is_docstring(node):
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(getattr(value, "value", None), str)


def _remarks(node, comments, lines):
    "The comment lines that follow the docstring."
    first = node.body[0]
    step = 1 if _is_docstring(first) else -1  # without a docstring: those above the first line
    line = first.end_lineno + 1 if step > 0 else first.lineno - 1
    found = []
    while line <= len(lines) and lines[line - 1].strip().startswith("#"):
        found.append(comments[line])
        line += step
    return found[::step]


def _fields(cls, comments):
    "(name, comment) of a dataclass's fields."
    found = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and node.lineno in comments:
            found.append((node.target.id, comments[node.lineno]))
    return found


def _first_function(cls, name):
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node

def _text(docstring, parameters, returned, remarks):
    "A docstring with all that the comments say."
    parts = [docstring]
    if parameters:
        width = max(len(name) for name, _ in parameters)
        rows = [f"    {name:{width}}  {comment}" for name, comment in parameters]
        parts.append("\n".join(["Parameters", *rows]))
    if returned:
        parts.append(f"Returns\n    {returned}")
    if remarks:
        parts.append("\n".join(remarks))
    return "\n\n".join(part for part in parts if part)


def _described(node, comments, lines):
    "The whole docstring of a function or class."
    docstring = ast.get_docstring(node) or ""
    remarks = _remarks(node, comments, lines)
    if isinstance(node, ast.FunctionDef):
        parameters, returned = _parameters(node, comments), _returned(node, comments)
    else:
        parameters, returned = _fields(node, comments), ""
        init = _first_function(node, "__init__")
        if init:
            parameters = parameters + _parameters(init, comments)
            remarks = remarks + _remarks(init, comments, lines)
    return _text(docstring, parameters, returned, remarks)

def _definitions(tree):
    "(names from the module on, node) of every function, class and method."
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds):
            yield [node.name], node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, kinds):
                    yield [node.name, inner.name], inner


def descriptions(
    path,  # of a room's module
):         # dict: "name" or "Class.method" -> docstring with all that the comments say
    "Read a room."
    source = path.read_text(encoding="utf-8")
    comments, lines = _comments(source), source.splitlines()
    found = {}
    for names, node in _definitions(ast.parse(source)):
        text = _described(node, comments, lines)
        private = any(name.startswith("_") and not name.endswith("__") for name in names)
        if not private and text not in ("", ast.get_docstring(node)):
            found[".".join(names)] = text
    return found
