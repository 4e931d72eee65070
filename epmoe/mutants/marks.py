"""Inserts calls of visit__ into sources, to record which lines a world runs. Line numbers do not change."""

import ast

from epmoe.mutants.token_mutations import spans

NAME = "visit__"


def marked_tokens(file, source, tokens):
    """The source with a call of visit__(file, start) at each token of {start: token_mutations.Token}."""
    for start in sorted(tokens, reverse=True):
        t = tokens[start]
        text = source[t.start : t.end]
        if t.is_statement:
            new = f"{NAME}({file!r}, {start}); {text}"
        else:
            new = f"({NAME}({file!r}, {start}) and {text})"
        source = source[: t.start] + new + source[t.end :]
    return source


def functions_of(source, lines):
    """The lines at which the innermost functions around these lines begin to run."""
    found = set()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for line in lines:
        around = [
            f for f in functions if min((f, *f.decorator_list), key=lambda n: n.lineno).lineno <= line <= f.end_lineno
        ]
        if around:
            found.add(_first(max(around, key=lambda f: f.lineno)))
    return found


def _first(function):
    """The line of its first statement that can be marked."""
    return next(filter(_part, function.body), function).lineno


def _part(node):
    """The part of a statement that is marked: all of it, its condition, or its iterable; None if there is none."""
    if not hasattr(node, "body"):  # a simple statement
        return node
    return getattr(node, "test", getattr(node, "iter", None))


def marked_lines(file, source, lines):
    """The source with a call of visit__(file, -line) at each statement or condition on one of these lines."""
    span, insertions = spans(source), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or (part := _part(node)) is None:
            continue
        hit = lines & set(range(node.lineno, part.end_lineno + 1))
        if hit:
            begin, end = span(part)
            call = " and ".join(f"{NAME}({file!r}, {-line})" for line in sorted(hit))
            insertions += [(begin, f"{call}; ")] if part is node else [(begin, f"({call} and ("), (end, "))")]
    for at, text in sorted(insertions, reverse=True):
        source = source[:at] + text + source[at:]
    return source
