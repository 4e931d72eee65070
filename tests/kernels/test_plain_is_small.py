"""The plain kernels and the model of the protocol stay as short as a reader needs them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder, files, lines", [("epmoe/kernels/plain", 10, 1500), ("epmoe_ref/protocol", 5, 500)])
def test_a_folder_is_read_in_one_sitting(folder, files, lines):
    texts = [path.read_text() for path in (ROOT / folder).glob("*.py")]
    assert 0 < len(texts) <= files
    assert sum(text.count("\n") for text in texts) <= lines


def test_each_kernel_and_each_of_its_steps_has_at_most_60_lines():
    found = {}
    for path in (ROOT / "epmoe/kernels/plain").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not any(
                isinstance(n, ast.FunctionDef) for n in ast.walk(node) if n is not node
            ):
                found[f"{path.name} {node.name}"] = node.end_lineno - node.lineno + 1
    assert sum(name.endswith("_kernel") for name in found) == 6
    assert {name: n for name, n in found.items() if n > 60} == {}
