"""The page in Chromium, wide and narrow, light and dark: it loads, steps, fits, and its words do not overlap.

`python -m pytest -m browser`, after `pip install -e '.[test,browser]'` and `playwright install chromium`; a Chromium
that the system has (PATH, or EPMOE_CHROMIUM) is taken instead.
"""

import os
import shutil
from contextlib import contextmanager

import pytest
from epmoe.explain.page import page
from recorded_round import history, taken_apart

pytestmark = pytest.mark.browser
WIDTHS = (1280, 390)
WORLDS = [dict(), dict(fused=True, seed=1, ranks=4), dict(ranks=4, experts=3, top_k=3, tokens=6, seed=1),
          dict(ranks=1, experts=1, top_k=1, tokens=1),
          dict(ranks=2, experts=6, top_k=4, tokens=9, token_format="mxfp8")]

# texts of each picture that overlap each other, or that reach out of their picture
COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg.panel")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim()).map(
      (t) => [t.textContent, t.getBoundingClientRect()]);
    for (const [i, [a, p]] of texts.entries()) {
      if (p.left < frame.left - 1 || p.right > frame.right + 1 || p.top < frame.top - 1 || p.bottom > frame.bottom + 2)
        found.push(`"${a}" reaches out of "${svg.getAttribute("aria-label")}"`);
      for (const [b, q] of texts.slice(i + 1))
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
            Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
          found.push(`"${a}" and "${b}" overlap in "${svg.getAttribute("aria-label")}"`);
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("EPMOE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@contextmanager
def opened(chromium, tmp_path, width=1280, scheme="light", options=None):
    """The page, opened from disk; in the end no script may have complained, and nothing been asked of the network."""
    path = tmp_path / "explain.html"
    path.write_text(page(history(**(options or {}))), encoding="utf-8")
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    tab, complaints, asked = context.new_page(), [], []
    tab.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: complaints.append(str(e)))
    tab.on("request", lambda r: asked.append(r.url))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-ready=yes]", timeout=10_000)
    yield tab
    context.close()
    assert complaints == []
    assert [u for u in asked if not u.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("options", WORLDS, ids=str)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_nothing_overlaps(chromium, tmp_path, width, scheme, options):
    with opened(chromium, tmp_path, width, scheme, options) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(COLLISIONS) == []
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 27)")
        for n in range(3):      # in the middle of each group's time, too
            tab.evaluate("""(part) => { for (const i of document.querySelectorAll(".bar input")) {
                i.value = Math.floor(i.max * part); i.dispatchEvent(new Event("input")); } }""", n / 3)
            assert tab.evaluate(COLLISIONS) == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_check_for_overlaps_sees_one(chromium, tmp_path):
    with opened(chromium, tmp_path) as tab:
        tab.evaluate("""() => { const t = document.querySelector("#rows svg.panel text");
            t.parentNode.append(t.cloneNode(true)); t.setAttribute("x", -50); t.setAttribute("y", 12); }""")
        assert any("reaches out of" in c for c in tab.evaluate(COLLISIONS))
        tab.evaluate("document.querySelector('#rows svg.panel text').setAttribute('x', 1)")
        assert any("overlap in" in c for c in tab.evaluate(COLLISIONS))


def test_the_shown_colours_are_those_of_the_theme(chromium, tmp_path):
    fills = {}
    for scheme in ("light", "dark"):
        with opened(chromium, tmp_path, scheme=scheme) as tab:
            fills[scheme] = tab.evaluate("getComputedStyle(document.querySelector('.s0')).fill")
    assert fills == {"light": "rgb(0, 114, 178)", "dark": "rgb(77, 163, 219)"}


def test_every_moment_shows_what_was_recorded(chromium, tmp_path):
    data = taken_apart()[1].json
    with opened(chromium, tmp_path) as tab:
        section = tab.locator("#counters")
        section.locator(".first").click()
        moments = data["moments"]["all"]["moments"]
        for n, (step, says) in enumerate(moments):
            shown = tab.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#counters g[data-at]")].map(
                (g) => [g.dataset.at, g.querySelector("[data-h]").textContent]))""")
            text = section.locator(".says").inner_text()
            assert says in text and f"step {step} " in text
            if n % 10 == 0:
                _compare(data["arrays"]["histories"], shown, step)
            section.locator(".on").click()
        assert f"moment {len(moments)} of {len(moments)}" in section.locator(".says").inner_text()
        section.locator(".back").click()
        assert f"moment {len(moments) - 1} of" in section.locator(".says").inner_text()
        # the timeline's bar is the same time
        assert f"moment {len(moments) - 1} of" in tab.locator("#timeline .says").inner_text()


def _compare(histories, shown, step):
    from epmoe.explain.arrays import NOT_ARRIVED, word
    from recorded_round import place

    assert len(shown) > 60
    for at, text in shown.items():
        name, rank, index = place(at)
        values = [v for s, v in histories[name][rank][",".join(map(str, index or (0,)))] if s <= step]
        assert text == word(name, NOT_ARRIVED if values[-1] is None else values[-1]), (at, step)


def test_messages_appear_and_signals_follow(chromium, tmp_path):
    with opened(chromium, tmp_path) as tab:
        section, boxes = tab.locator("#buffers"), "document.querySelectorAll('#buffers g[data-from]')"
        section.locator(".first").click()
        assert tab.evaluate(f"[...{boxes}].every((e) => e.classList.contains('future'))")
        signals = "[...document.querySelectorAll('#buffers [data-h]')].map((e) => e.textContent)"
        assert set(tab.evaluate(signals)) == {"–"}
        section.locator(".last").click()
        assert not tab.evaluate(f"[...{boxes}].some((e) => e.classList.contains('future'))")
        assert "–" not in tab.evaluate(signals)
        section.locator(".first").click()
        section.locator(".play").click()
        tab.wait_for_function("Number(document.querySelector('#buffers input').value) >= 3", timeout=10_000)
        assert section.locator(".play").inner_text() == "Stop"


def test_pointing_at_a_value_names_its_array(chromium, tmp_path):
    for width in WIDTHS:
        with opened(chromium, tmp_path, width) as tab:
            box = tab.locator("#buffers [data-at^='dispatch_recv_count[rank 1]']").first
            box.scroll_into_view_if_needed()
            box.hover()
            text = tab.locator("#tip").inner_text()
            assert text.startswith("dispatch_recv_count[rank 1][local_expert 0, src_rank 0] = ") and "signalled" in text
            tip = tab.locator("#tip").bounding_box()
            assert tip["x"] >= 0 and tip["x"] + tip["width"] <= width
            row = tab.locator("#rows [data-at^='src_info[rank 0]']").first
            row.click()
            assert "src_info[rank 0][row 0].token = " in tab.locator("#tip").inner_text()


def test_arrows_can_be_hidden(chromium, tmp_path):
    with opened(chromium, tmp_path) as tab:
        far = ("[...document.querySelectorAll('.lanes .far')].filter("
               "(e) => getComputedStyle(e).display !== 'none').length")
        assert tab.evaluate(far) > 10
        tab.locator("#timeline input[value=far]").uncheck()
        assert tab.evaluate(far) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_stand_alone(chromium, tmp_path, scheme):
    """An SVG file opened by itself follows the reader's theme."""
    from epmoe.explain import figures

    for path in figures.write(history(), tmp_path, ("svg",)):
        context = chromium.new_context(color_scheme=scheme)
        tab = context.new_page()
        tab.goto(path.as_uri())
        ground = tab.evaluate("getComputedStyle(document.querySelector('.ground')).fill")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 27)")
        context.close()
