"""Colours: one for each source rank, one for each phase; for light and dark, and told apart without colour vision.

Ranks have the colours of Okabe and Ito (2008), phases pale ones after Paul Tol's "light" scheme. In dark mode they are
a little lighter or darker, so that lines and letters keep their contrast. Every coloured thing has a label too.
"""

RANKS = {"light": ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C"),
         "dark": ("#4DA3DB", "#F0AB1A", "#2BB58C", "#EDB4D3", "#9AD3F5", "#EE7B3D", "#F0E442", "#A6A6A6")}
SURFACES = {"light": dict(ground="#FFFFFF", cell="#F2F3F5", line="#C3C7CE", ink="#16181D", muted="#5A6170",
                          mark="#16181D", new="#FFE9A8"),
            "dark": dict(ground="#14161B", cell="#22252C", line="#4A505C", ink="#ECEEF2", muted="#A5ACBA",
                         mark="#ECEEF2", new="#5C4A12")}
# phase -> (what it is, light, dark)
PHASES = {"read": ("reads the routing", "#CFC5EC", "#473C6B"),
          "send": ("sends messages", "#B9D3F2", "#2C4A70"),
          "signal": ("signals counts", "#F6B7A6", "#74402F"),
          "place": ("works out places", "#EFE39A", "#5E5519"),
          "copy": ("copies rows", "#A9E2CD", "#1F5A48"),
          "return": ("returns rows", "#D9E38A", "#4B5314"),
          "reduce": ("reduces tokens", "#F5C3D6", "#6B3450"),
          "clean": ("cleans up", "#D8D8DC", "#484B54")}


def _luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    """WCAG contrast of two colours, 1 to 21."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def on(colour):
    """Black or white, whichever reads better on a colour."""
    return max("#000000", "#FFFFFF", key=lambda c: contrast(c, colour))


def _rules(theme):
    s = SURFACES[theme]
    ground, cell, line, ink, muted, mark, new = s.values()
    yield from (f".ground{{fill:{ground}}}", f".cell{{fill:{cell};stroke:{line}}}", f".new{{fill:{new}}}",
                f".line{{stroke:{line};fill:none}}", f".tick{{stroke:{muted}}}", f".t{{fill:{ink}}}",
                f".m{{fill:{muted}}}", f".mark{{fill:{mark};stroke:{ground}}}",
                f".open{{fill:{ground};stroke:{mark}}}", f".near{{stroke:{muted};fill:none}}",
                f".head{{fill:{muted}}}", f".wait{{fill:{ground};stroke:{muted}}}",
                f".over{{stroke:{ground}}}", f".edge{{stroke:{ink}}}")
    for n, colour in enumerate(RANKS[theme]):
        yield f".s{n}{{fill:{colour}}}"
        yield f".k{n}{{stroke:{colour};fill:none}}"
        yield f".x{n}{{fill:{on(colour)}}}"
    for name, (_, light, dark) in PHASES.items():
        yield f".p-{name}{{fill:{light if theme == 'light' else dark}}}"


SHAPES = (".t,.m,.x{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
          "font-size:12px}"
          ".small{font-size:10.5px}.title{font-size:14px;font-weight:600}.b{font-weight:600}"
          ".mono{font-family:ui-monospace,Menlo,Consolas,'Liberation Mono',monospace;font-size:11px}"
          ".flow{stroke-width:2.2;stroke-opacity:.85}.edge{stroke-opacity:.35}.wait{stroke-dasharray:2 2}"
          ".hollow{stroke-width:2;pointer-events:all}.over{stroke-width:3px;paint-order:stroke}"
          ".near{stroke-opacity:.7}.arrow{stroke-width:1.4;stroke-opacity:.9}")


def css():
    """Rules for light, and for dark where the reader prefers it; used by the page and by every SVG file."""
    dark = "".join(_rules("dark"))
    return SHAPES + "".join(_rules("light")) + "@media (prefers-color-scheme:dark){" + dark + "}"


def rank_class(rank):
    """Number in the class names of a rank's colour: from 8 ranks on they repeat."""
    return rank % len(RANKS["light"])
