"""The fast kernels name things as the reference does: two thirds of its names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = "epmoe/kernels/*.py"
PAIRS = (
    ["epmoe_ref/dispatch.py", "epmoe_ref/combine.py"],
    [SHARED, "epmoe/kernels/formats/*.py", "epmoe/kernels/pairs/*.py"],
)
ROWS = (
    [f"epmoe_ref/fused_a2a/{name}.py" for name in ("rows", "rows_handle", "hybrid", "hybrid_handle", "sums")],
    [SHARED, "epmoe/kernels/rows/**/*.py"],
)  # the host checks arguments, and makes gradients from both phases


def trees(patterns):
    """The syntax trees of the files."""
    for pattern in patterns:
        files = list(ROOT.glob(pattern))
        assert files, pattern
        yield from (ast.parse(file.read_text()) for file in files)


def made(tree):
    """Names that a module makes: functions, classes, arguments, variables, attributes; without leading underscores."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name.strip("_")
        elif isinstance(node, ast.arg):
            yield node.arg.strip("_")
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "id", getattr(node, "attr", "")).strip("_")


def used(tree):
    """All names of a module, and the fields that it names in strings."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            yield str(getattr(node, field, None) or "").strip("_")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if node.value.isidentifier() else ""


def shared(reference, kernels):
    """(names of three letters or more that the reference makes, those that the kernels use too)."""
    words = {word for tree in trees(reference) for word in made(tree) if len(word) > 2}
    words = {word for word in words if not word.startswith("grad_") and "_backward" not in word}
    return words, words & {word for tree in trees(kernels) for word in used(tree)}


@pytest.mark.parametrize("sides, least", [(PAIRS, 58), (ROWS, 64)], ids=["pairs", "rows"])
def test_kernels_use_the_references_words(sides, least):
    words, both = shared(*sides)
    assert len(both) >= least, f"{len(both)} of {len(words)}; not: {sorted(words - both)}"
