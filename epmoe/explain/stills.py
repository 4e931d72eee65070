"""Draws the page's pictures as SVG text and PNG, with the page's own JavaScript in QuickJS (extra `explain`)."""

import json
from functools import cache

from epmoe.explain.bundle import script, source
from epmoe.provenance import install
from epmoe_ref.errors import UnavailableError


def evaluator():
    """dukpy's evaljs; raises UnavailableError without dukpy."""
    try:
        import dukpy
    except ImportError:
        raise UnavailableError(
            f"pictures outside a browser need dukpy, which is not installed:\n{install('explain')}"
        ) from None
    return dukpy.evaljs


def call(function, **arguments):
    """Call a function of page/stills.js; raises UnavailableError without dukpy."""
    return json.loads(
        evaluator()(f"{script('stills')}\nJSON.stringify({function}(dukpy.arguments))", arguments=arguments)
    )


def inline(still, name):
    """A picture for the page, which supplies its style."""
    return (
        f'<svg role="img" aria-label="{name}" width="{still["width"]}" height="{still["height"]}" '
        f'viewBox="0 0 {still["width"]} {still["height"]}">{still["svg"]}</svg>'
    )


def alone(still):
    """A picture as a separate SVG file, for slides: its text of 12 px has 16."""
    w, h = still["width"], still["height"]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{(w + 16) * 4 / 3:.0f}" height="{(h + 16) * 4 / 3:.0f}" '
        f'viewBox="-8 -8 {w + 16} {h + 16}"><style>{source("stage.css")}</style>'
        f'<rect class="ground" x="-8" y="-8" width="{w + 16}" height="{h + 16}"/>{still["svg"]}</svg>\n'
    )


WORD = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><style>%s</style><text class="t" y="15">word</text></svg>'
FONTS = "Arial, Liberation Sans, DejaVu Sans, Noto Sans"


@cache
def _draws_words():
    """Whether resvg finds a font of the style sheet; without one it silently omits words."""
    import resvg_py

    with_word = WORD % source("stage.css")
    return resvg_py.svg_to_bytes(svg_string=with_word) != resvg_py.svg_to_bytes(
        svg_string=with_word.replace(">word<", "><")
    )


def png(text):
    """PNG bytes of an SVG text, in its light colours; raises UnavailableError without resvg, or without a font."""
    try:
        import resvg_py
    except ImportError:
        raise UnavailableError(
            f"PNG files need resvg, which is not installed (SVG files need nothing):\n{install('explain')}"
        ) from None
    if not _draws_words():
        raise UnavailableError(
            f"PNG files need a font for their words, one of {FONTS}: apt-get install fonts-dejavu-core; "
            "SVG files need nothing"
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=text))
