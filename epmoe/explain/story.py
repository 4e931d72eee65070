"""The page that teaches dispatch: one self-contained HTML file, to be opened from disk."""

import json
import os
from html import escape
from urllib.parse import quote

from epmoe.explain import stills
from epmoe.explain.bundle import chapters, filled, script, source
from epmoe.explain.world import reference
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
        "recordings": list(recordings),
        "words": {"chapters": len(every)},
    }, every


def page(drawn, recordings=(), tape=None):
    """(HTML text, notes on what the page lacks). tape: the name of the second page's file."""
    data, every = data_of(drawn, recordings)
    numbers = NUMBERS | {k: drawn.world[k] for k in ("ranks", "local", "topK")}
    numbers["tokens"] = max(map(len, drawn.world["ids"]))
    notes = list(drawn.notes)
    try:
        values = stills.call("words", data=data) | data["words"]
        pictures = {
            s["chapter"]: s
            for s in stills.call("stills", data=data, order=[c.name for c in every], width=680, oneEach=True)
        }
    except UnavailableError as error:
        values, pictures = None, {}
        notes.append(f"Without JavaScript and in print the page has no pictures:\n{error}")
    body = "".join(_section(c, pictures.get(c.name), values, numbers, data) for c in every)
    return _put(
        source("index.html"),
        {
            "STYLE": source("stage.css") + source("style.css"),
            "INTRO": _intro(drawn, values, numbers, tape),
            "CHAPTERS": body,
            "FOOTER": _footer(tape),
            "DATA": _json(data),
            "ARRAYS": _json(reference(drawn.world)),
            "SCRIPT": script("main"),
        },
    ), notes


def _put(template, parts):
    for name, part in parts.items():
        template = template.replace(f"@{name}@", part, 1)
    return template


class _Open(dict):
    def __missing__(self, key):
        return "…"


def _section(chapter, still, values, numbers, data):
    values = values or _Open()
    picture = (
        f'<figure class="still">{stills.inline(still, escape(chapter.title, quote=True))}</figure>' if still else ""
    )
    items = chapter.captions
    lengths = [r["length"] for r in data["recordings"]] if chapter.name == "broken" else [1] * len(items)
    if chapter.name == "broken":
        items = [r["caption"] for r in data["recordings"]]
    steps = "".join(f'<li style="--n:{n}"><div>{filled(c, values, numbers)}</div></li>' for c, n in zip(items, lengths))
    return (
        f'<section class="chapter" id="{chapter.name}"><h2>{chapter.title}</h2>{filled(chapter.text, values, numbers)}'
        f'{picture}<ol class="steps">{steps}</ol></section>\n'
    )


def _intro(drawn, values, numbers, tape):
    from markdown_it import MarkdownIt

    html = filled(MarkdownIt().render(source("text/intro.md")), values or _Open(), numbers)
    return html + "".join(f'<p class="quiet">{escape(n)}</p>' for n in drawn.notes)


def _footer(tape):
    link = (
        f'<p>Every counter of a recorded round: <a href="{quote(os.fsencode(tape))}">the full tape</a>.</p>'
        if tape
        else ""
    )
    return (
        f"{link}<p>Made by <code>epmoe explain</code>. The numbers on the stage come from "
        "<code>epmoe_ref</code>; its arrays are in this page as JSON, under the id <code>arrays</code>. "
        "Measured device times: 4 x NVIDIA H200, 2026-11-22, 7,168 columns, 256 experts, top 8.</p>"
    )


def _json(value):
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
