"""Joins the page's JavaScript modules to one script, and reads its words: Markdown with heading, text and captions.

In the words, {{name}} is a value that follows from the world, and [[name]] is a number that readers can change.
"""

import json
import re
from html import escape
from importlib.resources import files
from typing import NamedTuple

from markdown_it import MarkdownIt

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


class Chapter(NamedTuple):
    """A chapter's words as HTML: its name, title, paragraph, and the caption of each step."""

    name: str
    title: str
    text: str
    captions: list


def source(name):
    """A file of the page."""
    return files("epmoe.explain").joinpath("page", name).read_text(encoding="utf-8")


def put_together(template, **parts):
    """A page: an HTML file in which each @NAME@ is replaced by a part, a text or data for scripts."""
    page = source(template)
    for name, part in parts.items():
        text = part if isinstance(part, str) else _json(part)
        page = page.replace(f"@{name}@", text, 1)
    return page


def _json(value):
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def script(entry):
    """A module and all its imports as one script. Each module becomes a function that is called once."""
    order = []

    def visit(name):
        if name not in order:
            for _, wanted in IMPORT.findall(source(f"{name}.js")):
                visit(wanted)
            order.append(name)

    visit(entry)
    return (
        "\n".join(map(_module, order)) + f"\nconst {{{', '.join(EXPORT.findall(source(f'{entry}.js')))}}} = ${entry};"
    )


def _module(name):
    text = source(f"{name}.js")
    body = EXPORT.sub("", IMPORT.sub(r"const \1 = $\2;", text))
    return f"const ${name} = (() => {{\n{body}\nreturn {{{', '.join(EXPORT.findall(text))}}};\n}})();"


def chapters():
    """The chapters in the order of their files' numbers."""
    folder = files("epmoe.explain").joinpath("page", "text")
    names = sorted(f.name for f in folder.iterdir() if re.match(r"\d\d-", f.name))
    return [chapter(name[3:].removesuffix(".md"), source(f"text/{name}")) for name in names]


def chapter(name, markdown):
    """Split a Markdown file into a Chapter; its numbered list holds the captions."""
    html = MarkdownIt().render(markdown)
    title, rest = re.fullmatch(r"<h1>(.*?)</h1>\n(.*)", html, re.DOTALL).groups()
    text, _, steps = rest.partition("<ol>")
    return Chapter(name, title, text, re.findall(r"<li>(.*?)</li>", steps, re.DOTALL))


def filled(html, values, numbers):
    """Fill values into the words. Each value keeps its name in the page, so that scripts can update it."""
    html = re.sub(r"\{\{(\w+)\}\}", lambda m: f'<span data-value="{m[1]}">{escape(str(values[m[1]]))}</span>', html)
    return re.sub(
        r"\[\[(\w+)\]\]",
        lambda m: (
            f'<span class="scrub" data-scrub="{m[1]}" role="spinbutton" tabindex="0" aria-valuenow="{numbers[m[1]]}" '
            f'aria-label="{LABELS[m[1]]}">{numbers[m[1]]:,}</span>'
        ),
        html,
    )


LABELS = {
    "ranks": "ranks",
    "local": "experts a rank",
    "topK": "experts a token",
    "tokens": "tokens a rank",
    "skew": "skew of the routing",
    "bigExperts": "experts in a layer",
    "bigTokens": "tokens a rank",
    "bigTopK": "experts a token",
}
