"""The page that teaches dispatch: one self-contained HTML file, to be opened from disk."""

import json
import os
from collections import defaultdict
from html import escape
from itertools import repeat
from urllib.parse import quote

from markdown_it import MarkdownIt

from epmoe.explain import stills
from epmoe.explain.bundle import chapters, filled, put_together, script, source
from epmoe.explain.world import reference
from epmoe.provenance import install
from epmoe_ref.errors import UnavailableError

# numbers in the page besides the world's sizes
NUMBERS = {"bigExperts": 256, "bigTokens": 4096, "bigTopK": 8, "skew": 1.0}


def data_of(drawn, recordings=()):
    """(the initial data of the page's JavaScript, the page's chapters)."""
    every = [c for c in chapters() if c.name != "broken" or recordings]
    return {
        "world": drawn.world,
        "whole": drawn.whole,
        "numbers": NUMBERS,
        "measured": json.loads(source("measured.json")),
        "recordings": recordings,
    }, every


def page(drawn, recordings=(), tape=None):
    """(HTML text, notes on packages that it lacks). tape: the name of the second page's file."""
    data, every = data_of(drawn, recordings)
    numbers = NUMBERS | {k: drawn.world[k] for k in ("ranks", "local", "topK")}
    numbers["tokens"] = max(map(len, drawn.world["ids"]))
    notes = []
    try:
        values = stills.call("words", data=data) | {"chapters": len(every)}
        made = stills.call("stills", data=data, order=[c.name for c in every], width=680, oneEach=True)
    except UnavailableError:
        values, made = defaultdict(lambda: "…"), []
        notes.append(f"The page has no pictures for print or without JavaScript: {install('explain')}")
    pictures = {still["chapter"]: still for still in made}
    page = put_together(
        "index.html",
        STYLE=source("stage.css") + source("style.css"),
        INTRO=_intro(drawn, values, numbers),
        CHAPTERS="".join(_section(c, pictures.get(c.name), values, numbers, recordings) for c in every),
        FOOTER=_footer(tape, data["measured"]),
        DATA=data,
        ARRAYS=reference(drawn.world),
        SCRIPT=script("main"),
    )
    return page, notes


def _section(chapter, still, values, numbers, recordings):
    picture = (
        f'<figure class="still">{stills.inline(still, escape(chapter.title, quote=True))}</figure>' if still else ""
    )
    lengths = [r["length"] for r in recordings] if chapter.name == "broken" else repeat(1)
    steps = "".join(
        f'<li style="--n:{n}"><div>{filled(caption, values, numbers)}</div></li>'
        for caption, n in zip(chapter.captions, lengths)
    )
    return (
        f'<section class="chapter" id="{chapter.name}"><h2>{chapter.title}</h2>{filled(chapter.text, values, numbers)}'
        f'{picture}<ol class="steps">{steps}</ol></section>\n'
    )


def _intro(drawn, values, numbers):
    html = filled(MarkdownIt().render(source("text/intro.md")), values, numbers)
    return html + "".join(f'<p class="quiet">{escape(n)}</p>' for n in drawn.notes)


def _footer(tape, measured):
    link = (
        f'<p>Every counter of a recorded round: <a href="{quote(os.fsencode(tape))}">the full tape</a>.</p>'
        if tape
        else ""
    )
    return (
        f"{link}<p>Made by <code>epmoe explain</code>. The numbers on the stage come from "
        "<code>epmoe_ref</code>; its arrays are in this page as JSON, under the id <code>arrays</code>. "
        f"Measured device times: {measured['device']}, {measured['date']}, 7,168 columns, 256 experts, top 8.</p>"
    )
