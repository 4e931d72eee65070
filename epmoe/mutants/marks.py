"""Inserts calls of visit__ into sources, to record what a world runs. Line numbers do not change."""

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
)


def marked_tokens(file, source, tokens):
    """The source with a call of visit__(file, start) at each token of {start: tokens.Token}."""
    for start in sorted(tokens, reverse=True):
        t = tokens[start]
        text = source[t.start : t.end]
        if t.is_statement:
            new = f"{NAME}({file!r}, {start}); {text}"
        else:
            new = f"({NAME}({file!r}, {start}) and {text})"
        source = source[: t.start] + new + source[t.end :]
    return source


def marked_lines(file, source, lines):
    """The source with a call of visit__(file, -line) at each statement or condition on one of these lines."""
    starts, raw, insertions = [0], source.encode(), []
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        part = (
            node if isinstance(node, SIMPLE) else getattr(node, "test", getattr(node, "iter", None))
        )
        if not isinstance(node, ast.stmt) or part is None:
            continue
        hit = lines & set(range(node.lineno, part.end_lineno + 1))
        if hit:
            begin, end = (
                starts[at - 1] + column
                for at, column in (
                    (part.lineno, part.col_offset),
                    (part.end_lineno, part.end_col_offset),
                )
            )
            call = f"{NAME}({file!r}, {-min(hit)})"
            insertions += (
                [(begin, f"{call}; ")] if part is node else [(begin, f"({call} and ("), (end, "))")]
            )
    for at, text in sorted(insertions, reverse=True):
        raw = raw[:at] + text.encode() + raw[at:]
    return raw.decode()
