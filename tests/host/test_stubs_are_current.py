"""Editors see every name: the generated stubs say what there is, what it takes, and what it means."""

import ast

import pytest

import epmoe
from epmoe import device, stubs
from epmoe.device import intrinsics


@pytest.mark.parametrize("path", stubs.STUBS)
def test_the_stubs_are_what_would_be_generated(path):
    text = (stubs.FOLDER / path).read_text(encoding="utf-8")
    assert text == stubs.STUBS[path](), "run EPMOE_DEVICE=sim python -m epmoe.stubs"


def test_every_public_name_is_in_the_stub():
    tree = ast.parse((stubs.FOLDER / "__init__.pyi").read_text())
    told = {a.asname for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert told == set(epmoe.__all__)


def test_every_word_is_in_the_stub_with_its_meaning():
    tree = ast.parse((stubs.FOLDER / "device" / "__init__.pyi").read_text(encoding="utf-8"))
    told = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert set(told) == set(intrinsics.INTRINSICS) and all(told.values())
    named = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert named | set(told) == set(device.__all__)
