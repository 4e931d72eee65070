"""Editors see every word: the generated stub says what the simulator's words take and mean."""

import ast

from epmoe import device
from epmoe.device import names, stub


def test_the_stub_is_what_would_be_generated():
    assert stub.FILE.read_text(encoding="utf-8") == stub.stub(), "run python -m epmoe.device.stub"


def test_the_stub_has_every_word_with_its_meaning():
    tree = ast.parse(stub.FILE.read_text(encoding="utf-8"))
    told = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(told) == set(names.WORDS) and all(told.values())
    named = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert named | set(told) == set(device.__all__)
