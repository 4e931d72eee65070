"""Writes the page's pictures: each chapter in stages 1..n as SVG and PNG for slides, and an animation."""

from pathlib import Path

from epmoe.explain import stills
from epmoe.explain.bundle import source
from epmoe.explain.story import data_of
from epmoe_ref.errors import UnavailableError

SECONDS = 2.2  # for each picture of the animation


def write(drawn, folder, recordings=()):
    """Write every stage of every chapter: (paths, notes). PNG files need resvg; the notes say if it is missing."""
    data, every = data_of(drawn, recordings)
    names = [c.name for c in every]
    made = stills.call("stills", data=data, order=names)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths, notes = [], []
    for still in made:
        path = folder / f"{names.index(still['chapter']) + 1:02}-{still['chapter']}-{still['stage']}.svg"
        path.write_text(stills.alone(still), encoding="utf-8")
        paths.append(path)
    path = folder / "animation.svg"
    path.write_text(animation(data, names), encoding="utf-8")
    try:
        paths += [_png(p) for p in list(paths)]
    except UnavailableError as error:
        notes.append(str(error))
    return [*paths, path], notes


def _png(path):
    made = path.with_suffix(".png")
    made.write_bytes(stills.png(path.read_text(encoding="utf-8")))
    return made


def animation(data, names):
    """Dispatch and combine as one animated SVG file; it stands still for readers who prefer reduced motion."""
    film = stills.call("film", data=data, order=names)
    n = film["pictures"]
    total = SECONDS * n
    rules = [
        f"g.f{i}{{animation:f{i} {total:.1f}s infinite}}@keyframes f{i}{{{_frames(thing, n)}}}"
        for i, thing in enumerate(film["things"])
    ]
    bodies = []
    for i, thing in enumerate(film["things"]):
        x, y = next(p for p in reversed(thing["at"]) if p)
        bodies.append(
            f'<g class="f{i}" transform="translate({x} {y})" opacity="{int(thing["at"][-1] is not None)}">'
            f'<g class="{thing["cls"]}">{thing["body"]}</g></g>'
        )
    style = source("stage.css") + "@media (prefers-reduced-motion:no-preference){" + "".join(rules) + "}"
    w, h = film["width"], film["height"]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w + 16}" height="{h + 16}" '
        f'viewBox="-8 -8 {w + 16} {h + 16}" role="img" aria-label="Dispatch and combine of a small world">'
        f'<style>{style}</style><rect class="ground" x="-8" y="-8" width="{w + 16}" height="{h + 16}"/>'
        f"{''.join(bodies)}</svg>\n"
    )


def _frames(thing, n):
    places = thing["at"]
    frames, last = [], thing["from"] or next(p for p in places if p)
    for i, place in enumerate(places):
        x, y = last = place or last
        value = f"{{transform:translate({x}px,{y}px);opacity:{int(place is not None)}}}"
        start, end = 100 * (i + 0.35) / n, 100 * (i + 1) / n
        frames.append(f"{start:.2f}%,{end:.2f}%{value}" if i else f"0%,{end:.2f}%{value}")
    return "".join(frames)
