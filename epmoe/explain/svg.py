"""Drawing: SVG elements as text, and panels, which stand beside each other in a figure."""

import json
from html import escape
from typing import NamedTuple

from epmoe.explain import palette

GAP = 24            # pixels between the panels of a figure
MARGIN = 16


class Panel(NamedTuple):
    """A piece of a figure: its title, size in pixels, and what is drawn in it."""

    title: str
    width: float
    height: float
    body: str


def number(v):
    """A coordinate, short."""
    return f"{v:.1f}".rstrip("0").rstrip(".") if isinstance(v, float) else str(v)


def tag(name, *children, **attributes):
    """One element; underscores in attribute names are hyphens, `cls` is the class, None is left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        key = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
        words.append(f'{key}="{escape(number(value) if isinstance(value, (int, float)) else str(value))}"')
    inner = "".join(children)
    return f"<{' '.join(words)}>{inner}</{name}>" if inner else f"<{' '.join(words)}/>"


def text(x, y, content, cls="t", anchor=None, **attributes):
    """A line of text with its baseline at y."""
    return tag("text", escape(str(content)), x=x, y=y, cls=cls, text_anchor=anchor, **attributes)


def rect(x, y, width, height, cls, rx=None, **attributes):
    """A rectangle."""
    return tag("rect", x=x, y=y, width=width, height=height, cls=cls, rx=rx, **attributes)


def path(d, cls, **attributes):
    """A path."""
    return tag("path", d=d, cls=cls, **attributes)


def shown(at=None, value=None, since=None, history=None, tip=None, now=None):
    """Attributes of what shows a value: where it is found, the value, from which step on it is there, how it changed.

    at: the place in words; value: as recorded; since: the first step at which it can be seen; history: [[step, text]],
    with a 1 behind a text that is over; tip: more words for whoever points at it; now: the step at which it stands out.
    """
    return {"data_at": at, "data_value": None if value is None else str(value),
            "data_from": None if since is None else str(since),
            "data_h": None if history is None else json.dumps(history, separators=(",", ":")),
            "data_tip": tip, "data_now": None if now is None else str(now)}


def token_box(x, y, width, height, rank, content, **attributes):
    """A token: a box in its source rank's colour with its name."""
    n = palette.rank_class(rank)
    return tag("g", rect(x, y, width, height, f"s{n} edge", 3),
               text(x + width / 2, y + height / 2 + 4, content, f"x x{n} small", "middle"), **attributes)


def hollow_box(x, y, width, height, rank, content, **attributes):
    """A token that is told of but not there: its name in a frame of its source rank's colour."""
    return tag("g", rect(x + 1, y + 1, width - 2, height - 2, f"hollow k{palette.rank_class(rank)}", 3),
               text(x + width / 2, y + height / 2 + 4, content, "t small", "middle"), **attributes)


def inline(panel, name):
    """A panel as it stands in the page, where its style comes from."""
    return (f'<svg class="panel" role="img" aria-label="{escape(panel.title or name)}" width="{number(panel.width)}" '
            f'height="{number(panel.height)}" viewBox="0 0 {number(panel.width)} {number(panel.height)}">'
            f"{panel.body}</svg>")


def figure(panels, width=1100, heading=None):
    """Panels beside each other, in rows of at most `width` pixels, as an SVG file of its own."""
    x, y, row, placed, right = MARGIN, MARGIN + (26 if heading else 0), 0, [], 0
    for panel in panels:
        if x > MARGIN and x + panel.width > width:
            x, y, row = MARGIN, y + row + GAP, 0
        placed.append(tag("g", panel.body, transform=f"translate({number(x)} {number(y)})"))
        x, row = x + panel.width + GAP, max(row, panel.height)
        right = max(right, x - GAP + MARGIN)
    height = y + row + MARGIN
    title = text(MARGIN, MARGIN + 12, heading, "t title") if heading else ""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(right)}" height="{number(height)}" '
            f'viewBox="0 0 {number(right)} {number(height)}"><style>{palette.css()}</style>'
            f'{rect(0, 0, right, height, "ground")}{title}{"".join(placed)}</svg>\n')


def wrapped(panels, width):
    """Small panels (entries of a legend) in lines of at most `width` pixels, as one panel."""
    x, y, right, parts = 0, 0, 0, []
    for panel in panels:
        if x and x + panel.width > width:
            x, y = 0, y + panel.height + 4
        parts.append(tag("g", panel.body, transform=f"translate({number(x)} {number(y)})"))
        right = max(right, x + panel.width)
        x += panel.width + 16
    return Panel("", right, y + panels[-1].height, "".join(parts))


def rank_legend(ranks, what="token of rank"):
    """What the ranks' colours mean, an entry each."""
    return [entry(rect(0, 1, 14, 14, f"s{palette.rank_class(rank)} edge", 3), f"{what} {rank}", 20) for rank in ranks]


def entry(sign, words, at):
    """An entry of a legend: a sign, and words behind it."""
    return Panel(words, at + 7.6 * len(words), 18, sign + text(at, 12, words, "m"))
