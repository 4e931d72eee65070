"""Tells a lesson: its file is read from top to bottom, comments are printed as text, code is shown, run, and heard.

A lesson is a plain Python file. Comments that begin in the first column are the text of the article, "# ## " begins a
section; everything else is code, comments inside functions included. Line numbers stay those of the file, so that
tracebacks, race reports and hang reports point into the article.
"""

import ast
import contextlib
import os
import sys
import textwrap

WIDTH = 80
INDENT = "    "  # before each line that the code prints
BAR = "│ "  # before each line of code


def cells(source):
    """[("text", lines), ("code", first line number, lines)] of a lesson, without docstring and __main__ block."""
    tree = ast.parse(source)
    lines = source.splitlines()
    out, at = [], 0
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        _texts(out, lines[at : first - 1])
        at = node.end_lineno
        if node is tree.body[0] and ast.get_docstring(tree) or _is_main(node):
            continue
        if out and out[-1][0] == "code":
            out[-1][2].extend(lines[out[-1][1] - 1 + len(out[-1][2]) : at])
        else:
            out.append(("code", first, lines[first - 1 : at]))
    _texts(out, lines[at:])
    return out


def _is_main(node):
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def _texts(out, lines):
    """Text between two pieces of code: its paragraphs, a heading alone."""
    paragraph = []
    for line in [*lines, ""]:
        if line.startswith("# ## "):
            out += [("text", paragraph), ("text", [line[2:]])]
            paragraph = []
        elif line.startswith("#") and (line[2:].strip() or paragraph):
            paragraph.append(line[2:])
        elif not line.startswith("#"):
            out.append(("text", paragraph))
            paragraph = []
    out[:] = [cell for cell in out if cell[1]]


def title(source):
    """The first line of the file's docstring."""
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def exercise_text(source):
    """The text of the section "Exercise", which ends a lesson."""
    texts = [cell[1] for cell in cells(source) if cell[0] == "text"]
    return "\n\n".join(
        "\n".join(lines) for lines in texts[texts.index(["## Exercise"]) + 1 :]
    ).strip("\n")


def wrapped(text, width=WIDTH - len(INDENT)):
    """Long lines of a report broken, the continuation indented below its beginning."""
    out = []
    for line in str(text).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        out += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False) or [""]
    return "\n".join(out)


class _Indented:
    """A stream that indents every line written to it, and sets the first one off from what stands above."""

    def __init__(self, stream):
        self.stream, self.fresh, self.used = stream, True, False

    def write(self, text):
        if not self.used:
            self.stream.write("\n")
            self.used = True
        for part in text.splitlines(keepends=True):
            self.stream.write(INDENT + part if self.fresh and part != "\n" else part)
            self.fresh = part.endswith("\n")
        return len(text)

    def flush(self):
        self.stream.flush()


class Teller:
    """Prints text, code and output; pause: wait for Enter before each section but the first."""

    def __init__(self, stream, pause=False):
        from rich.console import Console

        self.stream, self.pause, self.sections = stream, pause, 0
        self.console = Console(file=stream, highlight=False, width=WIDTH)

    def line(self, text="", style=""):
        """One line, as it is."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def text(self, lines):
        """A heading, or a piece of text."""
        if lines[0].startswith("## "):
            if self.pause and self.sections:
                try:
                    input("[Enter] ")
                except EOFError:  # nobody is there
                    self.pause = False
            self.sections += 1
            self.line(lines[0][3:], "bold cyan")
        else:
            self.line("\n".join(lines).rstrip())
        self.line()

    def code(self, lines):
        """Code as it stands in the file, behind a bar."""
        from rich.text import Text

        for line in lines:
            code, mark, comment = line.partition("#")
            self.console.print(
                Text.assemble((BAR, "cyan"), code, (mark + comment, "dim")), soft_wrap=True
            )


@contextlib.contextmanager
def plain_simulator():
    """The simulator, which shows what lessons are about, and none of its options from the environment."""
    os.environ["EPMOE_DEVICE"] = "sim"
    kept = {name: os.environ.pop(name, None) for name in ("EPMOE_SEED", "EPMOE_RACECHECK")}
    os.environ["EPMOE_RACECHECK"] = "0"  # a lesson that wants the race detector says so
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def tell(file, *, pause=False, stream=None):
    """Tell the lesson of a file; an assertion that fails in it is raised. Returns the names that it defined."""
    with plain_simulator():
        return _told(file, pause, stream)


def _told(file, pause, stream):
    source = open(file, encoding="utf-8").read()
    teller, names = (
        Teller(stream or sys.stdout, pause),
        {"__name__": "lesson", "__file__": str(file)},
    )
    teller.line(title(source), "bold underline")
    teller.line()
    for kind, *cell in cells(source):
        if kind == "text":
            teller.text(cell[0])
            continue
        first, lines = cell
        teller.code(lines)
        heard = _Indented(teller.stream)
        with contextlib.redirect_stdout(heard):
            exec(compile("\n" * (first - 1) + "\n".join(lines), str(file), "exec"), names)
        teller.line()
    return names
