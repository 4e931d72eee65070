"""Law: kernels name things as the reference does: of its identifiers, at least so many stand in the kernels too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = "epmoe/kernels/"
PAIRS = ("epmoe_ref/dispatch.py", "epmoe_ref/combine.py"), (KERNELS + "pairs", KERNELS + "plain")
ROWS = (
    [
        f"epmoe_ref/fused_a2a/{name}.py"
        for name in ("rows", "rows_handle", "hybrid", "hybrid_handle", "sums")
    ],
    [KERNELS + "rows"],
)  # arguments are checked, and gradients made of both phases, by the host


def trees(paths):
    """The syntax trees of files, and of those in folders."""
    for path in (ROOT / path for path in paths):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            yield ast.parse(file.read_text())


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
    """(identifiers of the reference with three letters or more, those of them that stand in the kernels)."""
    words = {word for tree in trees(reference) for word in made(tree) if len(word) > 2}
    words = {word for word in words if not word.startswith("grad_") and "_backward" not in word}
    return words, words & {word for tree in trees(kernels) for word in used(tree)}


@pytest.mark.parametrize("sides, least", [(PAIRS, 50), (ROWS, 55)], ids=["pairs", "rows"])
def test_so_many_words_are_the_references(sides, least):
    words, both = shared(*sides)
    assert len(both) >= least, f"{len(both)} of {len(words)}; not: {sorted(words - both)}"
