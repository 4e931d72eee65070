"""On which sides of the kernels' thresholds the worlds come, seen while they run.

A threshold is a number of the kernels that has a name (MOST_PARTS, tuning.few_tokens), in a comparison or as one of two
arguments of min or max. An edit that is off by one there changes nothing unless some world comes near.
"""

import ast
import operator
import re
from functools import lru_cache

from epmoe.mutants import edited_kernels
from epmoe.mutants.random_worlds import named

COMPARES, CHOOSES = "compare__", "choose__"
OPERATORS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
BY_NAME = {kind.__name__: op for kind, op in OPERATORS.items()} | dict(min=min, max=max)
NUMBER = re.compile(r"[A-Z][A-Z0-9_]{2,}$")
BELOW, AT, ABOVE = -1, 0, 1

EXPLAINED = {  # name of a threshold -> why worlds stay on one side of it
    "ANNOUNCED": "a value of a word that waits for its peer, used in reports of expired waits",
    "MAX_GPUS_PER_NODE": "above it the host refuses",
    "MAX_THREADS": "above it the host refuses",
    "MAX_TOP_K": "above it the host refuses",
    "lamport_bytes": "64 MiB of windows are too many for a world",
    "WARP": "below it the host refuses",
}


class _Marker(ast.NodeTransformer):
    """Calls compare__ and choose__ in the places of the thresholds in functions. found: {(file, line, text): names}."""

    def __init__(self, file):
        self.file, self.found, self.depth = file, {}, 0

    def visit_FunctionDef(self, node):
        """Numbers compared where a module is made are no thresholds."""
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    def visit_Compare(self, node):
        """A comparison of two numbers."""
        kinds = [type(op) for op in node.ops]
        operands = [node.left, *node.comparators]
        if len(kinds) != 1 or kinds[0] not in OPERATORS:
            return self.generic_visit(node)
        return self._marked(node, COMPARES, kinds[0].__name__, operands)

    def visit_Call(self, node):
        """min or max of two numbers."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("min", "max") or len(node.args) != 2:
            return self.generic_visit(node)
        return self._marked(node, CHOOSES, name, node.args)

    def _marked(self, node, call, what, operands):
        names = _names(operands[0]) | _names(operands[1])
        site = self.file, node.lineno, ast.unparse(node)
        self.generic_visit(node)
        if not names or not self.depth:
            return node
        self.found[site] = names
        # signs are those of the quantity against the threshold, whichever stands first
        turned = bool(_names(operands[0])) and not _names(operands[1])
        given = [ast.Constant(v) for v in (site, what, turned)]
        operands = (
            [node.left, *node.comparators] if isinstance(node, ast.Compare) else list(node.args)
        )
        return ast.copy_location(
            ast.Call(ast.Name(call, ast.Load()), [*given, *operands], []), node
        )


def _names(node):
    """Named numbers of an expression, outside calls but those of casts."""
    if isinstance(node, ast.Name):
        return {node.id} if NUMBER.match(node.id) else set()
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        owner = node.value.id if isinstance(node.value, ast.Name) else owner
        return {node.attr} if NUMBER.match(node.attr) or owner == "tuning" else set()
    if isinstance(node, ast.BinOp):
        return _names(node.left) | _names(node.right)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _names(node.args[0])
    return set()


def marked(file, source):
    """(code with calls at each threshold, {(file, line, text): names} of them)."""
    marker = _Marker(file)
    tree = ast.fix_missing_locations(marker.visit(ast.parse(source)))
    return compile(tree, str(edited_kernels.FOLDER / file), "exec"), marker.found


@lru_cache(None)
def _all_marked():
    return {file: marked(file, edited_kernels.source_of(file)) for file in edited_kernels.files()}


def thresholds():
    """{(file, line, text): names} of all thresholds of the kernels."""
    return {site: names for _, found in _all_marked().values() for site, names in found.items()}


def sides_in(name):
    """(the name, {threshold: sides on which this world comes}); the kernels are not edited, and must pass."""
    from epmoe.mutants.hunt import run_of

    seen = {}

    def look(site, what, turned, a, b):
        side = int(a > b) - int(a < b)
        seen.setdefault(site, set()).add(-side if turned else side)
        return BY_NAME[what](a, b)

    world = named(name)
    codes = {file: code for file, (code, _) in _all_marked().items()}
    words = {COMPARES: look, CHOOSES: look}
    kernels = edited_kernels.load(codes, constants=world.constants, names=words)
    run_of(world, kernels, 0, racecheck=False).go()
    return name, seen


def crossings(seen):
    """[(threshold, {side: names of worlds})] of all thresholds. seen: {world's name: sides_in() of it}."""
    return [
        (
            site,
            {
                side: [name for name, sides in seen.items() if side in sides.get(site, ())]
                for side in (BELOW, AT, ABOVE)
            },
        )
        for site in sorted(thresholds())
    ]


def uncrossed(found):
    """The thresholds of crossings() that no world crosses and EXPLAINED does not explain.

    A comparison must come out both ways, and min and max must take each argument.
    """
    return [
        site
        for site, worlds in found
        if not thresholds()[site] & set(EXPLAINED)
        and not (worlds[BELOW] and worlds[ABOVE] or worlds[AT] and _parts_at(site, worlds))
    ]


def _parts_at(site, worlds):
    """Whether a comparison that is seen at its threshold and on one side of it comes out both ways."""
    node = ast.parse(site[2], mode="eval").body
    if not isinstance(node, ast.Compare):
        return False
    turned = bool(_names(node.left)) and not _names(node.comparators[0])
    is_met = OPERATORS[type(node.ops[0])]
    outcomes = {is_met(-side if turned else side, 0) for side in (BELOW, AT, ABOVE) if worlds[side]}
    return len(outcomes) == 2
