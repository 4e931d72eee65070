"""Puts a Markdown table with the paragraph below it into a page, replacing the existing table."""

import sys
import textwrap
from pathlib import Path

WIDTH = 124  # of a page's paragraphs


def paragraph(text):
    """Lines of a paragraph."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def us(microseconds):
    """Microseconds as a table shows them."""
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def row(words):
    """A line of a table."""
    return f"| {' | '.join(words)} |"


def shown(table, below, into, program):
    """Print a table and the paragraph below it, or put them into a page. Returns the exit status.

    table: lines. below: the paragraph; its first words, up to a comma, identify the table. into: the page, or None.
    """
    lines = [*table, "", *paragraph(below)]
    if into is None:
        print("\n".join(lines))
        return 0
    page = Path(into)
    text = replaced(page.read_text().splitlines(), table, lines)
    if text is None:
        print(
            f"{program}: {page} has no table that begins with {table[0]} and no words of their own below it, or "
            f"{below.partition(',')[0]!r}; put these words there",
            file=sys.stderr,
        )
        return 2
    page.write_text("\n".join(text) + "\n")
    print(f"{page} has the new table and the text below it; check any other text about it yourself")
    return 0


def replaced(text, table, lines):
    """The lines of a page, with the table that has the same heading and the same first words below it replaced. If
    there is none, replaces a table whose text begins with another word, or that has no text; None without such a table."""
    name = lines[len(table) + 1].partition(",")[0]
    others = None
    for start in (i for i, line in enumerate(text) if line == table[0]):
        end = next((i for i in range(start, len(text)) if not text[i].startswith("|")), len(text))
        below = end + 1
        if text[below : below + 1] and text[below].startswith(f"{name},"):
            end = next((i for i in range(below, len(text)) if not text[i]), len(text))
            return text[:start] + lines + text[end:]
        if others is None and not any(line.startswith(name.split()[0]) for line in text[below : below + 1]):
            others = text[:start] + lines + text[end:]
    return others
