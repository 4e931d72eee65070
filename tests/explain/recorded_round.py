"""A recorded round, made once for all tests of a process, and its page taken apart."""

import json
import re
from functools import cache
from html.parser import HTMLParser

from epmoe.explain.history import History
from epmoe.explain.page import page
from epmoe.explain.recording import record
from epmoe_ref.config import EPConfig


@cache
def history(fused=False, token_format="bf16", seed=0, ranks=3, experts=2, top_k=2, tokens=4):
    hidden = 128 if token_format != "bf16" else 64
    cfg = EPConfig(ranks, experts * ranks, top_k, hidden, tokens, token_format=token_format)
    return History(record(cfg, fused=fused, seed=seed))


class Elements(HTMLParser):
    """Attributes of all elements, and the JSON of the page."""

    def __init__(self, text):
        super().__init__()
        self.found, self.json, self._into, self._open = [], {}, None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "script" and attributes.get("type") == "application/json":
            self._into = attributes["id"]
        self.found.append((tag, attributes))

    def handle_data(self, data):
        if self._into:
            self.json[self._into] = json.loads(data)
            self._into = None

    def with_attribute(self, name):
        return [a for _, a in self.found if name in a]


@cache
def taken_apart(**options):
    text = page(history(**options))
    return text, Elements(text)


PLACE = re.compile(r"(?P<name>[\w ]+)\[rank (?P<rank>\d+)\](?:\[(?P<index>[^\]]*)\])?(?:\.(?P<field>\w+))?$")
FIELDS = {"A": ("end", "count"), "src_info": ("token", "k")}


def place(words):
    """("A", 1, (0, 2, 1)) of "A[rank 1][local_expert 0, src_rank 2].count"."""
    m = PLACE.match(words)
    assert m, words
    index = tuple(int(part.split()[-1]) for part in (m["index"] or "").split(", ") if part)
    name = m["name"]
    if name in FIELDS and m["field"]:
        index += (FIELDS[name].index(m["field"]),)
    if m["field"] == "src_info":
        name = "messages"
    return name.removeprefix("dequantised "), int(m["rank"]), index
