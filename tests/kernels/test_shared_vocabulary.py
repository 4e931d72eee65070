"""The reference and the fast kernels of pairs share their vocabulary: two thirds of the reference's identifiers."""

import ast
import builtins
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
REFERENCE = "dispatch.py", "combine.py"
OF_NUMPY = {*dir(np), *dir(np.ndarray), "axis", "mode", "bfloat16"}
FIELDS = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.FunctionDef: "name",
    ast.ClassDef: "name",
    ast.Attribute: "attr",
    ast.keyword: "arg",
}


def identifiers(paths):
    """The names in these files, without underscores in front."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    named = (getattr(node, FIELDS[type(node)]) for node in nodes if type(node) in FIELDS)
    return {name.strip("_") for name in named if name}


def test_two_thirds_of_the_references_words_are_in_the_kernels():
    kernels = ROOT / "epmoe" / "kernels"
    spoken = identifiers(ROOT / "epmoe_ref" / name for name in REFERENCE)
    spoken -= OF_NUMPY | set(dir(builtins))
    files = [
        path for part in (".", "pairs", "formats") for path in sorted((kernels / part).glob("*.py"))
    ]
    missing = spoken - identifiers(files)
    assert 3 * len(missing) <= len(spoken), f"{len(missing)} of {len(spoken)}: {sorted(missing)}"
