"""Inserts calls of visit__ into sources, to record which lines a world runs. Line numbers do not change."""

import ast

NAME = "visit__"
SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.Return,
    ast.Raise,
    ast.Assert,
    ast.Pass,
    ast.Break,
    ast.Continue,
    ast.AnnAssign,
    ast.Import,
    ast.ImportFrom,
)


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
    if isinstance(node, SIMPLE):
        return node
    return getattr(node, "test", getattr(node, "iter", None))


def marked_lines(file, source, lines):
    """The source with a call of visit__(file, -line) at each statement or condition on one of these lines."""
    starts, raw, insertions = [0], source.encode(), []
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        part = _part(node)
        if not isinstance(node, ast.stmt) or part is None:
            continue
        hit = lines & set(range(node.lineno, part.end_lineno + 1))
        if hit:
            begin, end = (
                starts[at - 1] + column
                for at, column in ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
            )
            call = " and ".join(f"{NAME}({file!r}, {-line})" for line in sorted(hit))
            insertions += [(begin, f"{call}; ")] if part is node else [(begin, f"({call} and ("), (end, "))")]
    for at, text in sorted(insertions, reverse=True):
        raw = raw[:at] + text.encode() + raw[at:]
    return raw.decode()
