"""Prints a lesson from top to bottom: its comments as text, its code, and the output of the code.

A lesson is a plain Python file. Comments that begin in the first column are the text of the article, "# ## " begins a
section; everything else is code, comments inside functions included. Line numbers are the file's and stand before
each line of code, so that tracebacks, race reports and hang reports point into the article.

A paragraph that begins with "Predict: " asks for a prediction, which --step waits for. One that begins with "Answer: "
answers the question above it and is folded: only --answers shows it. Code below an answer checks its numbers: it runs, and
is never shown.
"""

import ast
import contextlib
import os
import sys
import textwrap
from shutil import get_terminal_size

WIDTH = 80
INDENT = "    "  # before each line that the code prints
BAR = "│"  # between the number of a line of code and the line
WORKED, EXERCISES = "## Worked problems", "## Exercises"  # the sections that end a lesson


def cells(source):
    """The pieces of a lesson in order, without docstring and __main__ block.

    ("text", lines), ("predict", lines), ("answer", lines), ("code", first line number, lines), and ("check", ...) for code
    below an answer.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    out, at = [], 0
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        _texts(out, lines[at : first - 1])
        at = node.end_lineno
        if node is tree.body[0] and ast.get_docstring(tree) or _is_main(node):
            continue
        if out and out[-1][0] in ("code", "check"):
            out[-1][2].extend(lines[out[-1][1] - 1 + len(out[-1][2]) : at])
        else:
            kind = "check" if out and out[-1][0] == "answer" else "code"
            out.append((kind, first, lines[first - 1 : at]))
    _texts(out, lines[at:])
    return out


def _is_main(node):
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def _texts(out, lines):
    """The paragraphs of the text between two pieces of code; a heading is a paragraph."""
    paragraphs = [[]]
    for line in lines:
        text = line[2:]
        if line.startswith("# ## "):
            paragraphs += [[text], []]
        elif not line.startswith("#") or _apart(paragraphs[-1]) and not text.strip():
            paragraphs.append([])
        elif _apart([text]):
            paragraphs.append([text])
        elif text.strip() or paragraphs[-1]:
            paragraphs[-1].append(text)
    for paragraph in filter(None, paragraphs):
        out.append((paragraph[0].partition(":")[0].lower() if _apart(paragraph) else "text", paragraph))


def _apart(paragraph):
    """Whether it is a prediction or an answer, which end with their paragraph."""
    return bool(paragraph) and paragraph[0].startswith(("Predict: ", "Answer: "))


def title(source):
    """The first line of the file's docstring."""
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def exercise_text(source):
    """The text of the section "Exercises", which ends a lesson."""
    texts = [cell[1] for cell in cells(source) if cell[0] == "text"]
    return _joined(texts[texts.index([EXERCISES]) + 1 :])


def worked_problems(source):
    """The section "Worked problems" with its answers."""
    texts = [cell[1] for cell in cells(source) if cell[0] in ("text", "predict", "answer")]
    return _joined(texts[texts.index([WORKED]) + 1 : texts.index([EXERCISES])])


def _joined(texts):
    return "\n\n".join("\n".join(lines).rstrip() for lines in texts).strip("\n")


def wrapped(text, width=WIDTH - len(INDENT)):
    """A report with long lines broken; continuation lines are indented."""
    out = []
    for line in str(text).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        out.append(textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
    return "\n".join(out)


def for_terminal(text):
    """Text with long lines broken if stdout is a terminal; pipes get whole lines. "again: COMMAND" is kept."""
    if not sys.stdout.isatty():
        return str(text)
    width = get_terminal_size().columns
    lines = str(text).splitlines()
    return "\n".join(line if line.startswith("  again: ") else wrapped(line, width) for line in lines)


class _Indented:
    """A stream that indents every line written to it, with an empty line before the first."""

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
    """Prints text, code and output.

    pause: wait for Enter before each section but the first, and for each prediction.
    """

    def __init__(self, pause):
        from rich.console import Console

        self.pause, self.sections, self.predicted = pause, 0, ""
        self.console = Console(highlight=False, width=WIDTH)

    def line(self, text="", style=""):
        """One line, as it is."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def text(self, lines):
        """A heading, or a piece of text."""
        if lines[0].startswith("## "):
            if self.pause and self.sections:
                self._asked("[Enter] ")
            self.sections += 1
            self.line(lines[0][3:], "bold cyan")
        else:
            self.line("\n".join(lines).rstrip())
        self.line()

    def predict(self, lines):
        """A question about what the next code prints; with pause the reader's answer is kept until it has run."""
        self.line("\n".join(lines).rstrip(), "bold" if self.pause else "")
        self.line()
        if self.pause:
            self.predicted = self._asked("Your prediction: ").strip()
            self.line()

    def code(self, first, lines):
        """The file's code, with line numbers."""
        from rich.text import Text

        for number, line in enumerate(lines, first):
            code, mark, comment = line.partition("#")
            self.console.print(
                Text.assemble((f"{number:3}{BAR}", "dim"), code, (mark + comment, "dim")), soft_wrap=True
            )

    def recall(self):
        """The prediction made before the code that has just run."""
        if self.predicted:
            self.line(f"You predicted: {self.predicted}", "bold")
            self.predicted = ""

    def _asked(self, question):
        """A line that the reader types, "" if there is no input."""
        try:
            return input(question)
        except EOFError:
            self.pause = False
            return ""


@contextlib.contextmanager
def plain_simulator():
    """Choose the simulator, which lessons need, and ignore its options in the environment."""
    os.environ["EPMOE_DEVICE"] = "sim"
    kept = {name: os.environ.pop(name) for name in ("EPMOE_SEED", "EPMOE_RACECHECK") if name in os.environ}
    os.environ["EPMOE_RACECHECK"] = "0"  # a lesson that wants the race detector says so
    try:
        yield
    finally:
        del os.environ["EPMOE_RACECHECK"]
        os.environ.update(kept)


@plain_simulator()
def tell(file, *, pause=False):
    """Print the lesson of a file. A failing assertion in it is raised."""
    source = open(file, encoding="utf-8").read()
    teller = Teller(pause)
    names = {"__name__": "lesson", "__file__": str(file)}
    teller.line(title(source), "bold underline")
    teller.line()
    for kind, *cell in cells(source):
        if kind == "text":
            teller.text(cell[0])
            if cell[0] == [WORKED]:
                name = title(source).partition(":")[0].lower()
                teller.text([f"The answers are folded. `epmoe {name} --answers` shows them."])
        elif kind == "predict":
            teller.predict(cell[0])
        elif kind != "answer":
            first, lines = cell
            if kind == "code":
                teller.code(first, lines)
            with contextlib.redirect_stdout(_Indented(sys.stdout)):
                exec(compile("\n" * (first - 1) + "\n".join(lines), str(file), "exec"), names)
            if kind == "code":
                teller.recall()
                teller.line()
